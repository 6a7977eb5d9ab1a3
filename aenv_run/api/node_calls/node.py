"""The node's own calls, passed through: whoever has the server's key may do what a command on its machine may."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from urllib.parse import quote

import httpx
from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from aenv_run.api.node_calls.route import CallRoute, answer, body_of
from aenv_run.api.server import Server, Serving
from aenv_run.errors import AenvError, Interrupted, InvalidInput, NotFound, Unsupported
from aenv_run.node_api import while_connected
from aenv_run.node_wire import CreateRequest, ForkRequest
from aenv_run.server_link import CALLS, VERSION_HEADER
from aenv_run.types import Model
from aenv_run.version import VERSION

ONE = r"/sandboxes/[a-z0-9-]{1,64}"
#: Everything that commands ask a node, but its end: that is for those who are on its machine.
PASSED = (
    ("GET", r"/driver"),
    ("GET", r"/sandboxes"),
    ("POST", r"/sandboxes"),
    ("GET", ONE),
    ("DELETE", ONE),
    ("GET", rf"{ONE}/log"),
    ("POST", rf"{ONE}/(?:pause|resume|reset|fork|snapshots|timeout|network)"),
    ("GET", r"/pools"),
    ("POST", r"/pools"),
    ("DELETE", r"/pools/[A-Za-z0-9._:-]{1,256}"),
)
#: Of a request: settings, environment, metadata.
MAX_BODY_BYTES = 4 << 20

router = APIRouter(prefix=CALLS, route_class=CallRoute, include_in_schema=False)


class About(Model):
    """Who answers."""

    version: str


@router.get("/about")
async def about() -> About:
    """That this is a server, and that the key is right."""
    return About(version=VERSION)


@router.get("/node/health")
async def health(serving: Serving) -> Response:
    """How the node is; empty when there is none. Starts none."""
    found = await serving.node.health()
    return Response(status_code=204) if found is None else JSONResponse(found.model_dump(mode="json"))


@router.api_route("/node/{path:path}", methods=["GET", "POST", "DELETE"])
async def call(path: str, request: Request, serving: Serving) -> Response:
    """One call, and its answer as it comes."""
    target = f"/{path}"
    if not is_passed(request.method, target):
        raise NotFound(f"{request.method} {target[:80]} is no call for clients of a server")
    body = await body_of(request, MAX_BODY_BYTES)
    return Passed(_open(serving, request.method, target, request.url.query, body))


def is_passed(method: str, path: str) -> bool:
    """Whether that is one of ``PASSED``."""
    return any(method == known and re.fullmatch(pattern, path) for known, pattern in PASSED)


@asynccontextmanager
async def _open(server: Server, method: str, path: str, query: str, body: bytes) -> AsyncIterator[httpx.Response]:
    async with AsyncExitStack() as stack:
        if method == "POST":
            body = await _admitted(server, path, body, stack)
        target = quote(path, safe="/:") + (f"?{query}" if query else "")
        opened = server.node.local().open(method, target, body or None)
        yield await stack.enter_async_context(opened)


async def _admitted(server: Server, path: str, body: bytes, stack: AsyncExitStack) -> bytes:
    """Within the server's limit of sandboxes, for as long as it takes."""
    try:
        if path == "/sandboxes":
            create = CreateRequest.model_validate_json(body)
            if create.publish:
                raise refuse_publish()
            name = await stack.enter_async_context(server.admission.admit())
            terms = create.terms.model_copy(update={"request": name})
            return create.model_copy(update={"terms": terms}).model_dump_json().encode()
        if path.endswith("/fork"):
            fork = ForkRequest.model_validate_json(body)
            name = await stack.enter_async_context(server.admission.admit(fork.count))
            return fork.model_copy(update={"request": name}).model_dump_json().encode()
        if path.endswith("/resume"):
            await stack.enter_async_context(server.admission.admit(request=path.split("/")[2]))
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidInput(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from None
    return body


def refuse_publish() -> Unsupported:
    """Why no client gets sockets on the server's file system."""
    return Unsupported(
        "a port cannot be published as a unix socket of another machine",
        fix="use `aenv port-forward`, which brings a port to this machine",
    )


class Passed(Response):
    """The node's answer as it comes. A caller who hangs up before its end ends the call, as on its machine."""

    def __init__(self, opening: AbstractAsyncContextManager[httpx.Response]) -> None:
        super().__init__()
        self._opening = opening

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        with suppress(Interrupted):  # nobody is left to be told
            await while_connected(receive, self._pass(scope, receive, send))

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        try:
            async with self._opening as found:
                kind = found.headers.get("content-type", "application/json")
                headers = [(b"content-type", kind.encode()), (VERSION_HEADER.lower().encode(), VERSION.encode())]
                await send({"type": "http.response.start", "status": found.status_code, "headers": headers})
                begun = True
                async for data in found.aiter_bytes():
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except AenvError as error:
            if begun:  # without its last chunk nobody takes the answer for whole
                raise
            await answer(error)(scope, receive, send)
            return
        await send({"type": "http.response.body", "body": b""})
