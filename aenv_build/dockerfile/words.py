"""Words of an instruction: flags, JSON lists, quotes, and variables."""

from __future__ import annotations

import json
import re

from aenv_build.dockerfile.source import raw_words
from aenv_build.language.expansion import MAX_DEPTH, Lookup, Part, literal, reference_at, resolve

#: A shell's own parameters, such as $1 and $$: a Dockerfile has none, so they are empty.
_SPECIAL = re.compile(r"[0-9]+|[@*#?$!-]")
_FLAG = re.compile(r"--([a-z][a-z-]*)(?:=(.*))?$", re.DOTALL)


def parts_of(word: str, escape: str) -> tuple[Part, ...]:
    """A word without its quotes, its variables as references. ``ValueError`` says what is wrong."""
    return _parts(word, 0, 0, escape)[0]


def _parts(word: str, at: int, depth: int, escape: str) -> tuple[tuple[Part, ...], int]:
    """From there to the end, or inside of ``${NAME:-…}`` (``depth``) to its brace: quotes begin anew in it."""
    if depth > MAX_DEPTH:
        raise ValueError(f"${{…}} are nested deeper than {MAX_DEPTH} levels")
    parts: list[Part] = []
    plain, quote = "", ""
    while at < len(word):
        char = word[at]
        if depth and not quote and char == "}":
            break
        if quote != "'" and char == escape:
            kept = at + 1 < len(word) and quote == '"' and word[at + 1] not in f'"${escape}'
            plain += word[at : at + 2] if kept else word[at + 1 : at + 2]
            at += 2
        elif char in "'\"" and quote in ("", char):
            quote, at = "" if quote else char, at + 1
        elif char == "$" and quote != "'" and (special := _SPECIAL.match(word, at + 1)):
            at = special.end()
        elif char == "$" and quote != "'":
            part, at = reference_at(word, at, depth, lambda text, at, depth: _parts(text, at, depth, escape))
            if isinstance(part, str):
                plain += part
                continue
            if plain:
                parts.append(plain)
            parts.append(part)
            plain = ""
        else:
            plain, at = plain + char, at + 1
    if quote:
        raise ValueError(f"a quote is not closed: {word[:40]}")
    return ((*parts, plain) if plain else tuple(parts)), at


def expanded(word: str, escape: str, lookup: Lookup) -> tuple[Part, ...]:
    """The word with what is known put in."""
    return resolve(parts_of(word, escape), lookup)


def split_flags(text: str) -> tuple[list[tuple[str, str]], str]:
    """``--name=value`` at the start, and the rest."""
    flags = []
    while text.startswith("--"):
        word, *rest = text.split(None, 1)
        found = _FLAG.match(word)
        if found is None:
            break
        flags.append((found[1], found[2] if found[2] is not None else ""))
        text = rest[0] if rest else ""
    return flags, text


def json_list(text: str) -> list[str] | None:
    """``["a", "b"]`` as Docker takes it; None where it is none, and so a command for the shell."""
    if not text.startswith("["):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, list) and all(isinstance(one, str) for one in found) else None


def pairs(text: str, escape: str) -> list[tuple[str, str]]:
    """``a=b c="d e"``, or the old form ``a b c``: names and raw values. ``ValueError`` where it is neither."""
    words = raw_words(text, escape)
    if not words:
        raise ValueError("a name and a value are missing")
    if "=" not in words[0]:
        old = text.split(None, 1)
        if len(old) < 2:
            raise ValueError(f"{old[0]!r} has no value")
        return [(old[0], old[1].strip())]
    found = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ValueError(f"{word[:40]!r} is not NAME=VALUE")
        found.append((known_text(name, escape), value))
    return found


def known_text(word: str, escape: str) -> str:
    """The word without quotes; a ``$`` in it is a ``$``."""
    return literal(parts_of(word.replace("$", f"{escape}$"), escape)) or ""
