"""What stands before every page: the session, the origin of what changes something, and what pages may load."""

from __future__ import annotations

from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aenv_run.api.keys import Keys
from aenv_run.api.ui.session import COOKIE, is_own_page, is_valid

#: Nothing from elsewhere, no script in a page, no page of ours in another's.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """ASGI wrapper. ``/ui/login`` and ``/ui/static/`` are open; forms and sockets must come from our own pages."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request or socket."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        connection = HTTPConnection(scope)
        refusal = self._refusal(connection, scope)
        if refusal is None:
            await self._app(scope, receive, self._with_headers(send) if scope["type"] == "http" else send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": ""})
        else:
            await refusal(scope, receive, self._with_headers(send))

    def _refusal(self, connection: HTTPConnection, scope: Scope) -> Response | None:
        changes = scope["type"] == "websocket" or scope["method"] not in ("GET", "HEAD")
        if changes and not is_own_page(connection):
            return PlainTextResponse("this was not asked by a page of this server\n", 403)
        path = connection.url.path
        if path == "/ui/login" or path.startswith("/ui/static/"):
            return None
        if is_valid(connection.cookies.get(COOKIE, ""), self._keys.api_key):
            return None
        if changes or "x-fragment" in connection.headers:
            return PlainTextResponse("log in first\n", 401)
        return RedirectResponse(f"/ui/login?next={quote(path, safe='')}", 303)

    @staticmethod
    def _with_headers(send: Send) -> Send:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        return sending
