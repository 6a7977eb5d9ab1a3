"""``Proxy``: from the head of a request to its sandbox, for HTTP, WebSocket and CONNECT alike."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send

from aenv_run.api.admission import Admission
from aenv_run.api.keys import Keys
from aenv_run.api.proxy import refusals
from aenv_run.api.proxy.access import admit
from aenv_run.api.proxy.address import Misrouted, Target, target_of
from aenv_run.api.proxy.exchange import Broken, Exchange, Stale
from aenv_run.api.proxy.headers import Asked, Header, Mask, request_headers
from aenv_run.api.proxy.machines import Connection, Machine, Machines
from aenv_run.api.proxy.places import Places
from aenv_run.api.proxy.refusals import Refused
from aenv_run.errors import AenvError
from aenv_run.node_client import NodeClient
from aenv_run.node_wire import ResumeRequest, SandboxInfo
from aenv_run.sandbox_record import RECORD_NAME
from aenv_run.types import SandboxId

log = logging.getLogger(__name__)

#: An extension of ASGI by our own server: ``{"close": callable}`` ends the client's connection.
CLOSE = "aenv.close"


@dataclass(frozen=True)
class Admitted:
    """A request that may go on, with what it takes along."""

    target: Target
    asked: Asked
    mask: Mask
    machine: Machine
    headers: list[Header]


class Proxy:
    """All traffic into sandboxes. ``api_key`` never gets there."""

    def __init__(self, places: Places, *, domains: tuple[str, ...], api_key: str) -> None:
        self.machines = Machines(places)
        self._domains = domains
        self._api_key = api_key.encode()

    def target(self, asked: Asked, raw_path: bytes) -> Target | None:
        """Whose it is; None: the server's own. ``Refused`` when it names a sandbox wrongly."""
        found = target_of(asked.headers, raw_path, self._domains)
        if isinstance(found, Misrouted):
            raise Refused(400, found.message)
        if found is not None and any(value.lower() != b"chunked" for value in asked.values(b"transfer-encoding")):
            raise Refused(501, "Transfer-Encoding can be chunked alone")
        return found

    async def open(self, target: Target, asked: Asked, *, fresh: bool = False) -> tuple[Admitted, Connection]:
        """A connection for a request that may have it; ``Refused``. See ``Machines.open``."""
        try:
            machine, connection = await self.machines.open(target, partial(admit, target, asked), fresh=fresh)
        except AenvError as error:
            raise refusals.unreachable(target, error.message) from error
        try:
            token = admit(target, asked, machine.place.door)  # it was checked: this says what goes along
        except Refused:  # the sandbox's settings have just changed
            connection.drop()
            raise
        mask = Mask.of(target, asked, machine.place.mask_host)
        headers = request_headers(target, asked, mask, api_key=self._api_key, token=token)
        return Admitted(target, asked, mask, machine, headers), connection

    async def close(self) -> None:
        """End every connection into a sandbox."""
        await self.machines.close()

    async def answer(self, target: Target, asked: Asked, receive: Receive, send: Send) -> None:
        """The service's answer, or why there is none. ``Broken`` when it broke off."""
        try:
            for last in (False, True):
                found, connection = await self.open(target, asked, fresh=last)
                exchange = Exchange(target, asked, found.mask, found.machine, receive, send)
                try:
                    await exchange.run(connection, found.headers)
                    return
                except Stale:
                    self.machines.forget(target)
                    if last:
                        raise refusals.unreachable(target, "its connections end at once") from None
        except Refused as refused:
            if refused.status in (502, 504):
                self.machines.forget(target)
            await send_refused(refused, asked, send)
        except Broken:
            self.machines.forget(target)
            raise


@dataclass(frozen=True)
class AdmittedNode:
    """A node whose resumes count against the server's limit."""

    node: NodeClient
    admission: Admission

    async def get(self, sandbox_id: str) -> SandboxInfo:
        """See ``NodeClient``."""
        return await self.node.get(sandbox_id)

    async def resume(self, sandbox_id: str, request: ResumeRequest) -> SandboxInfo:
        """``LimitReached`` when as many run as may."""
        async with self.admission.admit(request=sandbox_id):
            return await self.node.resume(sandbox_id, request)


def open_proxy(node: NodeClient, admission: Admission, keys: Keys, domains: tuple[str, ...]) -> Proxy:
    """Of a home's node. The record of a sandbox is looked at by its file's status alone."""

    def stamp(sandbox_id: SandboxId) -> object:
        try:
            status = (node.home.sandboxes / sandbox_id / RECORD_NAME).stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    places = Places(AdmittedNode(node, admission), traffic_token=keys.traffic_token, stamp=stamp)
    return Proxy(places, domains=domains, api_key=keys.api_key)


class ProxyMiddleware:
    """ASGI: what belongs to a sandbox goes there, all else to ``app``."""

    def __init__(self, app: ASGIApp, proxy: Proxy) -> None:
        self._app = app
        self._proxy = proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = asked_of(scope)
        try:
            target = self._proxy.target(asked, scope["raw_path"])
        except Refused as refused:
            await send_refused(refused, asked, send)
            return
        if target is None:
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {}).update(route_source=target.source, route="proxy")
        try:
            await self._proxy.answer(target, asked, receive, send)
        except Broken as error:
            log.info("%s port %d: the answer broke off: %s", target.sandbox_id, target.port, error)
            close: Callable[[], None] | None = scope.get("extensions", {}).get(CLOSE, {}).get("close")
            if close is None:
                raise  # any server of ASGI then closes the connection in the middle of the answer
            close()


def asked_of(scope: Scope) -> Asked:
    """The head of an ASGI request. Headers are copied: a server may add trailers to its own list."""
    client = scope.get("client")
    return Asked(
        method=scope["method"].encode("latin-1"),
        query=scope["query_string"],
        headers=tuple((name.lower(), value) for name, value in scope["headers"]),
        scheme=scope["scheme"],
        peer=client[0] if client else "",
    )


async def send_refused(refused: Refused, asked: Asked, send: Send) -> None:
    """As the answer of the request."""
    body = refused.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if asked.first(b"expect") is not None:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if asked.method == b"HEAD" else body})
