"""What ASGI cannot carry is taken from uvicorn here: WebSockets of sandboxes, byte by byte, and CONNECT.

ASGI knows messages of WebSockets alone: pings, fragments and compression would be ours, each message would lie in
memory whole, and CONNECT is not in it at all.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from aenv_run.api.proxy import tunnel
from aenv_run.api.proxy.address import PAIRS, Target
from aenv_run.api.proxy.headers import Asked
from aenv_run.api.proxy.machines import BUFFER_BYTES
from aenv_run.api.proxy.proxy import CLOSE, Proxy
from aenv_run.api.proxy.refusals import Refused
from aenv_run.api.proxy.tunnel import Client

log = logging.getLogger("aenv_run.api.access")

_CONNECT = b"CONNECT "
#: Of the head of a request, of trailers and extensions of chunks: the parser itself would keep any.
MAX_HEAD_BYTES = 64 << 10
Serve = Callable[[Client], Awaitable[None]]


def http_protocol(proxy: Proxy, *, head_s: float = 30.0) -> type[HttpToolsProtocol]:
    """The class for uvicorn's ``http=``. A client has ``head_s`` for the head of each request."""

    class Http(ProxyingHttp):
        """Of one server."""

    Http.proxy, Http.head_s = proxy, head_s
    return Http


class Raw(asyncio.StreamReaderProtocol):
    """A client's connection after HTTP: bytes. ``serve`` has it until it returns."""

    def __init__(self, state: ServerState, serve: Serve) -> None:
        super().__init__(asyncio.StreamReader(limit=BUFFER_BYTES), self._begin)
        self._state, self._serve_it = state, serve
        self._transport_of: asyncio.BaseTransport | None = None
        self._running: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """From uvicorn."""
        self._transport_of = transport
        self._state.connections.add(self)  # type: ignore[arg-type]  # only its ``shutdown`` is called
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone: so is the service's end."""
        self._state.connections.discard(self)
        super().connection_lost(exc)
        if self._running is not None:
            self._running.cancel()

    def shutdown(self) -> None:
        """The server stops."""
        if isinstance(self._transport_of, asyncio.Transport):
            self._transport_of.abort()

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._running = asyncio.create_task(self._run(Client(reader, writer)))

    async def _run(self, client: Client) -> None:
        try:
            await self._serve_it(client)
        except Exception:
            log.exception("a tunnel failed")
        finally:
            client.writer.close()


