"""A TCP connection to a port of a sandbox through its server: binary messages of a WebSocket."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aenv_run.credentials import ServerAddress, is_loopback
from aenv_run.later import later
from aenv_run.server_link import CALLS, CONNECT_S, headers

if TYPE_CHECKING:
    import websockets
    from websockets.asyncio.client import ClientConnection
else:
    websockets = later("websockets")

CHUNK_BYTES = 1 << 16
MAX_MESSAGE_BYTES = 1 << 20


async def pass_through(
    server: ServerAddress,
    sandbox_id: str,
    port: int,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Both ways until both have ended, each by an empty message. ``OSError`` when it breaks off."""
    from websockets.asyncio.client import connect
    from websockets.exceptions import WebSocketException

    try:
        async with (
            connect(
                f"ws{server.url.removeprefix('http')}{CALLS}/sandboxes/{sandbox_id}/ports/{port}",
                additional_headers=headers(server),
                compression=None,
                max_size=MAX_MESSAGE_BYTES,
                open_timeout=2 * CONNECT_S,
                proxy=None if is_loopback(server.url) else True,
            ) as there,
            asyncio.TaskGroup() as both,
        ):
            both.create_task(_up(reader, there))
            both.create_task(_down(there, writer))
    except* (WebSocketException, TimeoutError) as errors:
        raise OSError(f"the server's way to port {port} broke off: {errors.exceptions[0]}") from errors


async def _up(reader: asyncio.StreamReader, there: ClientConnection) -> None:
    while data := await reader.read(CHUNK_BYTES):
        await there.send(data)
    await there.send(b"")


async def _down(there: ClientConnection, writer: asyncio.StreamWriter) -> None:
    """``ConnectionResetError`` when it ends without saying so: the sandbox is gone."""
    while data := await there.recv(decode=False):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
