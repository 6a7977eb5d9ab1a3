"""How people write a snapshot."""

from __future__ import annotations

import re
from dataclasses import dataclass

from aenv_run.catalog.records import Version, checked
from aenv_run.errors import InvalidInput
from aenv_run.types import Name, Tag


@dataclass(frozen=True)
class Reference:
    """How people write a snapshot: ``swe-task``, ``swe-task:3``, ``swe-task:latest``, an id or its start.

    Hex digits alone, 12 or more, are always an id: no name may look so.
    """

    id_prefix: str | None = None
    name: Name | None = None
    version: Version | None = None
    tag: Tag | None = None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """``InvalidInput`` says what is allowed."""
        if _looks_like_id(text):
            return cls(id_prefix=text)
        name, colon, rest = text.partition(":")
        try:
            if not colon:
                return cls(name=Name(name))
            if rest.isascii() and rest.isdigit():
                return cls(name=Name(name), version=checked(int(rest[:20])))
            return cls(name=Name(name), tag=Tag(rest))
        except InvalidInput as error:
            raise InvalidInput(
                f"{text[:120]!r} names no snapshot: {error.message}",
                fix="write NAME, NAME:VERSION, NAME:TAG, or the first 12 or more digits of a snapshot id",
            ) from None


def require_publishable(name: Name) -> None:
    """``InvalidInput`` for a name that would be read as an id; to be asked before the work for it is done."""
    if _looks_like_id(name):
        raise InvalidInput(f"{name!r} cannot be a name: it reads like a snapshot id", fix="add a letter g-z")


def _looks_like_id(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{12,64}", text) is not None
