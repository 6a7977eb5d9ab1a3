"""GET /sandboxes and /v2/sandboxes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal
from urllib.parse import parse_qsl, unquote

from fastapi import APIRouter, Query, Response

from aenv_run.api.errors import documented
from aenv_run.api.paging import MAX_PAGE, NEXT_TOKEN, page
from aenv_run.api.references import catalog_reference
from aenv_run.api.server import Serving
from aenv_run.api.strict import StrictRoute
from aenv_run.api.wire.model import at
from aenv_run.api.wire.sandboxes import SHOWN, ListedSandbox
from aenv_run.errors import InvalidInput, NotFound
from aenv_run.node_wire import SandboxInfo

router = APIRouter(tags=["sandboxes"], route_class=StrictRoute)
LIST_ERRORS = documented()
MetadataQuery = Annotated[
    str | None, Query(max_length=65536, description="k=v&k=v, keys and values percent-encoded")
]


def metadata_filter(text: str | None) -> dict[str, str]:
    """The pairs of ``metadata``: SDKs encode keys and values, then the form, then the query."""
    if not text:
        return {}
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=True, errors="strict", max_num_fields=256)
        return {unquote(key, errors="strict"): unquote(value, errors="strict") for key, value in pairs}
    except (ValueError, UnicodeDecodeError) as error:
        raise InvalidInput(f"metadata: {error}", fix="write k=v&k=v, percent-encoded") from error


def states_filter(values: list[str] | None) -> frozenset[str]:
    """``running,paused``, or the parameter more than once; none is both."""
    words = [word.strip() for value in values or () for word in value.split(",") if word.strip()]
    if unknown := [word for word in words if word not in ("running", "paused")]:
        raise InvalidInput(f"state: {unknown[0][:40]!r} is none", fix="write running, paused or both with a comma")
    return frozenset(words) or frozenset({"running", "paused"})


def _has(info: SandboxInfo, metadata: dict[str, str]) -> bool:
    return all(info.metadata.get(key) == value for key, value in metadata.items())


@router.get("/sandboxes", responses=LIST_ERRORS, response_model_exclude_none=True)
async def list_running(serving: Serving, metadata: MetadataQuery = None) -> list[ListedSandbox]:
    """Those that run, newest first."""
    wanted = metadata_filter(metadata)
    infos = [i for i in await serving.node.list() if SHOWN.get(i.state) == "running" and _has(i, wanted)]
    return [ListedSandbox.of(info) for info in sorted(infos, key=_place, reverse=True)]


@router.get("/v2/sandboxes", responses=LIST_ERRORS, response_model_exclude_none=True)
async def list_all(
    serving: Serving,
    response: Response,
    metadata: MetadataQuery = None,
    state: Annotated[list[str] | None, Query(max_length=16, description="running, paused, or both")] = None,
    order: Literal["asc", "desc"] = "desc",
    started_after: Annotated[datetime | None, Query(alias="startedAfter")] = None,
    template: Annotated[str | None, Query(max_length=256)] = None,
    limit: Annotated[int | None, Query(ge=1, le=MAX_PAGE, description="without it: all")] = None,
    next_token: Annotated[str | None, Query(alias="nextToken", max_length=1024)] = None,
) -> list[ListedSandbox]:
    """Those that run or are paused; ``x-next-token`` leads to the next page."""
    wanted, states = metadata_filter(metadata), states_filter(state)
    infos = [i for i in await serving.node.list() if SHOWN.get(i.state) in states and _has(i, wanted)]
    if started_after is not None:
        after = started_after if started_after.tzinfo else started_after.replace(tzinfo=UTC)
        infos = [i for i in infos if at(i.created_at_s) > after]
    if template is not None:
        infos = [i for i in infos if _is_of(i, template)]
    rows, following = page(infos, _place, token=next_token, limit=limit, oldest_first=order == "asc")
    if following is not None:
        response.headers[NEXT_TOKEN] = following
    return [ListedSandbox.of(info) for info in rows]


def _place(info: SandboxInfo) -> tuple[float, str]:
    return info.created_at_s, info.sandbox_id


def _is_of(info: SandboxInfo, template: str) -> bool:
    try:
        text = catalog_reference(template).text
    except NotFound:
        return False
    return text in (info.name, info.snapshot_id, info.reference)