class ProxyingHttp(HttpToolsProtocol):
    """uvicorn's own, but for what goes to a sandbox as bytes. Trailers of requests are dropped."""

    proxy: ClassVar[Proxy]
    head_s: ClassVar[float]
    _first: bytes | None = b""
    _head_bytes: int | None = 0  # of a head that is not whole; None while a body comes
    _fed = b""  # what the parser has now
    _other_bytes = 0  # since the last piece of a body
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client."""
        super().connection_made(transport)
        if (connected := transport.get_extra_info("socket")) is not None:
            _set_options(connected)
        self._head_timer = self.loop.call_later(self.head_s, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Look at the first bytes of a connection, and how long a head gets."""
        if self._first is not None:
            data = self._first + data
            if len(data) < len(_CONNECT) and _CONNECT.startswith(data):
                self._first = data
                return
            self._first = None
            if data.startswith(_CONNECT):
                self._hand_over(self._serve_connect, data)
                return
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(self.head_s, self.transport.close)
        self._other_bytes += len(data)
        self._fed = data
        super().data_received(data)
        self._fed = b""
        if self.transport.is_closing():
            return
        if self._head_bytes is None and self._other_bytes > MAX_HEAD_BYTES:
            self.transport.close()
        elif self._head_bytes is not None and self._head_bytes > MAX_HEAD_BYTES:
            self.transport.write(Refused(431, f"the head is longer than {MAX_HEAD_BYTES} bytes").raw())
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is refused as everything else is, in JSON."""
        self.transport.write(Refused(400, msg).raw())
        self.transport.close()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.scope["extensions"] = {CLOSE: {"close": self.transport.close}}

    def on_headers_complete(self) -> None:
        """Its head is whole."""
        self._head_bytes = None
        self._other_bytes = 0
        self._stop_timer()
        if self.parser.should_upgrade() and self._should_upgrade():
            names = {name for name, _ in self.headers}
            if names & {b"content-length", b"transfer-encoding"}:
                raise ValueError("a WebSocket begins without a body")
            if self.cycle is not None and not self.cycle.response_complete:
                raise ValueError("a WebSocket begins when what was asked before it is answered")
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header. What comes behind the head is a trailer, and is dropped."""
        if self._head_bytes is not None:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._other_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request has ended; another may follow."""
        self._head_bytes = 0
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """It was answered. A body that nobody waits for must not keep the connection open drop by drop."""
        super().on_response_complete()
        if self._head_bytes is None and not self.transport.is_closing():
            self._head_timer = self._head_timer or self.loop.call_later(self.head_s, self.transport.close)

    def handle_websocket_upgrade(self) -> None:
        """Take it, if it is for a sandbox."""
        asked = Asked(
            method=self.scope["method"].encode(),
            query=self.url.partition(b"?")[2],
            headers=tuple(self.scope["headers"]),
            scheme=self.scope["scheme"],
            peer=self.client[0] if self.client else "",
        )
        try:
            path = httptools.parse_url(self.url).path or b"/"
            target = self.proxy.target(asked, path)
        except (Refused, httptools.HttpParserInvalidURLError) as error:
            refused = error if isinstance(error, Refused) else Refused(400, "the path is malformed")
            self.transport.write(refused.raw())
            self.transport.close()
            return
        if target is None:
            super().handle_websocket_upgrade()
            return
        found = target

        async def serve(client: Client) -> None:
            status = await tunnel.upgrade(self.proxy, found, asked, client)
            log.info("WEBSOCKET %s port %d %d", found.sandbox_id, found.port, status)

        self._hand_over(serve, self._behind_head())

    def _behind_head(self) -> bytes:
        """What came with the head and is none of it: the parser raises where HTTP ends, and tells the place."""
        raised = sys.exception()
        return self._fed[raised.args[0] :] if isinstance(raised, httptools.HttpParserUpgrade) else b""

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _hand_over(self, serve: Serve, data: bytes) -> None:
        self._stop_timer()
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        self.flow.resume_reading()
        raw = Raw(self.server_state, serve)
        self.transport.set_protocol(raw)
        raw.connection_made(self.transport)
        if data:
            raw.data_received(data)

    async def _serve_connect(self, client: Client) -> None:
        try:
            async with asyncio.timeout(self.head_s):
                head = await client.reader.readuntil(b"\r\n\r\n")
            target, asked = self._connect_target(head)
        except (TimeoutError, asyncio.IncompleteReadError):
            return
        except asyncio.LimitOverrunError:
            client.writer.write(Refused(431, "the head of the request is too long").raw())
            return
        except Refused as refused:
            client.writer.write(refused.raw())
            return
        status = await tunnel.connect(self.proxy, target, asked, client)
        log.info("CONNECT %s port %d %d", target.sandbox_id, target.port, status)

    def _connect_target(self, head: bytes) -> tuple[Target, Asked]:
        """`CONNECT {port}-{id}.{domain}:any`, or `CONNECT {id}:{port}`; the rest of its head is headers."""
        parsed = _Head()
        parser = httptools.HttpRequestParser(parsed)
        try:
            parser.feed_data(head)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError as error:
            raise Refused(400, f"the request is malformed: {error}") from error
        routing = {name for pair in PAIRS for name in pair[:2]}
        headers = tuple(pair for pair in parsed.headers if pair[0] not in routing | {b"host"})
        asked = Asked(b"CONNECT", b"", headers, self.scheme or "http", self.client[0] if self.client else "")
        name, _, port = parsed.url.rpartition(b":")
        by_id = [*headers, (PAIRS[1][0], name), (PAIRS[1][1], port)]
        by_host = [*headers, (b"host", parsed.url)]
        found = self.proxy.target(Asked(b"CONNECT", b"", by_host, "http", ""), b"/")
        if found is None and b"." not in name:
            found = self.proxy.target(Asked(b"CONNECT", b"", by_id, "http", ""), b"/")
        if found is None:
            raise Refused(403, "CONNECT leads to {port}-{sandbox}.{domain} or {sandbox}:{port} alone")
        return found, asked


def _set_options(connected: socket.socket) -> None:
    """Send at once, and notice a client whose network is gone: its stream would be kept for ever.

    asyncio does the first only for sockets that were made with the number of TCP; a listener of Python's is not,
    and then a head and a body behind it are 40 ms apart.
    """
    with suppress(OSError):  # a unix socket has no such options
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _Head:
    """What the parser finds."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []

    def on_url(self, url: bytes) -> None:
        """The target, perhaps in pieces."""
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self.headers.append((name.lower(), value))
