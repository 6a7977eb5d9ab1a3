"""Reads of chunks for all who wait: from whichever of a blob's sources has them, and tried again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from aenv_run.blocks.budget import Counters
from aenv_run.blocks.supplier import PATIENCE_S, Supplier
from aenv_run.errors import AenvError, CorruptData

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
#: Where another source has the chunk too, one that does not answer is not waited for longer, in the first round.
OTHERS_LIMIT_S = 3.0


class Source(Protocol):
    """Where a blob's chunks come from. Blocking; called by several threads."""

    def read(self, first: int, count: int) -> list[bytes]:
        """``count`` neighbouring chunks from ``first``, each verified. ``CorruptData``, ``StoreUnavailable``, …"""


@dataclass(frozen=True)
class Supply:
    """A source, and the store that it reads."""

    supplier: Supplier
    source: Source


@dataclass(frozen=True)
class Try(Generic[T]):
    """One way to have something: ask this store for it by this call."""

    supplier: Supplier
    call: Callable[[], T]


@dataclass
class Fetcher:
    """What all blobs of a server share. Called by one thread, the event loop's."""

    patience_s: float = PATIENCE_S
    others_limit_s: float = OTHERS_LIMIT_S
    counters: Counters = field(default_factory=Counters)
    suppliers: dict[str, Supplier] = field(default_factory=dict)

    def supplier(self, name: str) -> Supplier:
        """The store of that repository."""
        if name not in self.suppliers:
            self.suppliers[name] = Supplier(name, self.patience_s)
        return self.suppliers[name]

    def count(self, **more: int) -> None:
        """Add to the counters."""
        for name, number in more.items():
            setattr(self.counters, name, getattr(self.counters, name) + number)

    async def chunks(self, supplies: Sequence[Supply], first: int, count: int) -> list[bytes | AenvError]:
        """Each chunk, or why it cannot be had; the others of a damaged one are had all the same."""
        try:
            tries = [Try(one.supplier, _reading(one.source, first, count)) for one in supplies]
            data = await self.patiently(tries)
            self.count(fetches=1, fetched_bytes=sum(len(one) for one in data))
            return list(data)
        except CorruptData as error:
            if count > 1:
                halves = (first, count // 2), (first + count // 2, count - count // 2)
                parts = await asyncio.gather(*(self.chunks(supplies, *half) for half in halves))
                return [*parts[0], *parts[1]]
            self.count(failures=1)
            return [error]
        except AenvError as error:
            self.count(failures=count)
            return [error] * count

    async def patiently(self, tries: Sequence[Try[T]]) -> T:
        """What the first of them gives, all tried again until there is none from which more can be hoped.

        Then the error of one that may have it another time, or else the first one's.
        """
        begun_s, pause_s, limit_s = time.monotonic(), FIRST_PAUSE_S, self.others_limit_s
        left, damaged, errors = list(tries), set[int](), dict[int, AenvError]()
        while True:
            left.sort(key=lambda one: one.supplier.is_failing)
            for one in list(left):
                others = sum(other.supplier.dead is None for other in left) > 1
                try:
                    return await one.supplier.ask(one.call, limit_s if others else None)
                except CorruptData as error:
                    errors[id(one)] = error
                    if id(one) in damaged:  # twice: it was no accident of the way here
                        left.remove(one)
                    damaged.add(id(one))
                except AenvError as error:
                    errors[id(one)] = error
                    if not error.retryable:
                        left.remove(one)
            hopeful = [one for one in left if one.supplier.dead is None]
            if not hopeful or time.monotonic() - begun_s > 2 * self.patience_s:
                raise next((one for one in errors.values() if one.retryable), next(iter(errors.values())))
            await hopeful[-1].supplier.rest(pause_s)
            pause_s, limit_s = min(2 * pause_s, LONGEST_PAUSE_S), 2 * limit_s

    def close(self) -> None:
        """Begin nothing more."""
        for one in self.suppliers.values():
            one.close()


def _reading(source: Source, first: int, count: int) -> Callable[[], list[bytes]]:
    return lambda: source.read(first, count)
