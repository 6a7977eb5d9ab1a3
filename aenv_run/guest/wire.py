"""The connection to one daemon: plain calls, Connect calls and streams of bytes, with its token."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterable, AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from pydantic import BaseModel

from aenv_run.drivers.protocol import Endpoint
from aenv_run.guest.connect import parse, raise_for_error, transport_faults
from aenv_run.later import later
from aenv_run.server_link import Daemon

if TYPE_CHECKING:
    import httpx
else:
    httpx = later("httpx")

M = TypeVar("M", bound=BaseModel)
#: Control calls answer in milliseconds; software emulation on a busy host needs far more.
CALL_TIMEOUT_S = 60.0
STREAM_HEADERS = {"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"}


class Empty(BaseModel):
    """A reply that says only that it worked."""


class Wire:
    """One HTTP client. Faults of the connection are ``SandboxDead``."""

    def __init__(
        self,
        endpoint: Endpoint | Daemon,
        *,
        access_token: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._token = access_token
        self._http = httpx.AsyncClient(
            base_url=endpoint.url,
            transport=transport,
            trust_env=isinstance(endpoint, Daemon) and endpoint.far,
            # Without TLS httpx need not read all certificates of the system for each guest.
            verify=endpoint.url.startswith("https://"),
            # Mostly the daemon is near: compressing would only cost time, and streams are read raw.
            headers={"Accept-Encoding": "identity"} | (endpoint.headers if isinstance(endpoint, Daemon) else {}),
            timeout=httpx.Timeout(CALL_TIMEOUT_S, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=4),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections; the guest is not touched."""
        await self._http.aclose()

    def _headers(self, user: str | None = None) -> dict[str, str]:
        headers = {"X-Access-Token": self._token} if self._token else {}
        if user is not None:
            headers["Authorization"] = "Basic " + base64.b64encode(f"{user}:".encode()).decode()
        return headers

    async def _plain(
        self,
        method: str,
        path: str,
        *,
        params: dict[str, str] | None = None,
        json: dict[str, object] | None = None,
        content: bytes | AsyncIterable[bytes] | None = None,
        headers: dict[str, str] | None = None,
        timeout_s: float | None = CALL_TIMEOUT_S,
    ) -> bytes:
        timeout = httpx.Timeout(timeout_s, connect=10.0)
        all_headers = self._headers() | (headers or {})
        with transport_faults(path):
            response = await self._http.request(
                method, path, params=params, json=json, content=content, headers=all_headers, timeout=timeout
            )
            await raise_for_error(response)
        return response.content

    async def _call(self, method: str, request: dict[str, object], reply: type[M], user: str | None = None) -> M:
        headers = self._headers(user) | {"Connect-Protocol-Version": "1"}
        with transport_faults(method):
            response = await self._http.post(f"/{method}", json=request, headers=headers)
            await raise_for_error(response)
        return parse(reply, response.content)

    async def unary(self, method: str, request: dict[str, object]) -> object:
        """One call of process.Process (see ``Calls``)."""
        return await self._call(f"process.Process/{method}", request, Empty)

    async def feed(self, pid: int, chunks: AsyncIterable[bytes]) -> None:
        """All of it to a process's standard input, then its end (see ``Calls``)."""
        await self._plain("PUT", "/aenv/input", params={"pid": str(pid)}, content=chunks, timeout_s=None)

    async def _download(self, path: str, params: dict[str, str]) -> AsyncIterator[bytes]:
        with transport_faults(path):
            async with self._http.stream("GET", path, params=params, headers=self._headers()) as response:
                await raise_for_error(response)
                async for chunk in response.aiter_raw():
                    yield chunk
