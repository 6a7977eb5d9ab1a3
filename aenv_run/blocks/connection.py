"""One engine's connection: requests are answered as they can be, what is here before what has to be fetched."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from aenv_run import nbd
from aenv_run.blocks.in_flight import Room, Unsent
from aenv_run.blocks.served_blob import ServedBlob
from aenv_run.errors import AenvError

log = logging.getLogger(__name__)

#: Requests of one connection that wait for a store; after that nothing more is heard of it. QEMU has 16.
MAX_REQUESTS = 256


class Host(Protocol):
    """What a connection needs of its server."""

    connections: set[Connection]
    last_use_s: float
    room: Room
    unsent: Unsent

    def begin(self, work: object) -> None:
        """Run a coroutine by the side."""

    async def open(self, name: str) -> ServedBlob:
        """The blob of an export."""

    def release(self, served: ServedBlob) -> None:
        """One user less."""

    def note_unread(self, served: ServedBlob, error: Exception) -> None:
        """An engine is about to be told an I/O error."""


class Connection(asyncio.Protocol):
    """Serves one export to one peer."""

    def __init__(self, server: Host) -> None:
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
        self._server.unsent.forget(self)
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
        self.go_on()

    def pause_writing(self) -> None:
        """The peer does not take what it asked for: nothing more is done for it until it does."""
        self._full = True
        self._hold_back()

    def resume_writing(self) -> None:
        """It does again."""
        self._full = False
        self._server.unsent.set(self, 0)
        self.go_on()

    def _hold_back(self) -> None:
        if self._transport is not None and not self._over:
            if self._full or self._reading >= MAX_REQUESTS or not self._server.unsent.has_room(self):
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def go_on(self) -> None:
        """Do what was asked for, as far as there is room for answers."""
        try:
            while not (self._over or self._full or self._reading >= MAX_REQUESTS):
                if not self._server.unsent.has_room(self) or (event := self._session.next()) is None:
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
            if self._full:
                self._server.unsent.set(self, self._transport.get_write_buffer_size())

    def _do(self, event: nbd.Event) -> None:
        match event:
            case nbd.Send(data):
                self._send(data)
            case nbd.Read(handle, offset, length):
                assert self._served is not None
                if (found := self._served.now(offset, length)) is not None:
                    self._send(nbd.reply(handle), found)
                else:
                    self._reading += 1
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
        self.go_on()

    async def _read(self, served: ServedBlob, handle: int, offset: int, length: int) -> None:
        try:
            async with self._server.room.held(served.owner, length):
                data = await served.read(offset, length)
                self._send(nbd.reply(handle), data)
        except AenvError as error:  # told where it was found
            self._server.note_unread(served, error)
            self._send(nbd.reply(handle, nbd.EIO))
        except Exception as error:
            log.exception("a read failed")
            self._server.note_unread(served, error)
            self._send(nbd.reply(handle, nbd.EIO))
        finally:
            self._reading -= 1
            self.go_on()
