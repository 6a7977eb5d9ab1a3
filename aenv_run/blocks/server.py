"""The block server: connections of engines, the blobs that they read, and the bound on what is kept of them."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from aenv_run import nbd
from aenv_run.blocks.budget import Budget
from aenv_run.blocks.chunk_file import ChunkFile, Table, lacking_bytes
from aenv_run.blocks.exports import Export, Exports
from aenv_run.blocks.fetch import Fetcher, Source
from aenv_run.blocks.served_blob import ServedBlob
from aenv_run.cache_limit import in_use, trim
from aenv_run.errors import AenvError, CorruptData
from aenv_run.threads import in_thread

log = logging.getLogger(__name__)

#: A blob that nobody reads is closed after so long: who opens it once often opens it again.
LINGER_S = 10.0
#: What one connection may have asked for and not have taken yet.
MAX_UNSENT_BYTES = 64 << 20
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
    users: int = 0
    closing: asyncio.TimerHandle | None = None
    promoting: bool = False
    #: It is whole and yet not the blob that the manifest says it is: chunk table and digest contradict each other.
    is_false: bool = False


@dataclass
class BlockServer:
    """Serves until ``close``. ``take_in`` makes a whole file a blob of the cache (``BlobCache.take_in``)."""

    root: Path
    opened: Opened
    limit_bytes: int
    fetcher: Fetcher
    take_in: Callable[[Export, Path], None]
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

    def __post_init__(self) -> None:
        self.exports = Exports(self.root)

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

    async def _open(self, export: Export) -> OpenBlob:
        try:
            table, source = await self.fetcher.patiently(lambda: self.opened(export, self.exports.table(export)))
            if table.blob_bytes != export.blob.size_bytes:
                raise CorruptData(f"the chunk table of blob {export.blob.digest} is that of another size")
        except AenvError as error:
            self.exports.tell(export, error)
            raise
        self.exports.tell(export, None)
        with in_use(self.root):
            file = ChunkFile(self.exports.data(export), table)
        self._budget.add_file(file)
        served = ServedBlob(
            file,
            source,
            self.fetcher,
            self._budget,
            lambda error: self._told(export, error),
            self._kept,
        )
        blob = self._blobs[export.data] = OpenBlob(served, export)
        log.info("serving %s: %d chunks, %d not here", export.blob.digest, file.count, len(file.missing()))
        return blob

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
                if not (blob.promoting or blob.is_false or blob.served.file.is_whole):
                    await self._promote(blob)
            if not self._shrinking and self._blobs:
                self._shrinking = True
                await self._shrink_once()

    async def _promote(self, blob: OpenBlob) -> None:
        """One that is whole becomes a blob of the cache, which the next machine opens as a file."""
        file = blob.served.file
        if self.fill_idle and file.missing():
            await self._fill(blob)
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


class Connection(asyncio.Protocol):
    """One engine's connection to one export."""

    def __init__(self, server: BlockServer) -> None:
        self._server = server
        self._session = nbd.Session()
        self._transport: asyncio.Transport | None = None
        self._served: ServedBlob | None = None
        self._reading = 0
        self._full = False
        self._over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The peer is there."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server.connections.add(self)
        transport.write(nbd.GREETING)

    def connection_lost(self, exc: Exception | None) -> None:
        """The peer is gone."""
        self._over = True
        self._server.connections.discard(self)
        self._server.last_use_s = time.monotonic()
        if self._served is not None:
            self._server.release(self._served)
            self._served = None

    def abort(self) -> None:
        """End it now."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Bytes of the peer."""
        self._session.receive(data)
        self._go_on()

    def pause_writing(self) -> None:
        """The peer does not take what it asked for: nothing more is done for it until it does."""
        self._full = True
        self._hold_back()

    def resume_writing(self) -> None:
        """It does again."""
        self._full = False
        self._go_on()

    def _hold_back(self) -> None:
        if self._transport is not None and not self._over:
            if self._full or self._reading > MAX_UNSENT_BYTES:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _go_on(self) -> None:
        try:
            while not (self._over or self._full or self._reading > MAX_UNSENT_BYTES):
                event = self._session.next()
                if event is None:
                    break
                self._do(event)
        except nbd.HostileError as error:
            log.warning("a connection is ended: %s", error)
            self.abort()
        except OSError as error:  # of this node's disk
            log.error("a connection is ended: %s", error)
            self.abort()
        self._hold_back()

    def _send(self, *parts: bytes) -> None:
        if self._transport is not None and not self._over:
            self._transport.writelines(parts)

    def _do(self, event: nbd.Event) -> None:
        match event:
            case nbd.Send(data):
                self._send(data)
            case nbd.Read(handle, offset, length):
                assert self._served is not None
                if (found := self._served.now(offset, length)) is not None:
                    self._send(nbd.reply(handle), found)
                else:
                    self._reading += length
                    self._server.begin(self._read(self._served, handle, offset, length))
            case nbd.Open(name, option):
                self._server.begin(self._open(name, option))
            case nbd.Close():
                if self._transport is not None:
                    self._transport.close()

    async def _open(self, name: str, option: int) -> None:
        try:
            served = await self._server.open(name)
        except AenvError as error:
            why = f"{error.code}: {error.message}"
            self._answer(lambda: self._session.refused(option, why))
            return
        except Exception:
            log.exception("export %s cannot be opened", name[:80])
            self._answer(lambda: self._session.refused(option, "internal: see the log of the block server"))
            return
        if self._over or option == nbd.INFO or self._served is not None:
            self._server.release(served)
        else:
            self._served = served
        self._answer(lambda: self._session.opened(option, served.file.table.blob_bytes))

    def _answer(self, make: Callable[[], bytes]) -> None:
        try:
            self._send(make())
        except nbd.HostileError as error:
            log.warning("a connection is ended: %s", error)
            self.abort()
            return
        self._go_on()

    async def _read(self, served: ServedBlob, handle: int, offset: int, length: int) -> None:
        try:
            data = await served.read(offset, length)
            self._send(nbd.reply(handle), data)
        except AenvError:  # told where it was found
            self._send(nbd.reply(handle, nbd.EIO))
        except Exception:
            log.exception("a read failed")
            self._send(nbd.reply(handle, nbd.EIO))
        finally:
            self._reading -= length
            self._go_on()
