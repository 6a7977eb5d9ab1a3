"""What stands before the control plane: the API key, bounds for bodies. Pure ASGI: streams stay streams."""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aenv_run.api.errors import reply, send_error
from aenv_run.api.keys import Keys

#: No key is asked for: the exact path, or all below it.
OPEN_PATHS = frozenset({"/health", "/metrics", "/openapi.json"})
OPEN_BELOW: tuple[str, ...] = ("/template-files/",)
#: Bodies that are streamed: the route has bounds of its own.
STREAMED_BELOW: tuple[str, ...] = ("/aenv/v1/store/", "/template-files/")


class RequireKey:
    """``X-API-Key``, exactly once and right, or 401."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request or WebSocket."""
        if scope["type"] not in ("http", "websocket") or _is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == b"x-api-key"]
        if len(given) != 1 or not self._keys.matches(given[0]):
            why = "is missing" if not given else "is there more than once" if len(given) > 1 else "is wrong"
            headers = {"WWW-Authenticate": "ApiKey"}
            refusal = reply(401, f"the header X-API-Key {why}", error_code="unauthenticated", headers=headers)
            await send_error(scope, receive, send, refusal)
            return
        await self._app(scope, receive, send)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or any(path.startswith(below) for below in OPEN_BELOW)


class BoundBodies:
    """Bodies of control calls: at most ``limit_bytes``, and all of it within ``limit_s``."""

    def __init__(self, app: ASGIApp, *, limit_bytes: int, limit_s: float) -> None:
        self._app, self._limit_bytes, self._limit_s = app, limit_bytes, limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or any(scope["path"].startswith(below) for below in STREAMED_BELOW):
            await self._app(scope, receive, send)
            return
        said = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if said.isdigit() and int(said) > self._limit_bytes:
            await reply(413, self._too_large())(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive), send)

    def _bounded(self, receive: Receive) -> Receive:
        seen_bytes, complete = 0, False
        until_s = asyncio.get_running_loop().time() + self._limit_s

        async def bounded() -> Message:
            nonlocal seen_bytes, complete
            if complete:  # it only waits for the caller to hang up
                return await receive()
            try:
                async with asyncio.timeout_at(until_s):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not come within {self._limit_s:g} s") from None
            seen_bytes += len(message.get("body", b""))
            if seen_bytes > self._limit_bytes:
                raise HTTPException(413, self._too_large())
            complete = not message.get("more_body", False)
            return message

        return bounded

    def _too_large(self) -> str:
        return f"the body is larger than {self._limit_bytes} bytes"
