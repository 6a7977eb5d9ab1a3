"""Pages of a list: where the last one ended is a token that holds its last row's time and id."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from aenv_run.errors import InvalidInput

T = TypeVar("T")
Place = tuple[float, str]
MAX_PAGE = 100
NEXT_TOKEN = "x-next-token"
_TOKEN = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)__([A-Za-z0-9._:/-]{1,256})")


def token_of(place: Place) -> str:
    """For the next page."""
    return base64.urlsafe_b64encode(f"{place[0]:.9f}__{place[1]}".encode()).decode().rstrip("=")


def place_of(token: str) -> Place:
    """Where the last page ended; ``InvalidInput`` for what no page ever gave."""
    try:
        text = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode("ascii")
    except (binascii.Error, ValueError):
        text = ""
    if not (match := _TOKEN.fullmatch(text)):
        raise InvalidInput(
            "nextToken is not one that this server gave", fix="begin with the first page, without it"
        )
    return float(match[1]), match[2]


def page(
    rows: Sequence[T], place: Callable[[T], Place], *, token: str | None, limit: int | None, oldest_first: bool
) -> tuple[list[T], str | None]:
    """The rows after ``token``, at most ``limit``, by time and then id; and the token of the next page, if any.

    Rows that come or go meanwhile move no other row to another page.
    """

    def key(row: T) -> Place:
        time_s, id = place(row)
        return round(time_s, 9), id

    ordered = sorted(rows, key=key, reverse=not oldest_first)
    if token:
        after = place_of(token)
        ordered = [row for row in ordered if (key(row) > after if oldest_first else key(row) < after)]
    if limit is None or len(ordered) <= limit:
        return ordered, None
    return ordered[:limit], token_of(key(ordered[limit - 1]))
