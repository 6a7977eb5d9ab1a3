"""One request to a service and its answer, streamed both ways at the same time; nothing is collected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from starlette.types import Receive, Send

from aenv_run.api.proxy import refusals
from aenv_run.api.proxy.address import ENVD_PORT, Target
from aenv_run.api.proxy.answer import Answer, NoHttp
from aenv_run.api.proxy.headers import Asked, Header, Mask, response_headers
from aenv_run.api.proxy.machines import ENDED, Connection, Machine

CHUNK_BYTES = 1 << 18
#: For the head of an answer, counted from the end of the request. A body may take as long as it likes.
HEADERS_S = 300.0
#: A client that asked whether to go on is told to, when the service has not said anything for so long.
CONTINUE_S = 1.0
_SAFE = frozenset((b"GET", b"HEAD", b"OPTIONS"))


class Broken(Exception):
    """The answer broke off after its head had been sent: the client's connection is to be closed."""


class Stale(Exception):
    """A kept connection had ended before the request reached anybody: another one may be tried."""


class Exchange:
    """``run`` once. The client's end of it is that of ASGI."""

    def __init__(
        self, target: Target, asked: Asked, mask: Mask, machine: Machine, receive: Receive, send: Send
    ) -> None:
        self._target, self._asked, self._mask, self._machine = target, asked, mask, machine
        self._receive, self._send = receive, send
        self._answer = Answer(asked.method)
        self._go_on = asyncio.Event()
        self._expects = (asked.first(b"expect") or b"").strip().lower() == b"100-continue"
        self._chunked = asked.first(b"transfer-encoding") is not None
        self._sent_all = False
        self._touched = False  # something of the body was taken from the client
        self._hung_up = False
        self._headers_by: asyncio.Timeout | None = None

    async def run(self, connection: Connection, headers: list[Header]) -> None:
        """Send it, pass the answer on. ``Refused`` and ``Stale`` before its head, ``Broken`` after it."""
        with self._machine.using(connection.drop):
            upload = asyncio.create_task(self._upload(connection, headers))
            try:
                await self._download(connection)
            except (OSError, NoHttp, TimeoutError) as error:
                if not self._hung_up:
                    self._fail(error, connection)
            finally:
                upload.cancel()
                with suppress(asyncio.CancelledError):
                    await upload
                self._finish(connection)

    def _finish(self, connection: Connection) -> None:
        if self._answer.keeps_connection and self._sent_all and self._target.port == ENVD_PORT:
            self._machine.give_back(connection)
        else:
            connection.drop()

    def _fail(self, error: Exception, connection: Connection) -> None:
        if self._answer.has_head:
            raise Broken(str(error)) from error
        if self._machine.over:
            raise refusals.unreachable(self._target, ENDED) from error
        if isinstance(error, TimeoutError):
            what = f"no answer within {HEADERS_S:g} s after the request"
            raise refusals.too_slow(self._target, what) from error
        if connection.used and self._asked.method in _SAFE and not self._touched:
            raise Stale from error
        raise refusals.unreachable(self._target, str(error) or type(error).__name__) from error

    # -- the request ---------------------------------------------------------------------------------------

    async def _upload(self, connection: Connection, headers: list[Header]) -> None:
        """The head and the body; then wait until the client hangs up, which ends the service's end too."""
        writer = connection.writer
        try:
            head = self._head(headers)
            if self._expects:
                writer.write(head)
                head = b""
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._go_on.wait(), CONTINUE_S)
            async for chunk in self._body():
                writer.write(head + self._framed(chunk) if head else self._framed(chunk))
                head = b""
                await writer.drain()
            writer.write(head + (b"0\r\n\r\n" if self._chunked else b""))
            await writer.drain()
            self._sent_all = True
            self._count_headers()
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self._hung_up = True
        except OSError:
            return  # its answer, or the end of it, says more
        except _HungUp:
            self._hung_up = True
        connection.drop()

    def _head(self, headers: list[Header]) -> bytes:
        query = self._asked.query
        target = self._target.path + (b"?" + query if query else b"")
        lines = [self._asked.method + b" " + target + b" HTTP/1.1"]
        lines += [name + b": " + value for name, value in headers]
        if self._chunked:
            lines.append(b"transfer-encoding: chunked")
        if self._target.port != ENVD_PORT:
            lines.append(b"connection: close")
        return b"\r\n".join([*lines, b"", b""])

    async def _body(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _HungUp
            more = message.get("more_body", False)
            if body := message.get("body", b""):
                self._touched = True
                yield body

    def _framed(self, chunk: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(chunk), chunk) if self._chunked else chunk

    # -- the answer ----------------------------------------------------------------------------------------

    async def _download(self, connection: Connection) -> None:
        answer = self._answer
        async with asyncio.timeout(None) as self._headers_by:
            self._count_headers()
            while not answer.has_head:
                await self._read(connection)
                if answer.go_on:
                    self._go_on.set()
        headers = response_headers(answer.headers, self._mask, status=answer.status)
        if self._expects and not self._go_on.is_set():
            headers.append((b"connection", b"close"))  # its body was not asked for
        await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})
        while True:
            body, answer.body = b"".join(answer.body), []
            if answer.over:
                await self._send({"type": "http.response.body", "body": body})
                return
            if body:
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
            await self._read(connection)

    async def _read(self, connection: Connection) -> None:
        data = await connection.reader.read(CHUNK_BYTES)
        if data:
            self._answer.feed(data)
            return
        if self._hung_up or self._machine.over:
            raise ConnectionResetError(ENDED)
        self._answer.end()

    def _count_headers(self) -> None:
        """From the end of the request on."""
        if self._sent_all and self._headers_by is not None and not self._answer.has_head:
            self._headers_by.reschedule(asyncio.get_running_loop().time() + HEADERS_S)


class _HungUp(Exception):
    """The client is gone."""
