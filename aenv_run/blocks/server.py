"""The block server: connections of engines, the blobs that they read, and the bound on what is kept of them."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from aenv_run.blocks.budget import Budget
from aenv_run.blocks.chunk_file import ChunkFile, Table, lacking_bytes
from aenv_run.blocks.connection import Connection
from aenv_run.blocks.exports import Export, Exports
from aenv_run.blocks.fetch import Fetcher, Source, Supply, Try
from aenv_run.blocks.in_flight import Room, Unsent
from aenv_run.blocks.served_blob import ServedBlob
from aenv_run.blocks.supplier import Supplier, in_own_thread
from aenv_run.cache_limit import in_use, trim
from aenv_run.errors import AenvError, CorruptData, StoreUnavailable
from aenv_run.threads import in_thread

log = logging.getLogger(__name__)

#: A blob that nobody reads is closed after so long: who opens it once often opens it again.
LINGER_S = 10.0
#: An export whose chunk table is here needs no store to be opened.
OPEN_LIMIT_S = 5.0
HOUSEKEEPING_S = 15.0
#: New bytes after which the bound is looked at.
LARGEST_STEP_BYTES = 8 << 20


class Opened(Protocol):
    """What a server needs of a repository for one blob. Blocking."""

    def __call__(self, export: Export, kept_table: Path) -> tuple[Table, Source]:
        """The blob's table, verified, from ``kept_table`` if it is there, and where its chunks are read."""


@dataclass
class OpenBlob:
    """One blob that somebody reads, or did a moment ago."""

    served: ServedBlob
    export: Export
    #: Those that it is read from.
    repositories: set[str]
    users: int = 0
    closing: asyncio.TimerHandle | None = None
    promoting: bool = False
    #: It is whole and yet not the blob that the manifest says it is: chunk table and digest contradict each other.
    is_false: bool = False


