"""The proxy on a real socket, over the real daemon on the loopback: its tunnels lead to services of the tests."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

import httpx
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from aenv_run.api.app import make_app
from aenv_run.api.proxy.listening import http_protocol
from aenv_run.api.proxy.places import Places
from aenv_run.api.proxy.proxy import Proxy, ProxyMiddleware
from aenv_run.api.server import open_server
from aenv_run.api.settings import Settings
from aenv_run.drivers.protocol import DriverName
from aenv_run.errors import AenvError, NotFound
from aenv_run.lifecycle import State
from aenv_run.network import NetworkPolicy
from aenv_run.node_wire import ResumeRequest, SandboxInfo
from aenv_run.paths import Home
from aenv_run.sandbox_record import Address, Terms
from aenv_run.types import MachineSpec, SandboxId, SnapshotId

DOMAIN = "sandbox.test"
API_KEY = "e2b_" + "7" * 64
ID, OTHER = SandboxId("s" + "a" * 19), SandboxId("s" + "b" * 19)
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class PretendNode:
    """What the node knows of sandboxes. Every change of one is one of its ``stamp``."""

    infos: dict[SandboxId, SandboxInfo] = field(default_factory=dict)
    versions: dict[SandboxId, int] = field(default_factory=dict)
    asked: int = 0
    resumed: list[float] = field(default_factory=list)
    resuming: asyncio.Event = field(default_factory=asyncio.Event)
    resume_gate: asyncio.Event | None = None
    fail_resume: AenvError | None = None
    address: Address | None = None

    def put(self, info: SandboxInfo) -> None:
        """It is so from now on."""
        self.infos[info.sandbox_id] = info
        self.versions[info.sandbox_id] = self.versions.get(info.sandbox_id, 0) + 1

    def change(self, sandbox_id: SandboxId, **changes: object) -> None:
        """Some of it is."""
        self.put(self.infos[sandbox_id].model_copy(update=changes))

    def stamp(self, sandbox_id: SandboxId) -> object:
        return self.versions.get(sandbox_id)

    async def get(self, sandbox_id: str) -> SandboxInfo:
        self.asked += 1
        try:
            return self.infos[SandboxId(sandbox_id)]
        except KeyError:
            raise NotFound(f"there is no sandbox {sandbox_id}") from None

    async def resume(self, sandbox_id: str, request: ResumeRequest) -> SandboxInfo:
        self.resumed.append(request.timeout_s)
        self.resuming.set()
        if self.resume_gate is not None:
            await self.resume_gate.wait()
        if self.fail_resume is not None:
            raise self.fail_resume
        return self.run_again(SandboxId(sandbox_id))

    def run_again(self, sandbox_id: SandboxId) -> SandboxInfo:
        """On another machine at the same address."""
        launches = self.infos[sandbox_id].launches + 1
        self.change(sandbox_id, state=State.RUNNING, address=self.address, launches=launches)
        return self.infos[sandbox_id]


def info(sandbox_id: SandboxId, address: Address | None, token: str, **terms: object) -> SandboxInfo:
    """A sandbox that runs."""
    return SandboxInfo(
        sandbox_id=sandbox_id,
        snapshot_id=SnapshotId("0" * 64),
        reference="tiny:1",
        state=State.RUNNING,
        driver=DriverName.GVISOR,
        mode="systrap",
        origin="booted",
        machine=MachineSpec(),
        metadata={},
        created_at_s=0.0,
        expires_at_s=None,
        on_timeout="kill",
        timeout_s=60.0,
        terms=Terms.model_validate(terms),
        parent=None,
        network=NetworkPolicy(internet=False),
        address=address,
        access_token=token,
    )


def traffic_token(sandbox_id: str) -> str:
    """As the server makes them."""
    return hmac.new(b"seed", sandbox_id.encode(), hashlib.sha256).hexdigest()


@dataclass
class ProxySite:
    """A server with one sandbox, ``ID``, whose daemon has ``token``."""

    port: int
    node: PretendNode
    proxy: Proxy
    token: str
    server: uvicorn.Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def host(self, port: int, sandbox_id: str = ID) -> str:
        """What a browser calls a port."""
        return f"{port}-{sandbox_id}.{DOMAIN}"

    def to(self, port: int, **more: str) -> httpx.AsyncClient:
        """A client whose every request is to that port, by host name."""
        headers = {"Host": self.host(port), **{k.replace("_", "-"): v for k, v in more.items()}}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=20, trust_env=False)

    def envd(self, **more: str) -> httpx.AsyncClient:
        """A client of the daemon, as an SDK is one."""
        headers = {"E2b-Sandbox-Id": ID, "E2b-Sandbox-Port": "49983", "X-Access-Token": self.token}
        headers |= {name.replace("_", "-"): value for name, value in more.items()}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=20, trust_env=False)

    async def raw(self, request: bytes) -> bytes:
        """All that the server says to these bytes, to the end of the connection or a second of silence."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        said = b""
        with suppress(TimeoutError, ConnectionResetError):
            while data := await asyncio.wait_for(reader.read(65536), 1.0):
                said += data
        writer.transport.abort()
        return said

    def pause(self) -> None:
        """As the node tells it when it is done."""
        self.node.change(ID, state=State.PAUSED, address=None)


@asynccontextmanager
async def proxy_site(
    daemon: str, token: str, *, home: Home | None = None, head_s: float = 30.0, **terms: object
) -> AsyncIterator[ProxySite]:
    """Serve until the context ends, over a daemon's URL. With a ``home`` the whole server stands behind it."""
    url = httpx.URL(daemon)
    assert url.port is not None
    address = Address(host=url.host, port=url.port)
    node = PretendNode(address=address)
    node.put(info(ID, address, token, **terms))
    proxy = Proxy(Places(node, traffic_token=traffic_token, stamp=node.stamp), domains=(DOMAIN,), api_key=API_KEY)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        ProxyMiddleware(_own, proxy) if home is None else _whole(home, proxy),
        ws="websockets-sansio",
        http=http_protocol(proxy, head_s=head_s),
        log_config=None,
        lifespan="off",
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve([listener]))
    try:
        yield ProxySite(listener.getsockname()[1], node, proxy, token, server)
    finally:
        await proxy.close()
        server.should_exit = True
        await serving
        listener.close()


def _whole(home: Home, proxy: Proxy) -> ASGIApp:
    server = open_server(Settings(), home)
    keys = replace(server.keys, api_key=API_KEY)
    return make_app(server.settings, replace(server, proxy=proxy, keys=keys))


async def _own(scope: Scope, receive: Receive, send: Send) -> None:
    """The rest of the server."""
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 418, "headers": [(b"content-length", b"3")]})
    await send({"type": "http.response.body", "body": b"own"})


@asynccontextmanager
async def service(handler: Handler) -> AsyncIterator[int]:
    """Something that listens inside the "sandbox"; its port."""
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await handler(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def head_of(reader: asyncio.StreamReader) -> bytes:
    """The head of a request."""
    return await reader.readuntil(b"\r\n\r\n")


def says(answer: bytes) -> Handler:
    """A service that gives the same answer to everybody."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(answer)
        await writer.drain()

    return handler
