"""POST /sandboxes and /v2/sandboxes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Request, Response

from aenv_run.api.errors import documented, refuse
from aenv_run.api.references import catalog_reference
from aenv_run.api.server import Server, Serving
from aenv_run.api.wire.create import CreateV1, CreateV2
from aenv_run.api.wire.sandboxes import Sandbox
from aenv_run.errors import InvalidInput, NotFound
from aenv_run.node_api import while_connected
from aenv_run.node_wire import SandboxInfo

router = APIRouter(tags=["sandboxes"])
CREATE_ERRORS = documented(403, 404, 409, 422, 502, 504, 507)


async def launch(server: Server, asked: CreateV2, request: Request) -> SandboxInfo:
    """One sandbox; a caller who hangs up before he has it takes it with him."""
    if (part := asked.refused()) is not None:
        raise refuse(400, f"{part} is not supported", error_code="unsupported")
    reference = catalog_reference(asked.template_id)
    with server.metrics.operation("create"):
        async with server.admission.admit() as name:
            wanted = asked.to_node(reference.text, request=name, alias=reference.alias)
            try:
                return await while_connected(request.receive, server.node.create(wanted))
            except NotFound as error:
                raise NotFound(f"template {asked.template_id[:80]!r} not found: {error.message}") from error


@router.post("/v2/sandboxes", status_code=201, responses=CREATE_ERRORS, response_model_exclude_none=True)
async def create(
    body: CreateV2,
    serving: Serving,
    request: Request,
    idempotency_key: Annotated[str | None, Header(pattern=r"^[a-z0-9-]{1,255}$")] = None,
) -> Sandbox:
    """Launch a template or a snapshot, by id, ``name``, ``name:tag`` or ``namespace/name``."""
    return Sandbox.of(await launch(serving, body, request), serving)


@router.post("/sandboxes", status_code=201, responses=CREATE_ERRORS, response_model_exclude_none=True)
async def create_v1(body: CreateV1, serving: Serving, request: Request, response: Response) -> Sandbox:
    """As POST /v2/sandboxes, with the first generation's defaults."""
    try:
        info = await launch(serving, body, request)
    except NotFound as error:
        raise InvalidInput(error.message, fix=error.fix) from error
    response.headers["x-agentenv-sandbox-id"] = info.sandbox_id
    return Sandbox.of(info, serving)
