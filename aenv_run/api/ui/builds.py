"""Pages of template builds: all of them, and one with its log while it runs."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from aenv_run.amounts import age, duration
from aenv_run.api.templates.records import BUILD_ID, Build, Line
from aenv_run.api.ui.page import Pages
from aenv_run.errors import NotFound

MAX_BUILDS = 200
#: Of a log's end.
MAX_LINES = 500
_ALL = 1 << 30


def routes(pages: Pages) -> list[BaseRoute]:
    """Those below ``/ui``."""
    own = _Builds(pages)
    return [Route("/builds", own.list), Route("/builds/{id}", own.one)]


@dataclass(frozen=True)
class BuildRow:
    """One build, as words."""

    id: str
    name: str
    state: str
    started: str
    took: str
    reason: str


def build_row(build: Build) -> BuildRow:
    """``took`` counts on while it runs."""
    end_s = build.finished_at_s or time.time()
    version = "" if build.version is None else f":{build.version}"
    step = f" (step {build.reason_step})" if build.reason_step else ""
    return BuildRow(
        id=build.build_id,
        name=f"{build.template}{version}",
        state=build.status,
        started=f"{age(build.created_at_s)} ago",
        took=duration(end_s - build.created_at_s),
        reason=f"{build.reason}{step}" if build.reason else "",
    )


def _text(line: Line) -> str:
    step = f"[{line.step}] " if line.step else ""
    level = f"{line.level}: " if line.level in ("warn", "error") else ""
    return f"{datetime.fromtimestamp(line.at_s, UTC):%H:%M:%S}  {step}{level}{line.message}"


class _Builds:
    def __init__(self, pages: Pages) -> None:
        self._pages, self._records = pages, pages.server.builds.records

    async def list(self, request: Request) -> Response:
        """The newest first."""
        builds = await asyncio.to_thread(self._records.all)
        rows = [build_row(build) for build in builds[:MAX_BUILDS]]
        return self._pages.page(request, "builds.html", "builds_table.html", builds=rows)

    async def one(self, request: Request) -> Response:
        """Its state and the end of its log; a part that renews itself is told when there is no more to come."""
        id = request.path_params["id"]
        if not re.fullmatch(BUILD_ID, id):
            raise NotFound("there is no such build")
        build = await asyncio.to_thread(self._records.read, id)
        lines = await asyncio.to_thread(self._records.lines, id, limit=_ALL)
        values = {"build": build_row(build), "lines": [_text(line) for line in lines[-MAX_LINES:]]}
        answer = self._pages.page(request, "build.html", "build_log.html", **values)
        if build.is_over:
            answer.headers["X-Ended"] = "1"
        return answer
