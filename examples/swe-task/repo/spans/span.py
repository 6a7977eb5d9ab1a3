"""One half-open range of integers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Span:
    """The integers ``start <= n < stop``. Never empty, never negative."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.start < 0:
            raise ValueError(f"span starts below zero: {self.start}")
        if self.stop <= self.start:
            raise ValueError(f"span is empty: [{self.start}, {self.stop})")

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, number: int) -> bool:
        return self.start <= number < self.stop

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"

    def overlaps(self, other: Span) -> bool:
        """True when the two share at least one integer."""
        return self.start < other.stop and other.start < self.stop

    def intersection(self, other: Span) -> Span | None:
        """The integers in both, or None when there are none."""
        if not self.overlaps(other):
            return None
        return Span(max(self.start, other.start), min(self.stop, other.stop))

    def split(self, size: int) -> Iterator[Span]:
        """Consecutive pieces of at most ``size`` integers; only the last may be shorter."""
        if size < 1:
            raise ValueError(f"pieces must hold at least one integer: {size}")
        for start in range(self.start, self.stop, size):
            yield Span(start, min(start + size, self.stop))
