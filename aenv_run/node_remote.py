"""The way to a server's node: HTTP or HTTPS with a key, through ``/aenv/v1/node``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import httpx

from aenv_run.credentials import ServerAddress, is_loopback
from aenv_run.errors import NodeUnavailable, ProtocolError
from aenv_run.node_transport import CALL_TIMEOUT_S, JSON_BODY, parse
from aenv_run.node_wire import Health
from aenv_run.server_link import CALLS, CONNECT_S, error_of, headers, require_ours, unreachable
from aenv_run.whole import whole

HEALTH_TIMEOUT_S = 15.0
#: Between tries of what may be sent again.
PAUSES_S = (0.1, 0.5)
#: More than any list of sandboxes; a server that sends more is none.
MAX_ANSWER_BYTES = 64 << 20
MAX_LINE_BYTES = 4 << 20


class ServerTransport:
    """Sends again only what the server cannot have got, and what only reads."""

    def __init__(self, server: ServerAddress) -> None:
        self._server = server

    async def health(self) -> Health | None:
        """See ``NodeTransport``."""
        body = await self._again("GET", "/health", None, HEALTH_TIMEOUT_S)
        return parse(Health, body) if body else None

    async def request(self, method: str, path: str, content: str | None) -> bytes:
        """See ``NodeTransport``."""
        return await self._again(method, path, content, CALL_TIMEOUT_S)

    async def lines(self, path: str, content: str) -> AsyncGenerator[bytes, None]:
        """See ``NodeTransport``."""
        async with self._open("POST", path, content, CALL_TIMEOUT_S) as response:
            rest = b""
            async for chunk in response.aiter_bytes():
                *whole, rest = (rest + chunk).split(b"\n")
                for line in whole:
                    yield line
                if len(rest) > MAX_LINE_BYTES:
                    raise ProtocolError(f"the server at {self._server.url} sent a line of too many bytes")
            if rest:
                raise self._broke_off("a line had no end")

    async def _again(self, method: str, path: str, content: str | None, timeout_s: float) -> bytes:
        for pause_s in (*PAUSES_S, None):
            try:
                return await self._once(method, path, content, timeout_s)
            except _BrokeOff:
                if method != "GET" or pause_s is None:
                    raise
            except _NotReached:
                if pause_s is None:
                    raise
            await asyncio.sleep(pause_s)
        raise AssertionError("unreachable")

    async def _once(self, method: str, path: str, content: str | None, timeout_s: float) -> bytes:
        async with self._open(method, path, content, timeout_s) as response:
            return await _body(response)

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, content: str | None, timeout_s: float
    ) -> AsyncIterator[httpx.Response]:
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
        client = httpx.AsyncClient(
            base_url=self._server.url,
            headers=headers(self._server) | JSON_BODY,
            timeout=timeout,
            trust_env=not is_loopback(self._server.url),
            verify=self._server.url.startswith("https://"),  # reads all certificates of the system
        )
        with self._faults():
            async with client as http, http.stream(method, f"{CALLS}/node{path}", content=content) as response:
                require_ours(self._server, response)
                if not response.is_success:
                    raise error_of(self._server, response.status_code, await _body(response))
                yield response

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            found = unreachable(self._server, error)
            raise _NotReached(found.message, fix=found.fix) from error
        except httpx.TransportError as error:
            raise self._broke_off(str(error) or type(error).__name__) from error

    def _broke_off(self, why: str) -> _BrokeOff:
        return _BrokeOff(
            f"the server at {self._server.url} went away while it answered ({why})",
            fix="look at what became of it: `aenv ls`",
        )


class _NotReached(NodeUnavailable):
    """Nothing was sent."""


class _BrokeOff(NodeUnavailable):
    """It took the request and broke off: whether it did it is not known."""


async def _body(response: httpx.Response) -> bytes:
    too_much = ProtocolError(f"the server sent more than {MAX_ANSWER_BYTES} bytes")
    return await whole(response.aiter_bytes(), MAX_ANSWER_BYTES, too_much)
