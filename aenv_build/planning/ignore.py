""".aenvignore: what a copy leaves behind, by the rules of .dockerignore."""

from __future__ import annotations

import os
import posixpath
import re
from dataclasses import dataclass
from pathlib import Path

from aenv_run.errors import InvalidInput

NAME = ".aenvignore"
MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Rule:
    """One line: what it matches, and whether that is taken in again."""

    pattern: re.Pattern[str]
    takes_in: bool


@dataclass(frozen=True)
class Ignore:
    """The rules of one file for what is copied from ``base``, a path relative to the file's folder."""

    file: Path
    rules: tuple[Rule, ...]
    base: str = ""

    @classmethod
    def beside(cls, folder: Path, copied: Path) -> Ignore | None:
        """Of the recipe's folder, or of what is copied if that lies elsewhere; None without such a file."""
        base = os.path.relpath(copied, folder)
        if base == ".." or base.startswith("../"):
            folder, base = copied, ""
        file = folder / NAME
        try:
            return cls._of(file, file.read_bytes(), base)
        except (FileNotFoundError, NotADirectoryError):
            return None

    @classmethod
    def named(cls, file: Path, copied: Path) -> Ignore:
        """The rules of that file, which are relative to its folder; what is copied must lie there."""
        base = os.path.relpath(copied, file.parent)
        if base == ".." or base.startswith("../"):
            raise InvalidInput(f"{copied} does not lie in the folder of {file}, to which its rules are relative")
        return cls._of(file, file.read_bytes(), base)

    @classmethod
    def _of(cls, file: Path, data: bytes, base: str) -> Ignore:
        if len(data) > MAX_BYTES:
            raise InvalidInput(f"{file} is larger than {MAX_BYTES >> 20} MiB")
        rules = parse(data.decode(errors="surrogateescape"), str(file))
        return cls(file, rules, "" if base == "." else base)

    @property
    def takes_in_again(self) -> bool:
        """Whether something below what is left out may be copied."""
        return any(rule.takes_in for rule in self.rules)

    def hides(self, name: str) -> bool:
        """Whether a path below the base is left out: the last rule that matches it, or a folder of it, says so."""
        path = posixpath.join(self.base, name) if name else self.base
        parts = path.split("/") if path else []
        steps = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        hidden = False
        for rule in self.rules:
            if hidden is rule.takes_in and any(rule.pattern.fullmatch(step) for step in steps):
                hidden = not rule.takes_in
        return hidden


def parse(text: str, file: str) -> tuple[Rule, ...]:
    """The rules of a file, in order. ``InvalidInput`` names the line of a pattern that is none."""
    rules = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
        if line.startswith("#") or not (pattern := line.strip()):
            continue
        takes_in = pattern.startswith("!")
        pattern = pattern.removeprefix("!").strip()
        clean = posixpath.normpath(pattern).lstrip("/") if pattern else ""
        if not clean:
            raise InvalidInput(f"{file}:{number}: a '!' alone names nothing", fix="write the path after it")
        if clean == ".":
            continue
        rules.append(Rule(_compiled(clean, f"{file}:{number}"), takes_in))
    return tuple(rules)


_SPECIAL = re.compile(r"\*\*/|\*\*|\*|\?|\[\^?(?:\\.|[^\]\\])+\]|\\.|.", re.DOTALL)


def _compiled(pattern: str, where: str) -> re.Pattern[str]:
    r"""``*`` and ``?`` stay within one name, ``**`` is any folders, ``[a-z]`` and ``\`` as in a shell."""
    parts = []
    for token in _SPECIAL.findall(pattern):
        match token:
            case "**/":
                parts.append("(?:.*/)?")
            case "**":
                parts.append(".*")
            case "*":
                parts.append("[^/]*")
            case "?":
                parts.append("[^/]")
            case "[" | "\\":
                raise InvalidInput(f"{where}: {pattern!r} is no pattern", fix=f"write \\{token} for the character")
            case _ if token.startswith("["):
                parts.append(token.replace("[[", "[\\["))
            case _:
                parts.append(re.escape(token[-1]))
    try:
        return re.compile("".join(parts), re.DOTALL)
    except re.error as error:
        raise InvalidInput(f"{where}: {pattern!r} is no pattern: {error}") from error
