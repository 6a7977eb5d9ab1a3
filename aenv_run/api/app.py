"""The application: what stands before it, and its routes. Each part is registered by one line."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from fastapi import APIRouter, Depends, FastAPI
from fastapi.security import APIKeyHeader
from starlette.types import ASGIApp

from aenv_run.api import node_calls, status
from aenv_run.api.errors import add_handlers
from aenv_run.api.gate import BoundBodies, RequireKey
from aenv_run.api.openapi import describe
from aenv_run.api.proxy import ports
from aenv_run.api.proxy.proxy import ProxyMiddleware
from aenv_run.api.requests import Observe
from aenv_run.api.sandboxes import cold, create, fork, life, network, one, sampling, snapshots, watch
from aenv_run.api.sandboxes import list as listing
from aenv_run.api.server import Server, open_server
from aenv_run.api.settings import Settings
from aenv_run.api.templates import build, lifespan, names
from aenv_run.api.ui.app import Beside, dashboard
from aenv_run.version import VERSION


@asynccontextmanager
async def proxy_lifespan(server: Server) -> AsyncIterator[None]:
    """Connections into sandboxes end with the server."""
    yield
    await server.proxy.close()


#: The control plane; every one of them needs the API key.
ROUTERS: tuple[APIRouter, ...] = (
    create.router,
    cold.router,
    listing.router,
    watch.router,  # before one: /sandboxes/metrics is no sandbox
    one.router,
    life.router,
    fork.router,
    network.router,
    snapshots.router,
    *node_calls.ROUTERS,
    build.router,
    names.router,
)
#: Open for as long as the server serves, in this order; closed in the other.
LIFESPANS: tuple[Callable[[Server], AbstractAsyncContextManager[None]], ...] = (
    proxy_lifespan,
    lifespan.builds,
    sampling.sampling,
)

_key = APIKeyHeader(
    name="X-API-Key", auto_error=False, description="see docs/server.md"
)  # told, not checked: gate.py


def make_app(settings: Settings, server: Server | None = None) -> ASGIApp:
    """All of it. ``server``: one that is open already, with a node or guests of its own."""
    serving = server or open_server(settings)
    bounded = BoundBodies(control_plane(serving), limit_bytes=settings.max_body_bytes, limit_s=settings.body_s)
    return Observe(
        ProxyMiddleware(Beside(RequireKey(bounded, serving.keys), dashboard(serving)), serving.proxy),
        serving.metrics,
        max_running=settings.max_requests,
    )


def control_plane(server: Server) -> FastAPI:
    """The routes alone."""
    app = FastAPI(
        title="aenv",
        version=VERSION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        strict_content_type=False,  # older SDKs send none
        lifespan=_lifespan,
    )
    app.state.server = server
    app.include_router(status.router)
    for router in ROUTERS:
        app.include_router(router, dependencies=[Depends(_key)])
    app.include_router(ports.router)  # a WebSocket: gate.py asks for the key
    add_handlers(app)
    describe(app)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for part in LIFESPANS:
            await stack.enter_async_context(part(app.state.server))
        yield
