"""RUN: its command, and the mounts that a recipe has a word for."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, field

from aenv_build.dockerfile.source import Dockerfile, Heredoc, Instruction, heredoc_marks
from aenv_build.dockerfile.words import json_list, split_flags

#: Runs a document that names its own interpreter: as a file, which is gone afterwards.
_AS_A_FILE = 'f=$(mktemp) && printf %s "$1" >"$f" && chmod 0700 "$f" && "$f"; code=$?; rm -f "$f"; exit "$code"'
_SECRET = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}$")
_CACHE_ID = re.compile(r"[a-z0-9]([a-z0-9_.-]{0,62}[a-z0-9])?$")
_OWNER = {"uid", "gid", "mode"}
_NO_MOUNT = {
    "bind": "COPY what it needs, and remove it at the end of the same stage or copy on from there",
    "tmpfs": "a step's memory file systems are not kept; use /dev/shm, or leave it out",
    "ssh": "give the key as a secret: --mount=type=secret",
}


@dataclass(frozen=True)
class RunCommand:
    """What of a RUN becomes a step."""

    words: tuple[str, ...]
    caches: tuple[tuple[str, str | None], ...] = ()
    secrets: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())


def run_command(
    file: Dockerfile, one: Instruction, text: str, shell: tuple[str, ...], workdir: str | None
) -> RunCommand:
    """Of one RUN, whose flags have their variables put in."""
    flags, rest = split_flags(text)
    caches: list[tuple[str, str | None]] = []
    secrets: list[str] = []
    warnings: list[str] = []
    for name, value in flags:
        if name == "mount":
            _mount(file, one, value, workdir, caches, secrets, warnings)
        elif (name, value) not in {("network", "default"), ("security", "sandbox")}:
            raise file.error(one.line, f"RUN: --{name}={value} is not something that a step has")
    return RunCommand(_words(file, one, rest, shell), tuple(caches), tuple(secrets), tuple(warnings))


def command_words(text: str, shell: tuple[str, ...]) -> tuple[str, ...]:
    """A JSON list as it is; text for the shell."""
    words = json_list(text)
    return tuple(words) if words is not None else (*shell, text)


def _words(file: Dockerfile, one: Instruction, rest: str, shell: tuple[str, ...]) -> tuple[str, ...]:
    if not rest:
        raise file.error(one.line, "RUN has no command")
    if not one.heredocs:
        return command_words(rest, shell)
    marks = heredoc_marks(rest, file.escape)
    if len(marks) == 1 and marks[0].group(0) == rest:
        document = one.heredocs[0].content
        if document.startswith("#!"):
            return ("/bin/sh", "-c", _AS_A_FILE, "sh", document)
        return (*shell, document)
    return (*shell, "\n".join([rest, *(_document(each) for each in one.heredocs)]))


def _document(heredoc: Heredoc) -> str:
    return f"{heredoc.content}{heredoc.name}"


def _known(file: Dockerfile, one: Instruction, options: dict[str, str], kind: str, known: set[str]) -> None:
    for name in options:
        if name not in known:
            raise file.error(one.line, f"RUN: a mount of the type {kind} has no option {name!r}")


def _mount(
    file: Dockerfile,
    one: Instruction,
    text: str,
    workdir: str | None,
    caches: list[tuple[str, str | None]],
    secrets: list[str],
    warnings: list[str],
) -> None:
    options = dict(option.strip().partition("=")[::2] for option in text.split(","))
    kind = options.pop("type", "bind")
    target = next((options.pop(key) for key in ("target", "dst", "destination") if key in options), "")
    if kind in _NO_MOUNT:
        raise file.error(
            one.line, f"RUN: a mount of the type {kind} is not something that a step has", fix=_NO_MOUNT[kind]
        )
    if kind == "cache":
        _known(
            file, one, options, kind, {"id", "sharing", "from", "source", "src", *_OWNER, "ro", "readonly", "rw"}
        )
        if "from" in options or "source" in options or "src" in options:
            raise file.error(
                one.line, "RUN: a cache that begins with files of a stage is not something that a step has"
            )
        if not target.startswith("/") and workdir is None:
            raise file.error(
                one.line, f"RUN: where the cache {target!r} lies is not known", fix="write an absolute path"
            )
        if (id := options.get("id")) is not None and not _CACHE_ID.match(id):
            id = re.sub(r"[^a-z0-9]+", "-", id.lower()).strip("-") or None
        caches.append((posixpath.normpath(posixpath.join(workdir or "/", target)), id))
        if ignored := sorted({*_OWNER, "ro", "readonly"} & options.keys()):
            warnings.append(f"a cache's {', '.join(ignored)} is not used: it belongs to the step's user")
        if "sharing" in options:
            warnings.append("a cache's sharing is not used: each build has its own copy, and the last one's stays")
    elif kind == "secret":
        _known(file, one, options, kind, {"id", "env", "required", *_OWNER})
        if ignored := sorted(_OWNER & options.keys()):
            warnings.append(f"a secret's {', '.join(ignored)} is not used: the step's user reads it")
        if options.get("required", "true").lower() in ("false", "0"):
            warnings.append("a secret's required=false is not used: one that is not given is an error")
        id = options.get("id") or posixpath.basename(target)
        if not _SECRET.match(id):
            raise file.error(
                one.line,
                f"RUN: {id!r} is not a secret's name here",
                fix="letters, digits and _, such as NPM_TOKEN",
            )
        if target not in {"", f"/run/secrets/{id}"} or options.get("env", id) != id:
            raise file.error(
                one.line,
                f"RUN: the secret {id} is found as the variable {id} and in /run/secrets/{id}, nowhere else",
                fix="read it there",
            )
        secrets.append(id)
    else:
        raise file.error(one.line, f"RUN: there is no mount of the type {kind!r}")
