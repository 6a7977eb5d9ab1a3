"""What a download still has to ask for."""

from __future__ import annotations

import json

from spans.span import Span
from spans.spanset import SpanSet
from spans.text import format_spans, parse_spans


class Download:
    """The state of one download of ``size`` bytes, whose parts may arrive in any order and more than once."""

    def __init__(self, size: int) -> None:
        self.whole = Span(0, size)
        self.received = SpanSet()

    @property
    def complete(self) -> bool:
        """True when every byte is here."""
        return self.received.covers(self.whole)

    @property
    def progress(self) -> float:
        """The part of the bytes that is here, from 0 to 1."""
        return self.received.total / len(self.whole)

    def record(self, offset: int, length: int) -> None:
        """Note that ``length`` bytes from ``offset`` are here."""
        if length == 0:
            return
        part = Span(offset, offset + length)
        if part.stop > self.whole.stop:
            raise ValueError(f"{part} goes beyond the end at {self.whole.stop}")
        self.received.add(part)

    def forget(self, offset: int, length: int) -> None:
        """Note that these bytes are damaged and must come again."""
        if length > 0:
            self.received.discard(Span(offset, offset + length))

    def requests(self, limit: int, slack: int = 0) -> list[Span]:
        """The spans to ask for next, each of at most ``limit`` bytes.

        Two missing spans with at most ``slack`` received bytes between them are asked for as one: fetching a few
        bytes again is cheaper than one more request.
        """
        joined: list[Span] = []
        for gap in self.received.gaps(self.whole):
            if joined and gap.start - joined[-1].stop <= slack:
                joined[-1] = Span(joined[-1].start, gap.stop)
            else:
                joined.append(gap)
        return [piece for span in joined for piece in span.split(limit)]

    def dumps(self) -> str:
        """The state as one line of JSON, to be kept beside the unfinished file."""
        return json.dumps({"size": len(self.whole), "received": format_spans(self.received)})

    @classmethod
    def loads(cls, text: str) -> Download:
        """The state that ``dumps`` wrote."""
        state = json.loads(text)
        download = cls(state["size"])
        for span in parse_spans(state["received"]):
            download.record(span.start, len(span))
        return download
