"""Byte streams from a listening socket to a target, TCP or unix on either side: published and forwarded ports."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import Field, field_validator

from aenv_run.errors import AenvError, Conflict, InvalidInput
from aenv_run.reset import reset
from aenv_run.types import Model

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 16
#: What waits for a slow reader, each way of each connection.
BUFFER_BYTES = 1 << 18
MAX_UNIX_PATH_BYTES = 107


@dataclass(frozen=True)
class TcpAddress:
    """A host and port; port 0 means any free one when listening."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class UnixAddress:
    """The path of a stream socket."""

    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path}"


StreamAddress = TcpAddress | UnixAddress
#: Passes one accepted connection on until both sides have ended; ``OSError`` or ``AenvError`` when it cannot.
PassOn = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class PublishedPort(Model):
    """A TCP port of the guest as a unix socket of the host, for as long as the sandbox lives."""

    path: Path
    port: int = Field(ge=1, le=65535)

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        if not path.is_absolute():
            raise ValueError("the path of a published port must be absolute")
        return path


class PortForward:
    """Accepts on ``listen`` and passes each connection on to ``target`` until both sides have ended.

    The end of one direction is passed on by itself, so a peer may send its last byte and read on.
    """

    def __init__(
        self,
        listen: StreamAddress,
        target: StreamAddress | PassOn,
        *,
        max_connections: int = 256,
        connect_timeout_s: float = 10.0,
        mode: int = 0o600,
    ) -> None:
        self._listen = listen
        self.target = target
        self._max = max_connections
        self._connect_timeout_s = connect_timeout_s
        self._mode = mode
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket_file: tuple[int, int] | None = None

    async def start(self) -> StreamAddress:
        """Listen; returns the address with the real port. ``Conflict`` when somebody else listens there."""
        try:
            if isinstance(self._listen, UnixAddress):
                self._server = await asyncio.start_unix_server(
                    self._accept, sock=await self._bind(self._listen.path), limit=BUFFER_BYTES
                )
            else:
                self._server = await asyncio.start_server(
                    self._accept, self._listen.host, self._listen.port, limit=BUFFER_BYTES
                )
                port = self._server.sockets[0].getsockname()[1]
                self._listen = TcpAddress(self._listen.host, port)
        except OSError as error:
            raise Conflict(f"cannot listen on {self._listen}: {error}", fix="choose another address") from error
        return self._listen

    async def _bind(self, path: Path) -> socket.socket:
        if len(os.fsencode(path)) > MAX_UNIX_PATH_BYTES:
            raise InvalidInput(f"{path} is too long for a unix socket", fix="use a path of at most 107 bytes")
        await self._remove_stale(path)
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # bind(2) gives the entry the mode of the socket (less the umask): private from its first moment.
            os.fchmod(bound.fileno(), self._mode)
            bound.bind(str(path))
            path.chmod(self._mode)
            status = path.stat()
            self._socket_file = (status.st_dev, status.st_ino)
            bound.setblocking(False)
        except BaseException:
            bound.close()
            raise
        return bound

    async def _remove_stale(self, path: Path) -> None:
        try:
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise Conflict(f"{path} exists and is not a socket", fix="choose another path")
        except FileNotFoundError:
            return
        try:
            _, writer = await asyncio.open_unix_connection(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)  # left by a process that is gone
            return
        writer.close()
        raise Conflict(f"{path} is in use", fix="choose another path")

    async def close(self) -> None:
        """Stop listening and end all connections. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket_file and isinstance(self._listen, UnixAddress):
            with contextlib.suppress(FileNotFoundError):
                status = self._listen.path.stat()
                if (status.st_dev, status.st_ino) == self._socket_file:  # not somebody's new one
                    self._listen.path.unlink()
            self._socket_file = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def address(self) -> StreamAddress:
        """Where it listens."""
        return self._listen

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= self._max:
            writer.transport.abort()
            return
        self._tasks.add(task)
        try:
            await self._pass_on(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = self.target
        if not isinstance(target, TcpAddress | UnixAddress):
            try:
                await target(reader, writer)
            except* (OSError, AenvError) as errors:
                log.info("%s: %s", self._listen, errors.exceptions[0])
                reset(writer)
            return
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                far_reader, far_writer = await self._connect(target)
        except (OSError, TimeoutError) as error:
            log.info("%s -> %s: %s", self._listen, self.target, error)
            reset(writer)  # as if the target's own port were closed
            return
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_pump(reader, far_writer))
                both.create_task(_pump(far_reader, writer))
        except* OSError:
            reset(writer)
            reset(far_writer)
        finally:
            far_writer.close()

    async def _connect(self, target: StreamAddress) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(target, UnixAddress):
            return await asyncio.open_unix_connection(str(target.path), limit=BUFFER_BYTES)
        return await asyncio.open_connection(target.host, target.port, limit=BUFFER_BYTES)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.set_write_buffer_limits(high=BUFFER_BYTES)
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
