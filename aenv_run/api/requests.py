"""Around every request: a line of the log, its time for Prometheus, and an answer where something failed."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import MutableMapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aenv_run.api.errors import reply, reply_for
from aenv_run.api.metrics import Metrics
from aenv_run.node_wire import known

log = logging.getLogger("aenv_run.api.access")
_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT"})


class Observe:
    """The outermost layer. Query strings are not logged: they may hold signatures."""

    def __init__(self, app: ASGIApp, metrics: Metrics, *, max_running: int) -> None:
        self._app, self._metrics, self._max_running = app, metrics, max_running
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request or WebSocket."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        seen = _Seen(send, _request_id(scope))
        scope.setdefault("state", {})["request_id"] = seen.request_id
        began_s = time.monotonic()
        self._running += 1
        self._metrics.running.set(self._running)
        try:
            if self._running > self._max_running and scope["type"] == "http":
                busy = reply(503, "too many requests at the same time", headers={"Retry-After": "1"})
                await busy(scope, receive, seen.send)
            else:
                await self._app(scope, receive, seen.send)
        except Exception as error:
            if not seen.status:
                log.exception("%s %s failed", scope.get("method", "WebSocket"), scope["path"])
                if scope["type"] == "http":
                    await reply_for(known(error, where="the server's log"))(scope, receive, seen.send)
            elif seen.status < 500:
                log.exception("%s %s broke off", scope.get("method", "WebSocket"), scope["path"])
                raise  # the connection is closed: what was sent is not the whole answer
            else:
                log.exception("%s %s failed", scope.get("method", "WebSocket"), scope["path"])
        finally:
            self._running -= 1
            self._metrics.running.set(self._running)
            self._note(scope, seen, time.monotonic() - began_s)

    def _note(self, scope: Scope, seen: _Seen, took_s: float) -> None:
        method = scope.get("method", "WEBSOCKET")
        state: MutableMapping[str, object] = scope.get("state", {})
        source = str(state.get("route_source", "control_plane"))
        route = str(getattr(scope.get("route"), "path", "") or state.get("route", "unmatched"))
        status = f"{seen.status // 100}xx" if seen.status else "none"
        method = method if method in METHODS or method == "WEBSOCKET" else "other"
        self._metrics.requests.labels(method, route, source, status).observe(took_s)
        facts = {
            "request_id": seen.request_id,
            "method": method,
            "path": scope["path"],
            "status": seen.status,
            "duration_ms": round(took_s * 1000, 1),
            "client": scope["client"][0] if scope.get("client") else "",
        }
        log.info("%s %s %s", method, scope["path"], seen.status, extra={"facts": facts})


class _Seen:
    """Which status was sent."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send, self.request_id = send, request_id
        self.status = 0

    async def send(self, message: Message) -> None:
        """Pass it on; the head gets the request's id."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message["headers"], (b"x-request-id", self.request_id.encode())]}
        elif message["type"] == "websocket.accept":
            self.status = 101
        elif message["type"] == "websocket.close" and not self.status:
            self.status = 403
        await self._send(message)


def _request_id(scope: Scope) -> str:
    """The caller's own, if it is one, so that his log and ours can be put together."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given.decode() if _ID.fullmatch(given) else secrets.token_hex(8)
