"""Byte ranges as HTTP writes them: inclusive at both ends, counted from zero."""

from __future__ import annotations

import re
from collections.abc import Iterable

from spans.span import Span
from spans.spanset import SpanSet

_PIECE = re.compile(r"(\d*)-(\d*)")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


def format_spans(spans: Iterable[Span]) -> str:
    """``0-9,20-29`` for [0, 10) and [20, 30); nothing for no spans."""
    return ",".join(f"{span.start}-{span.stop - 1}" for span in spans)


def range_header(spans: Iterable[Span]) -> str:
    """The value of a Range header that asks for ``spans``."""
    text = format_spans(spans)
    if not text:
        raise ValueError("a Range header must ask for at least one byte")
    return f"bytes={text}"


def parse_spans(text: str, size: int | None = None) -> SpanSet:
    """The set that ``text`` names. ``20-`` and ``-5`` count from the end, so they need ``size``."""
    spans = SpanSet()
    for piece in filter(None, (part.strip() for part in text.split(","))):
        spans.add(_parse_piece(piece, size))
    return spans


def _parse_piece(piece: str, size: int | None) -> Span:
    match = _PIECE.fullmatch(piece)
    if not match or piece == "-":
        raise ValueError(f"not a byte range: {piece!r}")
    first, last = match.groups()
    if first and last:
        return Span(int(first), int(last) + 1)
    if size is None:
        raise ValueError(f"{piece!r} counts from the end, and the size is not known")
    if first:
        return Span(int(first), size)
    return Span(max(size - int(last), 0), size)


def parse_content_range(value: str) -> tuple[Span, int | None]:
    """The span that a Content-Range header answers with, and the whole size unless it is ``*``."""
    match = _CONTENT_RANGE.fullmatch(value.strip())
    if not match:
        raise ValueError(f"not a Content-Range: {value!r}")
    first, last, size = match.groups()
    return Span(int(first), int(last) + 1), None if size == "*" else int(size)
