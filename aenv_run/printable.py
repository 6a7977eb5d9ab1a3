"""Text that others made, as a terminal may show it."""

from __future__ import annotations

MARK = "�"


def printable(text: str) -> str:
    """One line: control characters, line ends too, and what reorders or hides text become a mark.

    For names and sentences from guests, archives, recipes and repositories: an escape sequence in one of them
    would be obeyed by the terminal.
    """
    return "".join(c if c.isprintable() else MARK for c in text)


def printable_lines(text: str) -> str:
    """As ``printable``, with the line ends and tabs of a longer text kept."""
    return "".join(c if c.isprintable() or c in "\n\t" else MARK for c in text)
