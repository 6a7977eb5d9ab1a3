"""A TCP connection to a port of a sandbox on a server, over a WebSocket: whatever network it has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from aenv_run.credentials import ServerAddress, is_loopback
from aenv_run.errors import SandboxDead
from aenv_run.server_link import CALLS, error_of, headers, unreachable

#: Of one message. A larger write becomes several.
CHUNK_BYTES = 1 << 18
#: More than a server sends at once.
MAX_MESSAGE_BYTES = 1 << 20
OPEN_S = 70.0  # a paused sandbox may be resumed first


class PortTunnel:
    """Bytes both ways, each direction ended by itself."""

    def __init__(self, socket: ClientConnection, where: str) -> None:
        self._socket, self._where = socket, where
        self._ended = False

    async def read(self) -> bytes:
        """The next bytes; empty at the end. ``SandboxDead`` when it broke off."""
        if self._ended:
            return b""
        try:
            message = await self._socket.recv()
        except ConnectionClosed as closed:  # the end of what the service says is an empty message
            why = closed.rcvd.reason if closed.rcvd is not None else ""
            raise SandboxDead(f"{self._where}: {why or f'the connection broke off ({closed})'}") from closed
        data = message.encode() if isinstance(message, str) else message
        self._ended = not data
        return data

    async def write(self, data: bytes) -> None:
        """Returns when it may take more. ``SandboxDead`` when it broke off."""
        try:
            for start in range(0, len(data), CHUNK_BYTES):
                await self._socket.send(data[start : start + CHUNK_BYTES])
        except ConnectionClosed as closed:
            raise SandboxDead(f"{self._where}: the connection broke off ({closed})") from closed

    async def write_eof(self) -> None:
        """Nothing more comes from here; ``read`` goes on."""
        with suppress(ConnectionClosed):
            await self._socket.send(b"")


@asynccontextmanager
async def open_tunnel(server: ServerAddress, sandbox_id: str, port: int) -> AsyncIterator[PortTunnel]:
    """To ``port`` of a sandbox, which is resumed if traffic resumes it.

    ``NotFound`` when there is no such sandbox or nothing listens there, ``Conflict`` when it is paused.
    """
    url = f"ws{server.url.removeprefix('http')}{CALLS}/sandboxes/{sandbox_id}/ports/{port}"
    own = {name: value for name, value in headers(server).items() if name.lower() != "user-agent"}
    try:
        socket = await connect(
            url,
            additional_headers=own,
            user_agent_header=headers(server)["User-Agent"],
            compression=None,
            max_size=MAX_MESSAGE_BYTES,
            open_timeout=OPEN_S,
            ping_timeout=None,  # who is held back by a slow reader answers no ping
            proxy=None if is_loopback(server.url) else True,
        )
    except InvalidStatus as refused:
        raise error_of(server, refused.response.status_code, bytes(refused.response.body or b"")) from refused
    except (OSError, TimeoutError, WebSocketException) as error:
        raise unreachable(server, error) from error
    try:
        yield PortTunnel(socket, f"port {port} of {sandbox_id}")
    finally:
        await socket.close()


async def pass_through(
    server: ServerAddress,
    sandbox_id: str,
    port: int,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Pass a local connection on, until both directions have ended. Errors as ``open_tunnel``, and ``OSError``."""
    async with open_tunnel(server, sandbox_id, port) as tunnel:
        tasks = [asyncio.create_task(_out(reader, tunnel)), asyncio.create_task(_back(tunnel, writer))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _out(reader: asyncio.StreamReader, tunnel: PortTunnel) -> None:
    while data := await reader.read(CHUNK_BYTES):
        await tunnel.write(data)
    await tunnel.write_eof()


async def _back(tunnel: PortTunnel, writer: asyncio.StreamWriter) -> None:
    while data := await tunnel.read():
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
