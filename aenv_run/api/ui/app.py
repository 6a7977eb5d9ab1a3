"""The dashboard's routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import parse_qs

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.templating import Jinja2Templates
from starlette.types import ASGIApp, Receive, Scope, Send

from aenv_run.api.server import Server
from aenv_run.api.ui import builds, catalog, sandboxes
from aenv_run.api.ui.guard import Guard
from aenv_run.api.ui.page import Pages
from aenv_run.api.ui.session import COOKIE, LIFE_S, make_cookie
from aenv_run.errors import AenvError, Interrupted
from aenv_run.node_wire import known

_HERE = Path(__file__).parent
_MAX_FORM_BYTES = 4096


def dashboard(server: Server) -> ASGIApp:
    """All pages, for requests whose path begins with ``/ui``."""
    words = Environment(loader=FileSystemLoader(_HERE / "pages"), autoescape=True, undefined=StrictUndefined)
    pages = Pages(server, Jinja2Templates(env=words))
    session = _Session(pages)
    app = Starlette(
        routes=[
            Mount(
                "/ui",
                routes=[
                    Route("/", _home),
                    Route("/login", session.ask, methods=["GET"]),
                    Route("/login", session.begin, methods=["POST"]),
                    Route("/logout", session.end, methods=["POST"]),
                    Mount("/static", StaticFiles(directory=_HERE / "static")),
                    *sandboxes.routes(pages),
                    *catalog.routes(pages),
                    *builds.routes(pages),
                ],
            ),
            Route("/ui", _home),
        ],
        exception_handlers=dict.fromkeys((AenvError, HTTPException, Exception), _on_error(pages)),
    )
    return Guard(app, server.keys)


class Beside:
    """ASGI: ``/ui`` and all below it is the dashboard's, which has sessions in place of the API key."""

    def __init__(self, app: ASGIApp, pages: ASGIApp) -> None:
        self._app, self._pages = app, pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request or socket."""
        path = scope.get("path", "")
        is_ours = path == "/ui" or path.startswith("/ui/")
        await (self._pages if is_ours else self._app)(scope, receive, send)


async def _home(_: Request) -> Response:
    return RedirectResponse("/ui/sandboxes", 303)


def _on_error(pages: Pages) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            return pages.problem(request, error.status_code, str(error.detail), "")
        ours = known(error, where="the server's log")
        status = 500 if isinstance(ours, Interrupted) else ours.http_status
        return pages.problem(request, status, ours.message, ours.fix)

    return answer


class _Session:
    """Logging in and out."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    async def ask(self, request: Request) -> Response:
        """The form."""
        return self._pages.bare(request, "login.html", next=_own(request.query_params.get("next", "")), problem="")

    async def begin(self, request: Request) -> Response:
        """The right key gets a cookie."""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _MAX_FORM_BYTES:
                raise HTTPException(413, "the form is too large")
        form = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
        key, after = form.get("key", [""])[0], _own(form.get("next", [""])[0])
        if not self._pages.server.keys.matches(key.strip().encode()):
            return self._pages.bare(
                request, "login.html", 401, next=after, problem="That is not this server's key."
            )
        response = RedirectResponse(after, 303)
        response.set_cookie(
            COOKIE,
            make_cookie(self._pages.server.keys.api_key),
            max_age=LIFE_S,
            path="/ui",
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response

    async def end(self, request: Request) -> Response:
        """Forget the cookie."""
        response = RedirectResponse("/ui/login", 303)
        response.delete_cookie(COOKIE, path="/ui")
        return response


def _own(path: str) -> str:
    """Where to go after the form: a page of ours and nothing else."""
    is_ours = path.startswith("/ui/") and "\\" not in path and path.isprintable() and "//" not in path
    return path if is_ours else "/ui/sandboxes"
