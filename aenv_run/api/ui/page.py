"""Making a page: its template, what every page has, whole or only the part that renews itself."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.templating import Jinja2Templates

from aenv_run.api.server import Server


@dataclass(frozen=True)
class Pages:
    """The server and its templates."""

    server: Server
    templates: Jinja2Templates

    def bare(self, request: Request, name: str, status: int = 200, /, **values: object) -> Response:
        """The template alone."""
        return self.templates.TemplateResponse(request, name, values, status_code=status)

    def page(self, request: Request, name: str, fragment: str | None = None, /, **values: object) -> Response:
        """A page, or with ``?fragment`` only the template ``fragment`` that it holds."""
        if fragment is not None and "fragment" in request.query_params:
            return self.bare(request, fragment, **values)
        here = "/".join(request.url.path.split("/")[:3])
        return self.bare(request, name, here=here, **values)

    def problem(self, request: Request, status: int, message: str, fix: str) -> Response:
        """What went wrong, and what to do."""
        return self.bare(request, "problem.html", status, here="", status=status, message=message, fix=fix)
