"""The node's control plane over HTTP on a private unix socket. Errors are ``{code, message, fix}``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from aenv_run.drivers.select import Selected
from aenv_run.errors import AenvError, Interrupted, InvalidInput
from aenv_run.node_core import Node
from aenv_run.node_wire import (
    CreateRequest,
    DriverReply,
    ErrorBody,
    ForkEntry,
    ForkRequest,
    ForkStart,
    Health,
    NetworkRequest,
    PauseRequest,
    PoolInfo,
    PoolList,
    PoolRequest,
    ResetRequest,
    ResumeRequest,
    SandboxInfo,
    SandboxList,
    SandboxLogReply,
    ShutdownRequest,
    SnapshotReply,
    SnapshotRequest,
    TimeoutRequest,
    known,
)
from aenv_run.paths import Home
from aenv_run.version import VERSION as VERSION

T = TypeVar("T")


class Service:
    """The node behind the API, once it is there: it is selecting its driver while the socket serves already."""

    def __init__(
        self, home: Home, shutdown: Callable[[], None], *, repository: str = "", driver: str = "auto"
    ) -> None:
        self.home = home
        self.repository = repository or str(home.repository)
        self.driver = driver
        self.shutdown = shutdown
        self.in_flight = 0
        self._ready: asyncio.Future[tuple[Node, Selected]] = asyncio.get_running_loop().create_future()

    def begin(self, node: Node, selected: Selected) -> None:
        """From now on calls are answered."""
        self._ready.set_result((node, selected))

    def fail(self, error: AenvError) -> None:
        """Every call that needs a node gets ``error``."""
        self._ready.set_exception(error)
        self._ready.exception()  # marks it as seen: nobody may ask before the process ends

    async def node(self) -> Node:
        """Waits until the node has begun."""
        return (await asyncio.shield(self._ready))[0]

    async def selected(self) -> Selected:
        """The driver and why."""
        return (await asyncio.shield(self._ready))[1]

    def node_now(self) -> Node | None:
        """The node, or None while it begins or when it cannot."""
        if not self._ready.done() or self._ready.exception() is not None:
            return None
        return self._ready.result()[0]


class CountRequests:
    """ASGI wrapper: how many requests are being answered, so that an idle node never ends under one."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._service.in_flight += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._service.in_flight -= 1


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Do ``work``, but cancel it when the caller hangs up: Ctrl-C in a command leaves nothing half-made."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        with suppress(asyncio.CancelledError, AenvError):
            await task
        raise Interrupted("the caller went away")
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ForkLines(Response):
    """A fork's answer as it comes, one JSON object per line. A caller who hangs up before its end ends it."""

    media_type = "application/x-ndjson"

    def __init__(self, first: ForkStart | ForkEntry, rest: AsyncGenerator[ForkStart | ForkEntry, None]) -> None:
        super().__init__(status_code=201)
        del self.headers["content-length"]
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        async with aclosing(self._rest):
            with suppress(Interrupted):  # nobody is left to be told
                await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send_line(send, self._first)
        async for line in self._rest:
            await _send_line(send, line)
        await send({"type": "http.response.body", "body": b""})


async def _send_line(send: Send, line: ForkStart | ForkEntry) -> None:
    body = line.model_dump_json().encode() + b"\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})


