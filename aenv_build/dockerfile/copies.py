"""COPY and ADD: which files of the context they take, and where those go."""

from __future__ import annotations

import glob
import os
import posixpath
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path

from aenv_build.dockerfile.source import Dockerfile, Instruction
from aenv_build.planning.ignore import Ignore

_ZSTD = b"\x28\xb5\x2f\xfd"
_URL = re.compile(r"[a-z][a-z0-9+.-]*://|git@", re.IGNORECASE)


@dataclass(frozen=True)
class BuildContext:
    """The folder that is copied from. ``folder`` is where the recipe lies: its paths are relative to it."""

    root: Path
    folder: Path | None
    ignore: Path | None

    @classmethod
    def of(cls, root: Path, dockerfile: Path, folder: Path | None, file: Dockerfile) -> BuildContext:
        """With the file of rules that Docker would take: the Dockerfile's own, else the context's."""
        root = root.resolve()
        own = dockerfile.with_name(dockerfile.name + ".dockerignore")
        if own.is_file():
            if own.parent.resolve() != root:
                raise file.error(
                    1,
                    f"{own.name} does not lie in the context's folder, {root}",
                    fix=f"name it .dockerignore, in {root}",
                )
            return cls(root, folder, root / own.name)
        rules = root / ".dockerignore"
        return cls(root, folder, rules if rules.is_file() else None)

    def shown(self, path: Path) -> str:
        """As the recipe names it."""
        return str(path) if self.folder is None else os.path.relpath(path, self.folder.resolve())

    def find(self, pattern: str) -> list[Path]:
        """What it matches, in order; never outside of the context, and not what is left out."""
        clean = posixpath.normpath("/" + pattern).lstrip("/")
        if not re.search(r"[*?\[\\]", clean):
            found = [clean] if clean == "" or os.path.lexists(self.root / clean) else []
        else:
            found = sorted(glob.glob(_as_glob(clean), root_dir=self.root, include_hidden=True))  # noqa: PTH207
        paths = [self.root / one for one in found]
        inside = [path for path in paths if path.resolve().is_relative_to(self.root)]
        return [path for path in inside if path.exists() and not self._left_out(path)]

    def _left_out(self, path: Path) -> bool:
        if self.ignore is None:
            return False
        rules = Ignore.named(self.ignore, path)
        return rules.hides("") and not (rules.takes_in_again and path.is_dir())


def require_local(file: Dockerfile, one: Instruction, source: str) -> None:
    """ADD may fetch; a recipe's copy does not."""
    if _URL.match(source):
        raise file.error(
            one.line,
            f"{one.keyword} {source[:200]}: files are not fetched by it",
            fix="fetch it in a RUN (curl, and sha256sum -c), or into the context and COPY it",
        )


def is_archive(file: Dockerfile, one: Instruction, path: Path) -> bool:
    """Whether ADD would unpack it: a tar with something in it, compressed or not."""
    if not path.is_file():
        return False
    with path.open("rb") as data:
        if data.read(4) == _ZSTD:
            raise file.error(
                one.line,
                f"{one.keyword} {path.name}: what is compressed with zstd is not unpacked here",
                fix="COPY it, and unpack it in a RUN; or compress it with gzip",
            )
    try:
        with tarfile.open(path) as tar:
            return tar.next() is not None
    except (tarfile.TarError, EOFError, OSError):
        return False


def _as_glob(pattern: str) -> str:
    """A pattern of Go (path/filepath, Match) as one of Python."""

    def one(found: re.Match[str]) -> str:
        if found[1]:  # an escaped sign
            return f"[{found[1]}]" if found[1] in "*?[" else found[1]
        inside = re.sub(r"\\(.)", r"\1", found[3])
        if found[2]:
            return f"[!{inside}]"
        return f"[{inside[1:]}!]" if inside.startswith("!") else f"[{inside}]"

    return re.sub(r"\\(.)|\[(\^?)((?:\\.|[^\]\\])+)\]", one, pattern)


def target_of(dest: str, workdir: str | None) -> str | None:
    """The target in the sandbox, with a slash where files go into it; None where nobody knows what ``..`` is."""
    is_folder = dest.endswith(("/", "/.")) or dest in {".", ""}
    if not dest.startswith("/") and workdir is None:
        if ".." in dest.split("/"):
            return None
        path = posixpath.normpath(dest or ".")
        return path + "/" if is_folder else path
    path = posixpath.normpath(posixpath.join(workdir or "/", dest))
    path = "/" + path.lstrip("/")
    return path.rstrip("/") + "/" if is_folder or path == workdir else path
