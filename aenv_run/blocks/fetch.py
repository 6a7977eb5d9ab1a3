"""Reads of a store for all who wait: bounded in number and in time, and tried again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from aenv_run.blocks.budget import Counters
from aenv_run.errors import AenvError, CorruptData, StoreUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Reads of the store at a time. Over a link that is short of them one stream does not fill it.
AT_ONCE = 8
#: How long a store may fail before a read becomes an I/O error in the guest.
PATIENCE_S = 30.0
#: After that, for so long, each read is tried once only: else a guest that reads on would hang in steps of it.
GIVEN_UP_S, LAST_TRY_S = 10.0, 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0


class Source(Protocol):
    """Where a blob's chunks come from. Blocking; called by several threads."""

    def read(self, first: int, count: int) -> list[bytes]:
        """``count`` neighbouring chunks from ``first``, each verified. ``CorruptData``, ``StoreUnavailable``, …"""


@dataclass
class Fetcher:
    """What all blobs of a server share."""

    patience_s: float = PATIENCE_S
    counters: Counters = field(default_factory=Counters)
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2 * AT_ONCE, "fetch"))
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    _given_up_s: float = float("-inf")

    def count(self, **more: int) -> None:
        """Add to the counters."""
        for name, number in more.items():
            setattr(self.counters, name, getattr(self.counters, name) + number)

    async def chunks(self, source: Source, first: int, count: int) -> list[bytes | AenvError]:
        """Each chunk, or why it cannot be had; the others of a damaged one are had all the same."""
        try:
            data = await self.patiently(lambda: source.read(first, count))
            self.count(fetches=1, fetched_bytes=sum(len(one) for one in data))
            return list(data)
        except CorruptData as error:
            if count > 1:
                halves = (first, count // 2), (first + count // 2, count - count // 2)
                parts = await asyncio.gather(*(self.chunks(source, *half) for half in halves))
                return [*parts[0], *parts[1]]
            self.count(failures=1)
            return [error]
        except AenvError as error:
            self.count(failures=1)
            return [error] * count

    async def patiently(self, call: Callable[[], T]) -> T:
        """What the blocking ``call`` gives, tried again until the patience is over; then its last error."""
        begun_s = time.monotonic()
        hopeless = begun_s - self._given_up_s < GIVEN_UP_S
        limit_s = min(self.patience_s, LAST_TRY_S) if hopeless else self.patience_s
        pause_s, damaged = FIRST_PAUSE_S, False
        while True:
            left_s = begun_s + limit_s - time.monotonic()
            try:
                value = await self._once(call, max(0.05, left_s))
                self._given_up_s = float("-inf")
                return value
            except CorruptData:
                if damaged:  # twice: it was no accident of the way here
                    raise
                damaged = True
            except AenvError as error:
                if not error.retryable:
                    raise
                if hopeless or time.monotonic() + pause_s > begun_s + limit_s:
                    self._given_up_s = time.monotonic()
                    raise
                log.info("trying again: %s", error.message)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _once(self, call: Callable[[], T], limit_s: float) -> T:
        """A thread that hangs in a store is left alone; nobody waits for it."""
        try:
            async with asyncio.timeout(limit_s), self._slots:
                return await asyncio.get_running_loop().run_in_executor(self._pool, call)
        except TimeoutError as error:
            raise StoreUnavailable(
                f"the repository's store did not answer in {limit_s:.0f} s", fix="see whether it can be reached"
            ) from error
        except OSError as error:
            raise StoreUnavailable(f"the repository's store cannot be read: {error}", fix="try again") from error

    def close(self) -> None:
        """Begin nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
