"""``$NAME``, ``${NAME}``, ``${NAME:-word}`` and ``${NAME:+word}`` in text, as a Dockerfile's ENV has them.

Text is parsed once into parts. What a lookup does not know yet stays a reference, so that a Dockerfile may speak
of its image's variables before anybody has looked at the image.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_DEPTH = 20


@dataclass(frozen=True)
class Reference:
    """A variable. ``operator`` is empty, ``:-``, ``-``, ``:+``, ``+``, ``:?`` or ``?``; ``word`` follows."""

    name: str
    operator: str = ""
    word: tuple[Part, ...] = ()

    def alternative(self, value: str | None) -> tuple[Part, ...] | None:
        """What stands for it, given the variable's value; None where it is that value itself.

        ``ValueError`` of ``${NAME:?word}`` without one.
        """
        there = bool(value) if ":" in self.operator else value is not None
        match self.operator.lstrip(":"):
            case "-":
                return None if there else self.word
            case "+":
                return self.word if there else ()
            case "?" if not there:
                raise ValueError(f"the variable {self.name} is not set: {render(self.word)}")
        return None


Part: TypeAlias = str | Reference
#: Reads the word of ``${NAME:-word}`` that begins there: its parts, and where its brace is.
ReadWord: TypeAlias = Callable[[str, int, int], tuple[tuple[Part, ...], int]]
#: The value of a variable; None if it has none.
Lookup: TypeAlias = Callable[[str], str | None]


class Unknown(Exception):
    """Raised by a lookup for a variable of which it cannot say whether it is set."""


def parse(text: str) -> tuple[Part, ...]:
    """The parts; ``$$`` is one ``$``. ``ValueError`` says what is wrong with a reference."""
    parts, end = _parse(text, 0, 0)
    assert end == len(text)
    return parts


def _parse(text: str, at: int, depth: int) -> tuple[tuple[Part, ...], int]:
    if depth > MAX_DEPTH:
        raise ValueError(f"${{…}} are nested deeper than {MAX_DEPTH} levels")
    parts: list[Part] = []
    plain = ""
    while at < len(text):
        char = text[at]
        if depth and char == "}":
            break
        if char != "$":
            plain, at = plain + char, at + 1
            continue
        if text[at + 1 : at + 2] == "$":
            plain, at = plain + "$", at + 2
            continue
        reference, at = reference_at(text, at, depth, _parse)
        if isinstance(reference, str):
            plain += reference
            continue
        if plain:
            parts.append(plain)
        parts.append(reference)
        plain = ""
    if plain:
        parts.append(plain)
    return tuple(parts), at


def reference_at(text: str, at: int, depth: int, read_word: ReadWord) -> tuple[Part, int]:
    """The reference that begins with the ``$`` there, and where it ends; a ``$`` before nothing is itself."""
    if text[at + 1 : at + 2] != "{":
        found = _NAME.match(text, at + 1)
        return (Reference(found[0]), found.end()) if found else ("$", at + 1)
    found = _NAME.match(text, at + 2)
    if found is None:
        raise ValueError(f"{text[at : at + 20]!r}: write ${{NAME}}")
    operator = re.match(r":?[-+?]|", text[found.end() :])
    assert operator is not None
    word, end = read_word(text, found.end() + len(operator[0]), depth + 1)
    if end >= len(text):
        raise ValueError(f"{text[at : at + 20]!r}: the closing brace is missing")
    if word and not operator[0]:
        raise ValueError(f"{text[at : end + 1][:40]!r}: after the name only :-, -, :+, + and :? are understood")
    return Reference(found[0], operator[0], word), end + 1


def resolve(parts: tuple[Part, ...], lookup: Lookup) -> tuple[Part, ...]:
    """Put in what the lookup knows; what it does not know stays, with what is known in it."""
    result: list[Part] = []
    for part in parts:
        if isinstance(part, str):
            result.append(part)
            continue
        try:
            value = lookup(part.name)
        except Unknown:
            result.append(Reference(part.name, part.operator, resolve(part.word, lookup)))
            continue
        other = part.alternative(value)
        result += [value or ""] if other is None else resolve(other, lookup)
    return tuple(result)


def render(parts: tuple[Part, ...]) -> str:
    """As text that parses to the same."""
    return "".join(
        part.replace("$", "$$") if isinstance(part, str) else f"${{{part.name}{part.operator}{render(part.word)}}}"
        for part in parts
    )


def literal(parts: tuple[Part, ...]) -> str | None:
    """The text, if nothing in it is unknown."""
    known = [part for part in parts if isinstance(part, str)]
    return "".join(known) if len(known) == len(parts) else None


def expand(text: str, lookup: Lookup) -> str:
    """The text with every variable's value; ``ValueError`` as ``parse``."""
    found = literal(resolve(parse(text), lookup))
    assert found is not None
    return found