def make_app(service: Service) -> FastAPI:
    """The application."""
    app = FastAPI(title="aenv node", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(CountRequests, service=service)
    app.add_exception_handler(AenvError, _on_error)
    app.add_exception_handler(Exception, _on_error)  # logged, and told in the same form
    app.add_exception_handler(RequestValidationError, _on_invalid)
    _add_node_routes(app, service)
    _add_sandbox_routes(app, service)
    _add_operation_routes(app, service)
    _add_pool_routes(app, service)
    return app


def _add_node_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Health:
        node = service.node_now()
        counts = node.counts() if node else None
        return Health(
            version=VERSION,
            pid=os.getpid(),
            home=str(service.home.root),
            repository=service.repository,
            guest=str(service.home.guest()),
            driver=service.driver,
            ready=node is not None,
            live=counts.live if counts else 0,
            paused=counts.paused if counts else 0,
            dead=counts.dead if counts else 0,
        )

    @app.get("/driver")
    async def driver() -> DriverReply:
        selected = await service.selected()
        return DriverReply(name=selected.probe.driver.value, mode=selected.probe.mode, why=selected.why)

    @app.post("/shutdown", status_code=202)
    async def shutdown(body: ShutdownRequest) -> Response:
        if body.kill:
            await (await service.node()).kill_live()
        service.shutdown()
        return Response(status_code=202)


def _add_sandbox_routes(app: FastAPI, service: Service) -> None:
    @app.post("/sandboxes", status_code=201)
    async def create(body: CreateRequest, request: Request) -> SandboxInfo:
        node = await service.node()
        return await while_connected(request.receive, node.create(body))

    @app.get("/sandboxes")
    async def list_all() -> SandboxList:
        return SandboxList(sandboxes=tuple((await service.node()).infos()))

    @app.get("/sandboxes/{sandbox_id}")
    async def get(sandbox_id: str) -> SandboxInfo:
        node = await service.node()
        sandbox = node.find(sandbox_id)
        await sandbox.settled()  # who asks for one calls its guest next
        return node.info(sandbox)

    @app.delete("/sandboxes/{sandbox_id}", status_code=204)
    async def kill(sandbox_id: str) -> Response:
        node = await service.node()
        await node.kill(node.find(sandbox_id))
        return Response(status_code=204)

    @app.post("/sandboxes/{sandbox_id}/timeout")
    async def set_timeout(sandbox_id: str, body: TimeoutRequest) -> SandboxInfo:
        node = await service.node()
        return await node.set_timeout(node.find(sandbox_id), body.timeout_s, only_later=body.only_later)

    @app.get("/sandboxes/{sandbox_id}/log")
    async def log_of(sandbox_id: str) -> SandboxLogReply:
        node = await service.node()
        return await node.log_of(node.find(sandbox_id))

    @app.post("/sandboxes/{sandbox_id}/network")
    async def set_network(sandbox_id: str, body: NetworkRequest) -> SandboxInfo:
        node = await service.node()
        return await node.set_network(node.find(sandbox_id), body)


def _add_pool_routes(app: FastAPI, service: Service) -> None:
    @app.get("/pools")
    async def list_pools() -> PoolList:
        return PoolList(pools=tuple((await service.node()).pools.infos()))

    @app.post("/pools")
    async def set_pool(body: PoolRequest) -> PoolInfo:
        return await (await service.node()).set_pool(body)

    @app.delete("/pools/{reference}", status_code=204)
    async def remove_pool(reference: str) -> Response:
        await (await service.node()).remove_pool(reference)
        return Response(status_code=204)


def _add_operation_routes(app: FastAPI, service: Service) -> None:
    # Pause, resume and snapshot run to their end even when the caller goes away: either end is a whole one.
    @app.post("/sandboxes/{sandbox_id}/pause")
    async def pause(sandbox_id: str, body: PauseRequest | None = None) -> SandboxInfo:
        node = await service.node()
        asked = body or PauseRequest()
        return await node.pause(node.find(sandbox_id), hooks=asked.hooks, memory=asked.memory)

    @app.post("/sandboxes/{sandbox_id}/resume")
    async def resume(sandbox_id: str, body: ResumeRequest) -> SandboxInfo:
        node = await service.node()
        settings = {"cold": body.cold, "hooks": body.hooks}
        return await node.resume(node.find(sandbox_id), timeout_s=body.timeout_s, **settings)

    @app.post("/sandboxes/{sandbox_id}/reset", status_code=201)
    async def reset(sandbox_id: str, body: ResetRequest, request: Request) -> SandboxInfo:
        node = await service.node()
        return await while_connected(request.receive, node.reset(node.find(sandbox_id), body))

    @app.post("/sandboxes/{sandbox_id}/fork", status_code=201)
    async def fork(sandbox_id: str, body: ForkRequest, request: Request) -> Response:
        node = await service.node()
        lines = node.fork(node.find(sandbox_id), body)
        return ForkLines(await while_connected(request.receive, anext(lines)), lines)

    @app.post("/sandboxes/{sandbox_id}/snapshots", status_code=201)
    async def snapshot(sandbox_id: str, body: SnapshotRequest) -> SnapshotReply:
        node = await service.node()
        return await node.snapshot(node.find(sandbox_id), body)


async def _on_error(request: Request, error: Exception) -> Response:
    ours = known(error, where="the node's log")
    return JSONResponse(ErrorBody.of(ours).model_dump(), status_code=ours.http_status)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    parts = [f"{'.'.join(str(p) for p in e['loc'][1:]) or 'body'}: {e['msg']}" for e in error.errors()[:5]]
    return await _on_error(request, InvalidInput("; ".join(parts)))
