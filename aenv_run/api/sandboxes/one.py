"""GET and DELETE of one sandbox."""

from __future__ import annotations

from fastapi import APIRouter

from aenv_run.api.errors import documented
from aenv_run.api.sandboxes.lookup import Found, SandboxPath, find, gone
from aenv_run.api.server import Serving
from aenv_run.api.strict import StrictRoute
from aenv_run.api.wire.sandboxes import SandboxDetail
from aenv_run.errors import NotFound

router = APIRouter(tags=["sandboxes"], route_class=StrictRoute)


@router.get("/sandboxes/{sandbox_id}", responses=documented(404), response_model_exclude_none=True)
async def get(info: Found, serving: Serving) -> SandboxDetail:
    """All that is told about it."""
    return SandboxDetail.detail_of(info, serving)


@router.delete("/sandboxes/{sandbox_id}", status_code=204, responses=documented(404))
async def kill(sandbox_id: SandboxPath, serving: Serving) -> None:
    """End it, running or paused; nothing of it is left."""
    info = await find(serving, sandbox_id)
    try:
        with serving.metrics.operation("kill"):
            await serving.node.kill(info.sandbox_id)
        serving.admission.changed()
    except NotFound:
        raise gone(sandbox_id) from None
