"""One blob while it is read by range: what is here is given at once, the rest is fetched once for all who wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from aenv_run.blocks.budget import Budget
from aenv_run.blocks.chunk_file import ChunkFile
from aenv_run.blocks.fetch import Fetcher, Supply
from aenv_run.errors import AenvError

#: Chunks in one ranged read: enough that the way to the store costs little, few enough that nobody waits long.
RUN_CHUNKS = 8
#: How far a sequential reader is read ahead of, at most, and how many readers are told apart.
AHEAD_CHUNKS, STREAMS = 32, 8
#: Chunks that are remembered as damaged.
MAX_BAD = 64


@dataclass
class _Stream:
    """A reader that goes through the blob: the next chunk it will want, and how far is fetched for it."""

    at: int
    until: int
    window: int = 0


class ServedBlob:
    """Called by one thread, the event loop's."""

    def __init__(
        self,
        file: ChunkFile,
        supplies: Sequence[Supply],
        fetcher: Fetcher,
        budget: Budget,
        told: Callable[[AenvError | None], None],
        kept: Callable[[int], None],
    ) -> None:
        """``told`` hears what is wrong, None when nothing is any more; ``kept`` of bytes that take space.

        The same bytes may be had from several ``supplies``: the next one is asked where one fails.
        """
        self.file = file
        self.supplies = list(supplies)
        self._fetcher, self._budget = fetcher, budget
        self._told, self._kept = told, kept
        self._flying: dict[int, asyncio.Future[bytes]] = {}
        self._wanted: set[int] = set()
        self._bad: dict[int, AenvError] = {}
        self._streams: list[_Stream] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def owner(self) -> str:
        """Whose reads these are where there is room for so many: those of its first store."""
        return self.supplies[0].supplier.name

    def now(self, offset: int, length: int) -> bytes | None:
        """The bytes if all of them are here."""
        first, last = self._chunks(offset, length)
        self.file.look()
        if not all(self.file.has(index) for index in range(first, last + 1)):
            return None
        self._fetcher.count(hits=last + 1 - first)
        self._follow(first, last, missed=False)
        return b"".join(self._piece(index, offset, length) for index in range(first, last + 1))

    async def read(self, offset: int, length: int) -> bytes:
        """The bytes; fetched, if they are not here. The error says why they cannot be had."""
        first, last = self._chunks(offset, length)
        self.file.look()
        # What is here is taken now: while the rest is waited for it may be dropped.
        parts: list[bytes | asyncio.Future[bytes]] = []
        missed = False
        for index in range(first, last + 1):
            if self.file.has(index):
                self._fetcher.count(hits=1)
                parts.append(self._piece(index, offset, length))
            else:
                missed = True
                parts.append(self._want(index))
        self._follow(first, last, missed=missed)
        done: list[bytes] = []
        for index, part in zip(range(first, last + 1), parts, strict=True):
            if isinstance(part, bytes):
                done.append(part)
                continue
            start, end = self._within(index, offset, length)
            done.append((await asyncio.shield(part))[start:end])
        return b"".join(done)

    async def fill(self, at_once: int = 4) -> None:
        """Fetch all that is missing. The first error ends it."""
        size = self.file.table.chunk_bytes
        limit = asyncio.Semaphore(at_once)

        async def one(first: int, count: int) -> None:
            async with limit:
                end = min((first + count) * size, self.file.table.blob_bytes)
                await self.read(first * size, end - first * size)

        missing = [index for index in self.file.missing() if not self.file.has(index)]
        async with asyncio.TaskGroup() as tasks:
            for first, count in runs(missing, RUN_CHUNKS):
                tasks.create_task(one(first, count))

    def recovered(self) -> None:
        """A store that counted as dead answers again: what only that was wrong with is not wrong any more."""
        self._set_bad({index: error for index, error in self._bad.items() if not error.retryable})

    async def close(self) -> None:
        """Whoever waits is told that it is over."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._budget.remove_file(self.file)
        self.file.close()

    # -- pieces --------------------------------------------------------------------------------------------

    def _chunks(self, offset: int, length: int) -> tuple[int, int]:
        size = self.file.table.chunk_bytes
        return offset // size, (offset + length - 1) // size

    def _within(self, index: int, offset: int, length: int) -> tuple[int, int]:
        """Which part of the chunk belongs to the range."""
        start = index * self.file.table.chunk_bytes
        return max(0, offset - start), min(self.file.length(index), offset + length - start)

    def _piece(self, index: int, offset: int, length: int) -> bytes:
        start, end = self._within(index, offset, length)
        self._budget.use(self.file, index)
        return self.file.read(index, start, end - start)

    def _want(self, index: int, *, ahead: bool = False) -> asyncio.Future[bytes]:
        """The chunk, once it is fetched: the fetch that is under way, or one that begins when all have asked."""
        found = self._flying.get(index)
        if found is not None:
            if not ahead:
                self._fetcher.count(shared=1)
            return found
        self._fetcher.count(**{"read_ahead" if ahead else "misses": 1})
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bytes] = loop.create_future()
        future.add_done_callback(_seen)
        self._flying[index] = future
        if not self._wanted:
            loop.call_soon(self._begin)
        self._wanted.add(index)
        return future

    def _begin(self) -> None:
        """One ranged read for neighbours, whoever wanted them."""
        wanted, self._wanted = sorted(self._wanted), set()
        for first, count in runs(wanted, RUN_CHUNKS):
            task = asyncio.create_task(self._fetch(first, count))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _fetch(self, first: int, count: int) -> None:
        flying = {index: self._flying[index] for index in range(first, first + count)}
        try:
            got = await self._fetcher.chunks(self.supplies, first, count)
        except BaseException:
            for index, future in flying.items():
                del self._flying[index]
                future.cancel()
            raise
        for (index, future), one in zip(flying.items(), got, strict=True):
            del self._flying[index]
            if isinstance(one, AenvError):
                future.set_exception(one)
            else:
                future.set_result(one)
        self._keep({index: one for index, one in zip(flying, got, strict=True) if isinstance(one, bytes)})
        self._tell(dict(zip(flying, got, strict=True)))

    def _keep(self, chunks: dict[int, bytes]) -> None:
        if not chunks:
            return
        with suppress(OSError), self.file.changing():  # whoever waits has the bytes, whatever this disk does
            for index, data in chunks.items():
                if self.file.put(index, data):
                    self._budget.use(self.file, index)
        self._kept(sum(len(data) for data in chunks.values()))  # also of what found no room, so that room is made

    def _tell(self, got: dict[int, bytes | AenvError]) -> None:
        """What is wrong now: a damaged chunk until it is right, a dead store until it answers."""
        answered = any(isinstance(one, bytes) for one in got.values())
        still = {index: error for index, error in self._bad.items() if not (answered and error.retryable)}
        for index, one in got.items():
            still.pop(index, None)
            if isinstance(one, AenvError):
                still[index] = one
        self._set_bad(still)

    def _set_bad(self, bad: dict[int, AenvError]) -> None:
        before = list(self._bad.values())
        self._bad = dict(list(bad.items())[-MAX_BAD:])
        if list(self._bad.values()) != before:
            self._told(list(self._bad.values())[-1] if self._bad else None)

    def _follow(self, first: int, last: int, *, missed: bool) -> None:
        """Read ahead of whoever reads one chunk after the other, farther each time."""
        for stream in self._streams:
            if stream.at - 1 <= first <= stream.at:
                break
        else:
            if missed:
                self._streams = [_Stream(last + 1, last + 1), *self._streams[: STREAMS - 1]]
            return
        if last < stream.at:
            return
        stream.at = last + 1
        stream.window = min(max(2, 2 * stream.window), AHEAD_CHUNKS)
        stream.until = max(stream.until, stream.at)
        if stream.until - stream.at > stream.window // 2:
            return
        end = min(stream.at + stream.window, self.file.count)
        for index in range(stream.until, end):
            if not self.file.has(index):
                self._want(index, ahead=True)
        stream.until = max(stream.until, end)


def _seen(future: asyncio.Future[bytes]) -> None:
    """Nobody may wait for a chunk that was read ahead."""
    if not future.cancelled():
        future.exception()


def runs(indexes: list[int], most: int) -> list[tuple[int, int]]:
    """Neighbours together, at most so many: first and count of each run."""
    found: list[tuple[int, int]] = []
    for index in indexes:
        if found and sum(found[-1]) == index and found[-1][1] < most:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((index, 1))
    return found
