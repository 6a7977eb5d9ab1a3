"""A Dockerfile's text as instructions: directives, comments, continued lines and heredocs, each with its line."""

from __future__ import annotations

import re
from dataclasses import dataclass

from aenv_run.errors import RecipeError

MAX_BYTES = 1 << 20
INSTRUCTIONS = frozenset(
    {"ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "MAINTAINER"}
    | {"ONBUILD", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"}
)
_DIRECTIVE = re.compile(r"#\s*([A-Za-z]+)\s*=\s*(.+?)\s*$")
_SYNTAX = re.compile(r"(?:^|/)docker/dockerfile(?:-upstream)?(?:[:@]|$)")
_DIRECTIVES = frozenset({"syntax", "escape", "check"})
_HEREDOC = re.compile(r"""\d*<<(-?)(['"]?)([^<'"\s]+)\2$""")
_WITH_HEREDOCS = frozenset({"RUN", "COPY", "ADD"})


@dataclass(frozen=True)
class Heredoc:
    """A document that follows its instruction. ``expands``: its name stood without quotes."""

    name: str
    content: str
    expands: bool


@dataclass(frozen=True)
class Instruction:
    """One instruction: its word in capitals, what follows on the (joined) line, and its documents."""

    keyword: str
    text: str
    line: int
    heredocs: tuple[Heredoc, ...] = ()


@dataclass(frozen=True)
class Dockerfile:
    """All of a file."""

    file: str
    escape: str
    instructions: tuple[Instruction, ...]

    def error(self, line: int, message: str, *, fix: str = "") -> RecipeError:
        """An error at a line of it."""
        return RecipeError(f"{self.file}:{line}: {message}", fix=fix)


def read(data: bytes, file: str) -> Dockerfile:
    """Parse it; ``RecipeError`` names the line of what is none."""
    if len(data) > MAX_BYTES:
        raise RecipeError(f"{file}:1: the Dockerfile is larger than {MAX_BYTES >> 10} KiB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{file}:{data.count(10, 0, error.start) + 1}: not UTF-8 text") from None
    if "\0" in text:
        raise RecipeError(f"{file}:{text[: text.index(chr(0))].count(chr(10)) + 1}: a NUL is no text")
    return _Reader(text.replace("\r\n", "\n").split("\n"), file).read()


class _Reader:
    def __init__(self, lines: list[str], file: str) -> None:
        self._lines = lines
        self._file = file
        self._at = 0
        self._escape = "\\"

    def _error(self, line: int, message: str) -> RecipeError:
        return RecipeError(f"{self._file}:{line}: {message}")

    def read(self) -> Dockerfile:
        self._directives()
        found = []
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if not line.strip() or line.lstrip().startswith("#"):
                self._at += 1
                continue
            found.append(self._instruction())
        return Dockerfile(self._file, self._escape, tuple(found))

    def _directives(self) -> None:
        while self._at < len(self._lines) and (directive := _DIRECTIVE.match(self._lines[self._at].lstrip())):
            name, value = directive[1].lower(), directive[2]
            if name not in _DIRECTIVES:
                return
            if name == "syntax" and not _SYNTAX.search(value):
                raise self._error(
                    self._at + 1, f"the syntax {value[:80]!r} is another language than a Dockerfile's"
                )
            if name == "escape":
                if value not in {"\\", "`"}:
                    raise self._error(self._at + 1, f"escape is \\ or `, not {value!r}")
                self._escape = value
            self._at += 1

    def _instruction(self) -> Instruction:
        number = self._at + 1
        text = self._joined().strip()
        keyword, _, rest = re.sub(r"\s", " ", text, count=1).partition(" ")
        keyword = keyword.upper()
        if keyword not in INSTRUCTIONS:
            raise self._error(number, f"{keyword[:40]!r} is no instruction of a Dockerfile")
        rest = rest.strip()
        heredocs = self._heredocs(rest, number) if keyword in _WITH_HEREDOCS else ()
        return Instruction(keyword, rest, number, heredocs)

    def _joined(self) -> str:
        """One line with those that it is continued on; comments and empty lines between them do not count."""
        parts: list[str] = []
        while self._at < len(self._lines):
            line = self._lines[self._at]
            self._at += 1
            if parts and (not line.strip() or line.lstrip().startswith("#")):
                continue
            stripped = line.rstrip(" \t")
            if not stripped.endswith(self._escape) or stripped.endswith(self._escape * 2):
                parts.append(line)  # two of them end the line, as they do for Docker
                break
            parts.append(stripped[:-1])
        return "".join(parts)

    def _heredocs(self, rest: str, number: int) -> tuple[Heredoc, ...]:
        return tuple(self._document(mark, number) for mark in heredoc_marks(rest, self._escape))

    def _document(self, mark: re.Match[str], number: int) -> Heredoc:
        lines: list[str] = []
        while self._at < len(self._lines):
            line = self._lines[self._at]
            self._at += 1
            shown = line.lstrip("\t") if mark[1] else line
            if shown == mark[3]:
                return Heredoc(mark[3], "".join(f"{one}\n" for one in lines), expands=not mark[2])
            lines.append(shown)
        raise self._error(number, f"the document <<{mark[3]} has no end")


def heredoc_marks(text: str, escape: str) -> list[re.Match[str]]:
    """Words such as ``<<EOF``, in order; not those in quotes."""
    return [found for word in raw_words(text, escape) if (found := _HEREDOC.match(word))]


def raw_words(text: str, escape: str) -> list[str]:
    """Words as they stand, quotes and all."""
    words, word, quote, at = [], "", "", 0
    while at < len(text):
        char = text[at]
        if char == escape and quote != "'" and at + 1 < len(text):
            word, at = word + text[at : at + 2], at + 2
            continue
        if char in "'\"" and quote in ("", char):
            quote = "" if quote else char
        if char in " \t" and not quote:
            if word:
                words.append(word)
            word = ""
        else:
            word += char
        at += 1
    return [*words, word] if word else words
