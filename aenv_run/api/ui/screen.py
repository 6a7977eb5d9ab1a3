"""A terminal's screen kept by the server: the browser is sent the lines that changed, as text and colours.

So the page needs no terminal emulator, and what a guest writes never reaches the browser as anything but text.
"""

from __future__ import annotations

from itertools import groupby
from typing import TypeAlias

import pyte
from pyte.screens import Char

MAX_COLUMNS, MAX_ROWS = 400, 200

#: Foreground, background (names of pyte such as ``red`` and ``default``, or six hex digits), and the styles that
#: apply of ``bold``, ``underline``, ``reverse``.
Look: TypeAlias = tuple[str, str, str]
#: The private mode in which cursor keys send SS3 sequences (DECCKM), as pyte keeps it: shifted by five bits.
_APPLICATION_KEYS = 1 << 5


class Screen:
    """Feed it what the guest writes; ``changes`` is what the browser does not have yet."""

    def __init__(self, columns: int, rows: int) -> None:
        self._screen = pyte.Screen(*_bounded(columns, rows))
        self._stream = pyte.ByteStream(self._screen)

    def feed(self, data: bytes) -> None:
        """Bytes of the terminal, cut anywhere. A sequence that the emulator does not survive is left out."""
        try:
            self._stream.feed(data)
        except (ValueError, IndexError, KeyError, TypeError, AttributeError):
            self._stream = pyte.ByteStream(self._screen)

    def resize(self, columns: int, rows: int) -> None:
        """The window has another size now; every line is sent again."""
        columns, rows = _bounded(columns, rows)
        self._screen.resize(rows, columns)
        self._screen.dirty.update(range(rows))

    def changes(self) -> dict[str, object]:
        """The changed lines by number, and the cursor's column and row (none while it is hidden)."""
        screen, cursor = self._screen, self._screen.cursor
        dirty = sorted(number for number in screen.dirty if number < screen.lines)
        screen.dirty.clear()
        return {
            "lines": {str(number): self._runs(number) for number in dirty},
            "cursor": None if cursor.hidden else [min(cursor.x, screen.columns - 1), cursor.y],
            "rows": screen.lines,
            "application_keys": _APPLICATION_KEYS in screen.mode,
        }

    def _runs(self, number: int) -> list[list[str]]:
        """``[text, foreground, background, styles]`` for each run of one look; blanks at the end are left out."""
        line = self._screen.buffer[number]
        chars = [line[column] for column in range(self._screen.columns)]
        while chars and chars[-1].data == " " and _look(chars[-1]) == ("default", "default", ""):
            chars.pop()
        return [["".join(char.data for char in run), *look] for look, run in groupby(chars, _look)]


def _look(char: Char) -> Look:
    styles = {"bold": char.bold, "underline": char.underscore, "reverse": char.reverse}
    return char.fg, char.bg, " ".join(name for name, applies in styles.items() if applies)


def _bounded(columns: int, rows: int) -> tuple[int, int]:
    return max(2, min(columns, MAX_COLUMNS)), max(2, min(rows, MAX_ROWS))
