"""``GET /aenv/v1/sandboxes/{id}/ports/{port}``: a TCP connection into a sandbox, as a WebSocket.

It passes every HTTP proxy that WebSockets pass, where CONNECT does not. Binary messages are bytes; an
empty one is the end of that direction. The API key opens it, for private ports too.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from fastapi import APIRouter, WebSocket
from starlette.websockets import WebSocketState

from aenv_run.api.errors import reply
from aenv_run.api.proxy import refusals
from aenv_run.api.proxy.address import ENVD_PORT, Misrouted, checked
from aenv_run.api.proxy.exchange import CHUNK_BYTES
from aenv_run.api.proxy.machines import ENDED, Connection
from aenv_run.api.proxy.refusals import Refused
from aenv_run.api.server import Server
from aenv_run.errors import Conflict, InvalidInput, NotFound, SandboxDead
from aenv_run.reset import reset

router = APIRouter()
GOING_AWAY, UNSUPPORTED, BROKEN = 1001, 1003, 1011
BROKE_OFF = "the connection to the service broke off"
#: Which error of ours a refusal is, for clients of ours.
_CODES = {400: InvalidInput.code, 404: NotFound.code, 410: Conflict.code}


@router.websocket("/aenv/v1/sandboxes/{sandbox_id}/ports/{port}")
async def tunnel(websocket: WebSocket, sandbox_id: str, port: str) -> None:
    """Until both directions have ended. Refusals come in place of the WebSocket."""
    server = websocket.app.state.server
    assert isinstance(server, Server)
    try:
        target = checked(sandbox_id, port, b"/", "agentenv")
        if isinstance(target, Misrouted):
            raise Refused(400, target.message)
        if target.port == ENVD_PORT:
            raise refusals.only_http(target)
        machine, connection = await server.proxy.machines.open(target, lambda door: None)
    except Refused as refused:
        code = NotFound.code if "port" in refused.more else _CODES.get(refused.status, SandboxDead.code)
        await websocket.send_denial_response(reply(refused.status, refused.message, error_code=code))
        return
    ended, whole = asyncio.Event(), False
    try:
        with machine.using(ended.set), suppress(OSError):
            await websocket.accept()
            whole = await _pass(websocket, connection, ended)
    finally:
        connection.writer.close() if whole else reset(connection.writer)
    if websocket.client_state is WebSocketState.CONNECTED:
        said = (GOING_AWAY, ENDED) if ended.is_set() else (1000, None) if whole else (BROKEN, BROKE_OFF)
        with suppress(RuntimeError):  # it hung up at this moment
            await websocket.close(*said)


async def _pass(websocket: WebSocket, connection: Connection, ended: asyncio.Event) -> bool:
    """Whether both ended as they should."""
    up = asyncio.create_task(_up(websocket, connection))
    down = asyncio.create_task(_down(websocket, connection))
    stop = asyncio.create_task(ended.wait())
    running = {up, down}
    try:
        while running and not ended.is_set():
            done, _ = await asyncio.wait({*running, stop}, return_when=asyncio.FIRST_COMPLETED)
            running -= done
            if any(task.exception() for task in done if task is not stop):
                return False
            if up in done and not up.result():
                return False
        return not ended.is_set()
    finally:
        for task in (up, down, stop):
            task.cancel()
        await asyncio.gather(up, down, stop, return_exceptions=True)


async def _up(websocket: WebSocket, connection: Connection) -> bool:
    """False when the client hung up, instead of ending its direction."""
    while True:
        message = await websocket.receive()
        data = message.get("bytes")
        if message["type"] == "websocket.disconnect":
            return False
        if data is None:
            await websocket.close(UNSUPPORTED, "binary messages alone")
            return False
        if not data:
            connection.writer.write_eof()
            return True
        connection.writer.write(data)
        await connection.writer.drain()


async def _down(websocket: WebSocket, connection: Connection) -> None:
    while data := await connection.reader.read(CHUNK_BYTES):
        await websocket.send_bytes(data)
    await websocket.send_bytes(b"")
