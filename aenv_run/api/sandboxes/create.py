"""POST /sandboxes and /v2/sandboxes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Request, Response

from aenv_run.api.errors import documented, refuse
from aenv_run.api.idempotency import in_progress
from aenv_run.api.references import ApiReference, catalog_reference
from aenv_run.api.sandboxes.snapshots import was_removed
from aenv_run.api.server import Server, Serving
from aenv_run.api.strict import StrictRoute
from aenv_run.api.wire.create import CreateV1, CreateV2
from aenv_run.api.wire.sandboxes import Sandbox
from aenv_run.errors import Conflict, InvalidInput, NotFound, SandboxKilled
from aenv_run.lifecycle import State
from aenv_run.node_api import while_connected
from aenv_run.node_wire import SandboxInfo
from aenv_run.types import SnapshotId

router = APIRouter(tags=["sandboxes"], route_class=StrictRoute)
CREATE_ERRORS = documented(403, 404, 409, 422, 502, 504, 507)
Key = Annotated[
    str | None,
    Header(
        pattern=r"^[a-z0-9-]{1,255}$", description="of a call that may be repeated: a repeat gets the same answer"
    ),
]


async def launch(
    server: Server, asked: CreateV2, request: Request | None = None, *, call: str | None = None
) -> SandboxInfo:
    """One sandbox. With ``request``: a caller who hangs up before he has it takes it with him."""
    if (part := asked.refused()) is not None:
        raise refuse(400, f"{part} is not supported", error_code="unsupported")
    reference = catalog_reference(asked.template_id)
    if reference.alias is None and await was_removed(server, SnapshotId(reference.text)):
        raise NotFound(f"template {reference.text[:80]!r} not found: this snapshot was deleted")
    with server.metrics.operation("create"):
        async with server.admission.admit(request=call) as name:
            making = _create(server, asked, reference, name)
            return await (while_connected(request.receive, making) if request is not None else making)


async def _create(server: Server, asked: CreateV2, reference: ApiReference, call: str) -> SandboxInfo:
    """By what the name means in the catalog, else in the settings."""
    other = server.settings.templates.get(reference.text)
    for text in [reference.text, *([other] if other else [])]:
        try:
            return await server.node.create(asked.to_node(text, request=call, alias=reference.alias))
        except SandboxKilled as error:
            raise Conflict(f"{error.message} while it was started", fix="create another one") from error
        except NotFound as error:
            why = error
    raise NotFound(f"template {asked.template_id[:80]!r} not found: {why.message}") from why


@router.post("/v2/sandboxes", status_code=201, responses=CREATE_ERRORS, response_model_exclude_none=True)
async def create(body: CreateV2, serving: Serving, request: Request, idempotency_key: Key = None) -> Sandbox:
    """Launch a template or a snapshot, by id, ``name``, ``name:tag`` or ``namespace/name``."""
    if idempotency_key is None:
        return Sandbox.of(await launch(serving, body, request), serving)
    return await _once(idempotency_key, body, serving)


async def _once(key: str, body: CreateV2, server: Server) -> Sandbox:
    """With an idempotency key. It is made to its end though the caller hangs up: he will ask again."""

    async def work(call: str) -> str:
        return Sandbox.of(await launch(server, body, call=call), server).model_dump_json()

    async def find(call: str) -> str | None:
        found = next((info for info in await server.node.list() if info.terms.request == call), None)
        if found is None or found.state is State.DEAD:
            return None
        if found.state is State.STARTING:
            raise in_progress()  # by a server that was killed: the node takes it back, or is just through
        return Sandbox.of(await server.node.get(found.sandbox_id), server).model_dump_json()

    return Sandbox.model_validate_json(await server.outcomes.once(key, body, work, find=find))


@router.post("/sandboxes", status_code=201, responses=CREATE_ERRORS, response_model_exclude_none=True)
async def create_v1(
    body: CreateV1, serving: Serving, request: Request, response: Response, idempotency_key: Key = None
) -> Sandbox:
    """As POST /v2/sandboxes, with the first generation's defaults."""
    try:
        made = await create(body, serving, request, idempotency_key)
    except NotFound as error:
        raise InvalidInput(error.message, fix=error.fix) from error
    response.headers["x-agentenv-sandbox-id"] = made.sandbox_id
    return made
