"""A set of integers, held as the fewest spans."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from spans.span import Span


class SpanSet:
    """A mutable set of non-negative integers.

    Invariant: the spans are sorted, disjoint, and never touch each other, so equal sets are equal lists. Starts
    and stops are two lists, so that both can be searched by bisection.
    """

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for span in spans:
            self.add(span)

    def __iter__(self) -> Iterator[Span]:
        return map(Span, self._starts, self._stops)

    def __len__(self) -> int:
        """The number of spans, not of integers: see ``total``."""
        return len(self._starts)

    def __contains__(self, number: int) -> bool:
        index = bisect_right(self._starts, number) - 1
        return index >= 0 and number < self._stops[index]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SpanSet):
            return NotImplemented
        return self._starts == other._starts and self._stops == other._stops

    __hash__ = None  # mutable

    def __repr__(self) -> str:
        return f"SpanSet({', '.join(map(str, self))})"

    @property
    def total(self) -> int:
        """The number of integers in the set."""
        return sum(self._stops) - sum(self._starts)

    def covers(self, span: Span) -> bool:
        """True when every integer of ``span`` is in the set."""
        index = bisect_right(self._starts, span.start) - 1
        return index >= 0 and span.stop <= self._stops[index]

    def add(self, span: Span) -> None:
        """Put every integer of ``span`` into the set."""
        first = bisect_right(self._stops, span.start)
        last = bisect_right(self._starts, span.stop)
        start, stop = span.start, span.stop
        if first < last:
            start = min(start, self._starts[first])
            stop = max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def discard(self, span: Span) -> None:
        """Take every integer of ``span`` out of the set; those not in it are ignored."""
        first = bisect_right(self._stops, span.start)
        last = bisect_left(self._starts, span.stop)
        if first >= last:
            return
        starts, stops = [], []
        if self._starts[first] < span.start:
            starts.append(self._starts[first])
            stops.append(span.start)
        if span.stop < self._stops[last - 1]:
            starts.append(span.stop)
            stops.append(self._stops[last - 1])
        self._starts[first:last] = starts
        self._stops[first:last] = stops

    def gaps(self, within: Span) -> Iterator[Span]:
        """The spans of ``within`` that are not in the set, in order."""
        position = within.start
        for index in range(bisect_right(self._stops, position), len(self)):
            if self._starts[index] >= within.stop:
                break
            if self._starts[index] > position:
                yield Span(position, self._starts[index])
            position = self._stops[index]
        if position < within.stop:
            yield Span(position, within.stop)

    def __or__(self, other: SpanSet) -> SpanSet:
        return SpanSet([*self, *other])

    def __sub__(self, other: SpanSet) -> SpanSet:
        result = SpanSet(self)
        for span in other:
            result.discard(span)
        return result

    def __and__(self, other: SpanSet) -> SpanSet:
        return SpanSet(both for own in self for span in other if (both := own.intersection(span)))
