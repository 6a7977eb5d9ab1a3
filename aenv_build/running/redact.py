"""Keeps secret values out of what is shown: whole or split over pieces of output."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from urllib.parse import quote

MARK = "***"
#: A shorter value, or line of one, cannot be told from ordinary text.
MIN_LENGTH = 4


class Redactor:
    """Replaces values, the lines of a value of several, and their base64 and URL forms."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        found: set[str] = set()
        for value in values:
            plain = value.strip()
            for text in (plain, *(line.strip() for line in plain.splitlines())):
                found |= {text, quote(text, safe=""), base64.b64encode(text.encode()).decode()}
        self._texts = sorted((text for text in found if len(text) >= MIN_LENGTH), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._texts))) if self._texts else None
        self._bytes = [text.encode() for text in self._texts]

    def text(self, text: str) -> str:
        """The text without the values."""
        return self._pattern.sub(MARK, text) if self._pattern is not None else text

    def stream(self) -> Stream:
        """For output that comes in pieces."""
        return Stream(self._bytes)


class Stream:
    """One stream of output: what may be the start of a value is held back until more has come."""

    def __init__(self, values: list[bytes]) -> None:
        self._values = values
        self._pattern = re.compile(b"|".join(map(re.escape, values))) if values else None
        self._starts = {value[:length] for value in values for length in range(1, len(value))}
        self._longest = max(map(len, values), default=1) - 1
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What can be shown by now."""
        if self._pattern is None:
            return data
        data, self._held = self._held + data, b""
        shown: list[bytes] = []
        while True:
            until = self._unfinished(data)
            match = self._pattern.search(data)
            if match is None or match.start() >= until:
                self._held = data[until:]
                return b"".join([*shown, data[:until]])
            shown += [data[: match.start()], MARK.encode()]
            data = data[match.end() :]

    def end(self) -> bytes:
        """The rest: nothing more comes."""
        rest, self._held = self._held, b""
        return self._pattern.sub(MARK.encode(), rest) if self._pattern is not None else rest

    def _unfinished(self, data: bytes) -> int:
        """Where a value may begin that is not whole yet."""
        first = max(0, len(data) - self._longest)
        return next((at for at in range(first, len(data)) if data[at:] in self._starts), len(data))
