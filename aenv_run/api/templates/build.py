"""POST /v3/templates, the archives of a build, its start, and how far it is."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from aenv_run.api.errors import documented, refuse
from aenv_run.api.references import catalog_reference
from aenv_run.api.server import Server, Serving
from aenv_run.api.strict import StrictRoute
from aenv_run.api.templates.catalog import Templates
from aenv_run.api.templates.files import HASH
from aenv_run.api.templates.records import Build, Level, Line
from aenv_run.api.templates.start import new_build, start_build
from aenv_run.api.wire.templates import (
    BuildAsked,
    BuildInfo,
    BuildLogs,
    FileUpload,
    LogEntry,
    Reason,
    TemplateAsked,
    TemplateMade,
)
from aenv_run.errors import InvalidInput, NotFound

router = APIRouter(tags=["templates"], route_class=StrictRoute)
#: The path of uploads, which have tokens instead of the API key.
UPLOADS = "/template-files/"
MAX_ENTRIES = 100
TemplatePath = Annotated[str, Path(max_length=512, description="the template's name")]
BuildPath = Annotated[str, Path(max_length=64, description="the build's id")]
HashPath = Annotated[str, Path(pattern=f"^{HASH}$", description="of the archive, as its owner counts it")]


@router.post("/v3/templates", status_code=202, responses=documented(409, 507))
async def request_build(body: TemplateAsked, serving: Serving) -> TemplateMade:
    """A build that waits for its steps; ``name``, ``name:tag`` or ``namespace/name``."""
    build = await new_build(
        serving,
        body.name,
        body.tags or (),
        cpus=body.cpu_count,
        memory_mib=body.memory_mb,
        min_free_disk_mib=body.min_free_disk_mb,
    )
    name = str(build.template)
    return TemplateMade(
        template_id=name, build_id=build.build_id, public=False, names=(name,), tags=build.tags, aliases=(name,)
    )


@router.get(
    "/templates/{template_id}/files/{hash}",
    status_code=201,
    responses=documented(404),
    response_model_exclude_none=True,
)
async def file_link(template_id: TemplatePath, hash: HashPath, serving: Serving, request: Request) -> FileUpload:
    """Whether the archive is here, and where to PUT it."""
    catalog = await serving.catalog()
    await asyncio.to_thread(Templates(catalog, serving.builds.records).find, template_id)
    present = await asyncio.to_thread(serving.archives.has, hash)
    base = serving.settings.public_url or str(request.base_url)
    url = f"{base.rstrip('/')}{UPLOADS}{hash}?token={serving.archives.token(hash)}"
    return FileUpload(present=present, url=url)


@router.put(UPLOADS + "{hash}", status_code=200, responses=documented(403, 411, 429, 507))
async def upload(
    hash: HashPath, serving: Serving, request: Request, token: Annotated[str, Query(max_length=128)] = ""
) -> dict[str, str]:
    """Take an archive. The token of the URL stands for the API key."""
    if not serving.archives.admits(hash, token):
        raise refuse(403, "this URL is not valid, or too old; ask for another one", error_code="unauthenticated")
    length = request.headers.get("content-length", "")
    if not length.isdecimal() or len(length) > 15:
        raise refuse(411, "an archive is sent with its Content-Length")
    await serving.archives.put(hash, request.stream(), int(length))
    return {}


async def find_build(server: Server, template_id: str, build_id: str) -> Build:
    """The build of that template; ``NotFound`` for another's, too."""
    alias = catalog_reference(template_id).alias
    build = await asyncio.to_thread(server.builds.records.read, build_id)
    if build.template != alias:
        raise NotFound(f"template {template_id[:80]!r} has no build {build_id}")
    return build


@router.post("/v2/templates/{template_id}/builds/{build_id}", status_code=202, responses=documented(404, 507))
async def start(template_id: TemplatePath, build_id: BuildPath, body: BuildAsked, serving: Serving) -> Response:
    """Build these steps."""
    await start_build(serving, await find_build(serving, template_id, build_id), body)
    return Response(status_code=202)


@router.get(
    "/templates/{template_id}/builds/{build_id}/status",
    responses=documented(404),
    response_model_exclude_none=True,
)
async def build_status(
    template_id: TemplatePath,
    build_id: BuildPath,
    serving: Serving,
    logs_offset: Annotated[int, Query(alias="logsOffset", ge=0, le=1 << 31)] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_ENTRIES)] = MAX_ENTRIES,
    level: Level | None = None,
) -> BuildInfo:
    """How far it is, with its log from ``logsOffset`` on; at most a hundred lines."""
    build = await find_build(serving, template_id, build_id)  # before its log, which is whole when it is over
    records = serving.builds.records
    lines = await asyncio.to_thread(records.lines, build_id, offset=logs_offset, limit=limit, level=level)
    entries = tuple(map(_entry, lines))
    reason = Reason(message=build.reason, step=build.reason_step) if build.reason is not None else None
    return BuildInfo(
        template_id=str(build.template),
        build_id=build_id,
        status=build.status,
        logs=tuple(entry.message for entry in entries),
        log_entries=entries,
        reason=reason,
    )


@router.get(
    "/templates/{template_id}/builds/{build_id}/logs",
    responses=documented(404),
    response_model_exclude_none=True,
)
async def build_logs(
    template_id: TemplatePath,
    build_id: BuildPath,
    serving: Serving,
    cursor: Annotated[int | None, Query(ge=0, description="milliseconds since 1970: lines from then on")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_ENTRIES)] = MAX_ENTRIES,
    direction: str = "forward",
    level: Level | None = None,
    source: str | None = None,
) -> BuildLogs:
    """Its log, from a time on or back from it."""
    if direction not in {"forward", "backward"} or source not in {None, "temporary", "persistent"}:
        raise InvalidInput("direction is forward or backward, source is temporary or persistent")
    await find_build(serving, template_id, build_id)
    lines = await asyncio.to_thread(serving.builds.records.lines, build_id, limit=1 << 20, level=level)
    if direction == "backward":
        lines = [line for line in reversed(lines) if cursor is None or line.at_s * 1000 <= cursor]
    else:
        lines = [line for line in lines if cursor is None or line.at_s * 1000 >= cursor]
    return BuildLogs(logs=tuple(map(_entry, lines[:limit])))


def _entry(line: Line) -> LogEntry:
    at = datetime.fromtimestamp(line.at_s, UTC)
    return LogEntry(timestamp=at, message=line.message, level=line.level, step=line.step)