@dataclass
class BlockServer:
    """Serves until ``close``. ``holders``: see ``Exports``.

    ``take_in`` makes a whole file a blob of the cache (``BlobCache.take_in``).
    """

    root: Path
    opened: Opened
    limit_bytes: int
    fetcher: Fetcher
    take_in: Callable[[Export, Path], None]
    holders: Callable[[], Iterable[Path]] = tuple
    fill_idle: bool = False
    housekeeping_s: float = HOUSEKEEPING_S
    _blobs: dict[str, OpenBlob] = field(default_factory=dict)
    _opening: dict[str, asyncio.Task[OpenBlob]] = field(default_factory=dict)
    _budget: Budget = field(default_factory=Budget)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _new_bytes: int = 0
    _shrinking: bool = False
    connections: set[Connection] = field(default_factory=set)
    last_use_s: float = field(default_factory=time.monotonic)
    room: Room = field(default_factory=Room)
    unsent: Unsent = field(default_factory=Unsent)

    def __post_init__(self) -> None:
        self.exports = Exports(self.root, self.holders)

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections from here to ``close``."""
        self.exports.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: Connection(self), sock=listener)
        self.begin(self._keep_house())

    async def close(self) -> None:
        """End all connections; engines that are told to, connect to the next server."""
        self._server.close()
        for connection in set(self.connections):
            connection.abort()
        for task in set(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for blob in self._blobs.values():
            if blob.closing is not None:
                blob.closing.cancel()
            await self._close_blob(blob)
        self._blobs.clear()
        self.fetcher.close()
        self.unsent.close()

    def begin(self, work: object) -> None:
        """Run a coroutine by the side."""
        assert asyncio.iscoroutine(work)
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def blobs(self) -> list[OpenBlob]:
        """Those that are open."""
        return list(self._blobs.values())

    # -- blobs ---------------------------------------------------------------------------------------------

    async def open(self, name: str) -> ServedBlob:
        """The blob of an export, for one more user; ``release`` it."""
        export = await asyncio.to_thread(self.exports.find, name)
        blob = self._blobs.get(export.data)
        if blob is None:
            task = self._opening.get(export.data)
            if task is None:
                task = self._opening[export.data] = asyncio.create_task(self._open(export))
                task.add_done_callback(lambda _: self._opening.pop(export.data, None))
            blob = await asyncio.shield(task)
        blob.users += 1
        if export.repository not in blob.repositories:
            await self._add_source(blob, export)
        if blob.closing is not None:
            blob.closing.cancel()
            blob.closing = None
        return blob.served

    def release(self, served: ServedBlob) -> None:
        """One user less."""
        self.last_use_s = time.monotonic()
        blob = next((one for one in self._blobs.values() if one.served is served), None)
        if blob is None:
            return
        blob.users -= 1
        if blob.users == 0:
            unused = blob
            loop = asyncio.get_running_loop()
            blob.closing = loop.call_later(LINGER_S, lambda: self.begin(self._close_unused(unused)))

    def note_unread(self, served: ServedBlob, error: Exception) -> None:
        """An engine is about to be told an I/O error."""
        why = error if isinstance(error, AenvError) else StoreUnavailable(f"{type(error).__name__}: {error}")
        for blob in self._blobs.values():
            if blob.served is served:
                try:
                    self.exports.note_unread(blob.export, why)
                except OSError as problem:
                    log.error("that blob %s could not be read is not noted: %s", blob.export.blob.digest, problem)

    async def _open(self, export: Export) -> OpenBlob:
        """From all repositories of which the bytes are known to be served."""
        alike = [export, *await asyncio.to_thread(self.exports.alike, export)]
        try:
            table, source, used = await self._opened(alike)
            if table.blob_bytes != export.blob.size_bytes:
                raise CorruptData(f"the chunk table of blob {export.blob.digest} is that of another size")
        except AenvError as error:
            self.exports.tell(export, error)
            raise
        self.exports.tell(export, None)
        self.exports.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with in_use(self.root):
            file = ChunkFile(self.exports.data(export), table)
        with suppress(OSError):
            self.exports.note_unread(export, None)
        self._budget.add_file(file)
        served = ServedBlob(
            file,
            [Supply(self._supplier(used), source)],
            self.fetcher,
            self._budget,
            lambda error: self._told(export, error),
            self._kept,
        )
        blob = OpenBlob(served, export, {used.repository})
        for one in alike:
            if one.repository not in blob.repositories:
                await self._add_source(blob, one)
        self._blobs[export.data] = blob
        log.info("serving %s: %d chunks, %d not here", export.blob.digest, file.count, len(file.missing()))
        return blob

    async def _opened(self, exports: list[Export]) -> tuple[Table, Source, Export]:
        if self.exports.table(exports[0]).exists():
            with suppress(AenvError, OSError, TimeoutError):
                return await self._without_a_store(exports[0])
        tries = [Try(self._supplier(one), self._opening_call(one)) for one in exports]
        return await self.fetcher.patiently(tries)

    async def _without_a_store(self, export: Export) -> tuple[Table, Source, Export]:
        async with asyncio.timeout(OPEN_LIMIT_S):
            return await in_own_thread(self._opening_call(export))

    async def _add_source(self, blob: OpenBlob, export: Export) -> None:
        """The same bytes from another repository. Its table is here, so that nothing is asked of its store."""
        blob.repositories.add(export.repository)
        try:
            _, source, _ = await self._without_a_store(export)
        except (AenvError, OSError, TimeoutError) as error:
            log.warning("%s is no source of blob %s: %s", export.repository, export.blob.digest, error)
            return
        blob.served.supplies.append(Supply(self._supplier(export), source))

    def _opening_call(self, export: Export) -> Callable[[], tuple[Table, Source, Export]]:
        return lambda: (*self.opened(export, self.exports.table(export)), export)

    def _supplier(self, export: Export) -> Supplier:
        supplier = self.fetcher.supplier(export.repository)
        supplier.recovered = self._recovered
        return supplier

    def _recovered(self) -> None:
        for blob in self._blobs.values():
            blob.served.recovered()

    async def _close_unused(self, blob: OpenBlob) -> None:
        if blob.users or blob.promoting or self._blobs.get(blob.export.data) is not blob:
            return
        del self._blobs[blob.export.data]
        await self._close_blob(blob)

    async def _close_blob(self, blob: OpenBlob) -> None:
        whole = blob.served.file.is_whole
        await blob.served.close()
        if whole:  # it has its name in the cache of blobs
            self.exports.data(blob.export).unlink(missing_ok=True)

    def _told(self, export: Export, error: AenvError | None) -> None:
        if error is not None:
            log.error("blob %s: %s: %s", export.blob.digest, error.code, error.message)
        self.exports.tell(export, error)

    # -- what is kept --------------------------------------------------------------------------------------

    def _kept(self, size_bytes: int) -> None:
        self._new_bytes += size_bytes
        step_bytes = max(min(self.limit_bytes // 8, LARGEST_STEP_BYTES), self.limit_bytes // 64)
        if self._new_bytes > step_bytes and not self._shrinking:
            self._shrinking = True
            self.begin(self._shrink_once())

    async def _shrink_once(self) -> None:
        try:
            await self.shrink()
        finally:
            self._shrinking = False

    async def shrink(self) -> None:
        """Within the bound again, and the disk not full: first what nobody reads, then chunks of what is read."""
        self._new_bytes = 0
        try:
            left = (await in_thread(trim, self.root, self.limit_bytes)).left
            over_bytes = max(left.own_bytes - self.limit_bytes, lacking_bytes(self.exports.directory))
            if over_bytes > 0:
                freed_bytes = self._budget.shrink(over_bytes + self.limit_bytes // 16)
                self.fetcher.count(dropped_bytes=freed_bytes)
        except OSError as error:
            log.error("the cache %s could not be kept within its bound: %s", self.root, error)

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(min(self.housekeeping_s, 1.0 if self.fill_idle else self.housekeeping_s))
            for blob in list(self._blobs.values()):
                if not blob.served.file.is_there():
                    self._begin_anew(blob)
                if not (blob.promoting or blob.is_false or blob.served.file.is_whole):
                    await self._promote(blob)
            if not self._shrinking and self._blobs:
                self._shrinking = True
                await self._shrink_once()

    def _begin_anew(self, blob: OpenBlob) -> None:
        """Somebody emptied the cache: the file takes space, and nobody would find it again."""
        old = blob.served.file
        try:
            self.exports.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with in_use(self.root):
                file = ChunkFile(old.path, old.table)
        except (AenvError, OSError) as error:
            log.error("the file of blob %s is lost: %s", blob.export.blob.digest, error)
            return
        log.warning("the file of blob %s was removed: it begins anew", blob.export.blob.digest)
        self._budget.remove_file(old)
        self._budget.add_file(file)
        blob.served.file = file
        old.close()

    async def _promote(self, blob: OpenBlob) -> None:
        """One that is whole becomes a blob of the cache, which the next machine opens as a file."""
        file = blob.served.file
        if self.fill_idle and file.missing():
            await self._fill(blob)
        file.look()
        for index in range(file.count):
            if not file.has(index):
                return
            if index % 16 == 0:
                await asyncio.sleep(0)
        blob.promoting = True
        file.is_whole = True  # nothing of it is dropped or written from here on
        try:
            await in_thread(self.take_in, blob.export, file.path)
            log.info("%s is whole", blob.export.blob.digest)
        except (AenvError, OSError) as error:
            file.is_whole = False
            blob.is_false = isinstance(error, CorruptData)
            log.error("%s is not kept as a blob: %s", blob.export.blob.digest, error)
        finally:
            blob.promoting = False

    async def _fill(self, blob: OpenBlob) -> None:
        """Fetch the rest while nobody else reads, if there is room for it."""
        file = blob.served.file
        left = await in_thread(trim, self.root, self.limit_bytes)
        if left.left.own_bytes + len(file.missing()) * file.table.chunk_bytes > self.limit_bytes:
            return
        try:
            await blob.served.fill(at_once=1)
        except* AenvError as errors:
            log.info("the rest of %s is not fetched now: %s", blob.export.blob.digest, errors.exceptions[0])
