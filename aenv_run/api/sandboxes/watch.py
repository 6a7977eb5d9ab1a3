"""What is seen of a sandbox from outside: metrics, which its daemon tells, and its log, which the node keeps."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Literal

from fastapi import APIRouter, Query

from aenv_run.api.errors import documented
from aenv_run.api.sandboxes.lookup import Found, gone
from aenv_run.api.server import Server, Serving
from aenv_run.api.strict import StrictRoute
from aenv_run.api.wire.watch import LogEntryTold, LogLine, LogsV1, LogsV2, MetricsBySandbox, SandboxMetric
from aenv_run.errors import AenvError, InvalidInput, NotFound, SandboxDead
from aenv_run.node_wire import SandboxInfo
from aenv_run.sandbox_log import Level, LogEntry

router = APIRouter(tags=["sandboxes"], route_class=StrictRoute)
#: A daemon that is slower than this is told as one that does not answer.
PATIENCE_S = 10.0
MAX_IDS = 100
MAX_LINES = 1000
LEVELS: tuple[Level, ...] = ("debug", "info", "warn", "error")
Milliseconds = Annotated[int | None, Query(ge=0, le=1 << 53, description="since the epoch, in milliseconds")]
Seconds = Annotated[int | None, Query(ge=0, le=1 << 40, description="since the epoch, in seconds")]
Lines = Annotated[int, Query(ge=0, le=MAX_LINES)]


async def metric_of(server: Server, info: SandboxInfo) -> SandboxMetric | None:
    """Now; None for one without a machine."""
    if info.address is None:
        return None
    try:
        async with asyncio.timeout(PATIENCE_S), server.guests(info.address.endpoint, info.access_token) as guest:
            return SandboxMetric.of(await guest.metrics(), info.machine.cpus, time.time())
    except TimeoutError:
        raise SandboxDead(f"the daemon of sandbox {info.sandbox_id} did not answer in {PATIENCE_S:g} s") from None


async def metric_if_any(server: Server, sandbox_id: str) -> SandboxMetric | None:
    """As ``metric_of``; None also for one that is gone or does not answer."""
    try:
        return await metric_of(server, await server.node.get(sandbox_id))  # a list of them has no tokens
    except AenvError:
        return None


@router.get("/sandboxes/metrics", responses=documented())
async def metrics_of_several(
    serving: Serving, sandbox_ids: Annotated[str, Query(max_length=8192, description="ids, with commas between")]
) -> MetricsBySandbox:
    """Of those that run, now; one that is gone or does not answer is left out."""
    ids = list(dict.fromkeys(id for id in sandbox_ids.split(",") if id))
    if len(ids) > MAX_IDS:
        raise InvalidInput(f"sandbox_ids: {len(ids)} ids, and at most {MAX_IDS} are answered at once")
    known = {info.sandbox_id: info for info in await serving.node.list()}
    wanted = [id for id in ids if id in known]
    found = await asyncio.gather(*(metric_if_any(serving, id) for id in wanted))
    return MetricsBySandbox(sandboxes={id: m for id, m in zip(wanted, found, strict=True) if m is not None})


@router.get("/sandboxes/{sandbox_id}/metrics", responses=documented(404, 502))
async def metrics(
    info: Found, serving: Serving, start: Seconds = None, end: Seconds = None
) -> list[SandboxMetric]:
    """What it used between ``start`` and ``end``, as far as that was noted, and what it uses now, if that is too.

    A paused one has a past at most.
    """
    now_s = time.time()
    past = serving.samples.between(info.sandbox_id, start, end)
    if (start is not None and now_s < start) or (end is not None and now_s > end + 1):
        return past
    found = await metric_of(serving, info)
    return past if found is None else [*past, found]


@router.get("/sandboxes/{sandbox_id}/logs", responses=documented(404))
async def logs_v1(info: Found, serving: Serving, start: Milliseconds = None, limit: Lines = MAX_LINES) -> LogsV1:
    """Its log, oldest first."""
    entries = [entry for entry in await _log(serving, info) if start is None or entry.at_s * 1000 >= start][:limit]
    return LogsV1(
        logs=tuple(LogLine(timestamp=told.timestamp, line=told.message) for told in map(LogEntryTold.of, entries)),
        log_entries=tuple(map(LogEntryTold.of, entries)),
    )


@router.get("/v2/sandboxes/{sandbox_id}/logs", responses=documented(404))
async def logs(
    info: Found,
    serving: Serving,
    cursor: Milliseconds = None,
    limit: Lines = MAX_LINES,
    direction: Literal["forward", "backward"] = "forward",
    level: Annotated[Level | None, Query(description="at least")] = None,
    search: Annotated[str | None, Query(max_length=256, description="only lines with this text")] = None,
) -> LogsV2:
    """Its log: from ``cursor`` on, oldest first, or ``backward`` from it."""
    entries = await _log(serving, info)
    if level is not None:
        entries = [entry for entry in entries if LEVELS.index(entry.level) >= LEVELS.index(level)]
    if search:
        entries = [entry for entry in entries if search in entry.message]
    if direction == "backward":
        entries.reverse()
    if cursor is not None and direction == "forward":
        entries = [entry for entry in entries if entry.at_s * 1000 >= cursor]
    elif cursor is not None:
        entries = [entry for entry in entries if entry.at_s * 1000 <= cursor]
    return LogsV2(logs=tuple(map(LogEntryTold.of, entries[:limit])))


async def _log(server: Server, info: SandboxInfo) -> list[LogEntry]:
    try:
        return list((await server.node.log_of(info.sandbox_id)).entries)
    except NotFound:
        raise gone(info.sandbox_id) from None
