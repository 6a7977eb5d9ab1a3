"""Connections that are no longer HTTP: WebSockets and CONNECT, passed on byte by byte.

So nothing of a WebSocket is lost: subprotocols, extensions, pings, close codes and messages of any size are
between the client and the service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from aenv_run.api.proxy import refusals
from aenv_run.api.proxy.address import ENVD_PORT, Target
from aenv_run.api.proxy.answer import Answer, NoHttp
from aenv_run.api.proxy.exchange import CHUNK_BYTES, HEADERS_S
from aenv_run.api.proxy.frames import GOING_AWAY, Frames, close_frame
from aenv_run.api.proxy.headers import Asked, response_headers
from aenv_run.api.proxy.machines import ENDED, Connection
from aenv_run.api.proxy.proxy import Admitted, Proxy
from aenv_run.api.proxy.refusals import Refused
from aenv_run.reset import reset

#: What a client may send before the service has agreed to the tunnel.
EARLY_BYTES = 1 << 16
CONNECTED = b"HTTP/1.1 200 Connection established\r\n\r\n"


@dataclass(frozen=True)
class Client:
    """The client's end, and what it sent already."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


async def upgrade(proxy: Proxy, target: Target, asked: Asked, client: Client) -> int:
    """A WebSocket, from its request on; the status that the client was told."""
    try:
        found, connection = await proxy.open(target, asked, fresh=True)
    except Refused as refused:
        return await _refuse(proxy, target, refused, client)
    ended = asyncio.Event()
    with found.machine.using(ended.set):
        try:
            connection.writer.write(_upgrade_head(found))
            answer = await _agreed(found, client, connection, ended)
            if answer.status != 101:
                with found.machine.using(connection.drop):
                    await _pass_refusal(found, answer, client, connection)
                return answer.status
            client.writer.write(_switched(found, answer))
            frames = Frames()
            await splice(client, connection, ended, half_close=False, passed=frames.feed)
            if ended.is_set() and frames.between:
                client.writer.write(close_frame(GOING_AWAY, ENDED))
            return 101
        except _Gone:
            return 0
        except (OSError, NoHttp, TimeoutError) as error:
            why = ENDED if ended.is_set() else str(error) or type(error).__name__
            return await _refuse(proxy, target, refusals.unreachable(target, why), client)
        finally:
            _let_go(connection, ended)


async def connect(proxy: Proxy, target: Target, asked: Asked, client: Client) -> int:
    """A CONNECT: the bytes of a TCP connection, so the service may speak first. Each direction ends by itself."""
    try:
        if target.port == ENVD_PORT:
            raise refusals.only_http(target)
        found, connection = await proxy.open(target, asked, fresh=True)
    except Refused as refused:
        return await _refuse(proxy, target, refused, client)
    ended = asyncio.Event()
    with found.machine.using(ended.set), suppress(OSError):
        try:
            client.writer.write(CONNECTED)
            if not await splice(client, connection, ended, half_close=True):
                reset(client.writer)
                reset(connection.writer)
        finally:
            _let_go(connection, ended)
    return 200


async def splice(
    client: Client,
    service: Connection,
    ended: asyncio.Event,
    *,
    half_close: bool,
    passed: Callable[[bytes], None] | None = None,
) -> bool:
    """Both ways until both have ended, or ``ended``. Without ``half_close`` the end of one is that of both.

    False when it broke off: neither side has said all.
    """
    up = asyncio.create_task(_pump(client.reader, service.writer, half_close, None))
    down = asyncio.create_task(_pump(service.reader, client.writer, half_close, passed))
    stop = asyncio.create_task(ended.wait())
    running = {up, down}
    try:
        while running and not ended.is_set():
            done, _ = await asyncio.wait({*running, stop}, return_when=asyncio.FIRST_COMPLETED)
            running -= done
            if any(task.exception() for task in done if task is not stop):
                return False
            if done and not half_close:
                return True
        return not ended.is_set()
    finally:
        for task in (up, down, stop):
            task.cancel()
        await asyncio.gather(up, down, stop, return_exceptions=True)


