"""Kinds of text in what a repository keeps. Whoever can write the store can write it, so each kind has its bounds.

Honest values meet them all. They make nothing trusted: what people see goes through ``printable``.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

#: Control characters, and what else ends a line.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
#: Linux: of a path with its end (PATH_MAX), and of "NAME=VALUE" with its end (MAX_ARG_STRLEN), in bytes.
PATH_BYTES, ENVIRONMENT_BYTES = 4096, 128 << 10
MAX_VARIABLES = 4096
#: Of a snapshot: images have some that are documents. Its manifest bounds all together.
MAX_LABELS, MAX_LABEL_KEY, MAX_LABEL_VALUE = 1024, 1024, 1 << 20


def one_line(text: str) -> str:
    """The text; ``ValueError`` if it has a line end or another control character."""
    if found := _CONTROL.search(text):
        raise ValueError(f"has the control character {found[0]!r}; it is one line of text")
    return text


def without_nul(text: str) -> str:
    """The text; ``ValueError`` if it has a NUL."""
    if "\0" in text:
        raise ValueError("has a NUL")
    return text


def absolute_path(text: str) -> str:
    """The path; ``ValueError`` for one that is relative, too long or no line."""
    if not one_line(text).startswith("/"):
        raise ValueError("is no absolute path")
    if len(text.encode(errors="surrogatepass")) >= PATH_BYTES:
        raise ValueError(f"has {PATH_BYTES} bytes or more, which no path may have")
    return text


def environment(pairs: dict[str, str]) -> dict[str, str]:
    """The variables; ``ValueError`` for what no process can be given."""
    for name, value in pairs.items():
        if not name or "=" in name or "\0" in name:
            raise ValueError(f"{name[:80]!r} is no name of an environment variable")
        if "\0" in value:
            raise ValueError(f"the value of {name[:80]!r} has a NUL")
        if len(f"{name}={value}".encode(errors="surrogatepass")) >= ENVIRONMENT_BYTES:
            raise ValueError(f"{name[:80]!r} has {ENVIRONMENT_BYTES} bytes or more, which no process can be given")
    return pairs


Line = Annotated[str, AfterValidator(one_line)]
ShortLine = Annotated[str, Field(max_length=256), AfterValidator(one_line)]
Moment = Annotated[str, Field(max_length=64), AfterValidator(one_line)]
Environment = Annotated[dict[str, str], Field(max_length=MAX_VARIABLES), AfterValidator(environment)]
Labels = Annotated[
    dict[
        Annotated[str, Field(min_length=1, max_length=MAX_LABEL_KEY), AfterValidator(one_line)],
        Annotated[str, Field(max_length=MAX_LABEL_VALUE), AfterValidator(without_nul)],
    ],
    Field(max_length=MAX_LABELS),
]
