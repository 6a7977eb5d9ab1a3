"""Every error of the API is JSON ``{code, message[, error_code]}`` with ``code`` the HTTP status: made here."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from aenv_run.errors import AenvError, Interrupted, LimitReached, NodeUnavailable
from aenv_run.node_wire import known

log = logging.getLogger(__name__)

#: For a caller who was refused for lack of room, or whose node is just being started.
RETRY_AFTER_S = 2
#: What clients of E2B know under another word.
ERROR_CODES: Mapping[type[AenvError], str] = {LimitReached: "sandbox_capacity_unavailable"}
#: Of refusals that no error of ours says.
WORDS = {400: "invalid_input", 404: "not_found", 405: "unsupported", 408: "invalid_input", 409: "conflict"}
WORDS |= {411: "invalid_input", 413: "too_large", 503: "limit_reached"}
#: Every route may answer these.
EVERYWHERE = (400, 401, 413, 429, 500, 501, 503)
MAX_MESSAGE = 2000
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


class ErrorReply(BaseModel):
    """What every error looks like."""

    code: int = Field(description="the HTTP status", ge=400, le=599)
    message: str
    error_code: str = Field(description="which error it is, for programs; see docs/errors.md")


class ApiError(Exception):
    """A refusal with a status of its own choice, to raise in a route where no error of ours says it."""

    def __init__(
        self, status: int, message: str, error_code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.error_code, self.headers = status, message, error_code, headers or {}


def refuse(
    status: int, message: str, *, error_code: str | None = None, headers: Mapping[str, str] | None = None
) -> ApiError:
    """An ``ApiError``."""
    return ApiError(status, message, error_code, headers)


def documented(*statuses: int) -> dict[int | str, dict[str, object]]:
    """For ``responses=`` of a route: these, and those that every route may answer."""
    return {
        status: {"model": ErrorReply, "description": DESCRIPTIONS.get(status, "refused")}
        for status in sorted({*statuses, *EVERYWHERE})
    }


DESCRIPTIONS = {
    400: "the request is malformed, or asks for what cannot be",
    401: "the API key is missing, wrong, or there more than once",
    403: "the snapshot has no signature of a key that is required",
    404: "there is no such object",
    409: "its state forbids that",
    413: "the body is too large",
    422: "a hook of the snapshot failed",
    429: "a limit is reached; Retry-After says when to ask again",
    500: "a fault of the server, see its log",
    501: "that is not supported",
    502: "the sandbox is gone or does not answer",
    503: "the node cannot be reached or has no driver that works",
    504: "it took too long",
    507: "a disk of the server is full",
}


def reply(
    status: int, message: str, *, error_code: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """The answer itself."""
    word = error_code or WORDS.get(status, "internal")
    body: dict[str, object] = {"code": status, "message": message[:MAX_MESSAGE], "error_code": word}
    return JSONResponse(body, status_code=status, headers=dict(headers or {}))


def status_of(error: AenvError) -> int:
    """The HTTP status of one of our errors."""
    return error.http_status if error.http_status != Interrupted.http_status else 500


def reply_for(error: AenvError) -> Response:
    """The answer for one of our errors."""
    status = status_of(error)
    message = f"{error.message} ({error.fix})" if error.fix else error.message
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    word = next((word for cls, word in ERROR_CODES.items() if isinstance(error, cls)), error.code)
    return reply(status, message, error_code=word, headers=headers)


def add_handlers(app: FastAPI) -> None:
    """Make ``app`` answer so, whatever fails."""
    app.add_exception_handler(AenvError, _on_ours)
    app.add_exception_handler(ApiError, _on_refusal)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_fault)


async def _on_ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, AenvError)
    response = reply_for(error)
    if isinstance(error, NodeUnavailable) and request.method == "POST":
        response.headers["Should-Retry"] = "false"  # it may have been done
    if response.status_code == 500 and not isinstance(error, Interrupted):
        log.error("%s %s: %s", request.method, request.url.path, error)
    return response


async def _on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return reply(error.status, error.message, error_code=error.error_code, headers=error.headers)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    parts = [_said(found) for found in error.errors()[:5]]
    return reply(400, "; ".join(parts), error_code="invalid_input")


def _said(found: Mapping[str, object]) -> str:
    where = found.get("loc")
    names = [str(part)[:80] for part in where[1:]] if isinstance(where, tuple | list) else []
    text = str(found.get("msg", "is wrong")).removeprefix("Value error, ")
    if found.get("type") == "json_invalid":
        context = found.get("ctx")
        return f"body: it is no JSON: {context.get('error') if isinstance(context, dict) else text}"
    if found.get("type") == "extra_forbidden":
        text = "this field is not known, and would be ignored"
    return f"{'.'.join(names) or 'body'}: {text}"


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message, headers = str(error.detail), dict(error.headers or {})
    if error.status_code == 404:
        message = f"route not found: {request.method} {request.url.path[:200]}"
    elif error.status_code == 405:
        message = f"{request.method} is not allowed for {request.url.path[:200]}"
        headers["Allow"] = ", ".join(sorted(_allowed(request)))
    return reply(error.status_code, message, headers=headers)


def _allowed(request: Request) -> set[str]:
    """The methods of every route of that path (Starlette says those of the first one)."""
    tried = [(method, {**request.scope, "method": method}) for method in _METHODS]
    routes = request.app.routes
    return {method for method, scope in tried if any(one.matches(scope)[0] is Match.FULL for one in routes)}


async def _on_fault(request: Request, error: Exception) -> Response:
    return reply_for(known(error, where="the server's log"))


async def send_error(scope: Scope, receive: Receive, send: Send, response: Response) -> None:
    """From ASGI code: answer with ``response``; a WebSocket is closed where the server knows nothing better."""
    if scope["type"] == "websocket":
        await receive()
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": 1008, "reason": ""})
            return
    await response(scope, receive, send)