async def _pump(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    half_close: bool,
    passed: Callable[[bytes], None] | None,
) -> None:
    while data := await reader.read(CHUNK_BYTES):
        if passed is not None:
            passed(data)
        writer.write(data)
        await writer.drain()
    if half_close and writer.can_write_eof():
        writer.write_eof()


def _let_go(connection: Connection, ended: asyncio.Event) -> None:
    """What was written to a machine that lives still gets there."""
    if ended.is_set():
        connection.drop()
    else:
        connection.writer.close()


class _Gone(Exception):
    """The client hung up before there was a tunnel."""


async def _agreed(found: Admitted, client: Client, connection: Connection, ended: asyncio.Event) -> Answer:
    """The service's answer to the request."""
    answer = asyncio.create_task(_head(connection))
    early = asyncio.create_task(client.reader.read(EARLY_BYTES))
    stop = asyncio.create_task(ended.wait())
    try:
        waiting = {answer, early, stop}
        async with asyncio.timeout(HEADERS_S):
            while not answer.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if stop in done:
                    raise ConnectionResetError(ENDED)
                if early in done and (early.exception() or not early.result()):
                    raise _Gone
        if answer.result().status == 101 and early.done():
            connection.writer.write(early.result())
        return answer.result()
    finally:
        for task in (answer, early, stop):
            task.cancel()
        await asyncio.gather(answer, early, stop, return_exceptions=True)


async def _head(connection: Connection) -> Answer:
    """Read exactly up to the end of the head, so line by line: what follows 101 is no HTTP."""
    answer = Answer(b"GET", upgrade=True)
    while not answer.has_head:
        try:
            line = await connection.reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            raise NoHttp("the service closed the connection before it answered") from error
        except asyncio.LimitOverrunError as error:
            raise NoHttp("the head of the service's answer is too long") from error
        answer.feed(line)
    return answer


async def _pass_refusal(found: Admitted, answer: Answer, client: Client, connection: Connection) -> None:
    """The service wants no WebSocket: its answer, ended by the end of the connection.

    Where it breaks off the client's connection does too: another answer would be taken for the rest of this one.
    """
    lines = [b"HTTP/1.1 %d " % answer.status]
    lines += [
        name + b": " + value for name, value in response_headers(answer.headers, found.mask, status=answer.status)
    ]
    client.writer.write(b"\r\n".join([*lines, b"connection: close", b"", b""]))
    try:
        while True:
            client.writer.write(b"".join(answer.body))
            answer.body = []
            await client.writer.drain()
            if answer.over:
                return
            if data := await connection.reader.read(CHUNK_BYTES):
                answer.feed(data)
            elif found.machine.over:
                raise ConnectionResetError(ENDED)
            else:
                answer.end()
    except (OSError, NoHttp):
        reset(client.writer)


def _upgrade_head(found: Admitted) -> bytes:
    asked, query = found.asked, found.asked.query
    target = found.target.path + (b"?" + query if query else b"")
    lines = [asked.method + b" " + target + b" HTTP/1.1"]
    lines += [name + b": " + value for name, value in found.headers]
    return b"\r\n".join([*lines, b"connection: Upgrade", b"upgrade: websocket", b"", b""])


def _switched(found: Admitted, answer: Answer) -> bytes:
    lines = [b"HTTP/1.1 101 Switching Protocols"]
    lines += [name + b": " + value for name, value in response_headers(answer.headers, found.mask, status=101)]
    return b"\r\n".join([*lines, b"connection: Upgrade", b"upgrade: websocket", b"", b""])


async def _refuse(proxy: Proxy, target: Target, refused: Refused, client: Client) -> int:
    if refused.status in (502, 504):
        proxy.machines.forget(target)
    client.writer.write(refused.raw())
    with suppress(OSError):
        await client.writer.drain()
    return refused.status
