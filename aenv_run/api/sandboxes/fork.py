"""POST /sandboxes/{id}/fork."""

from __future__ import annotations

from fastapi import APIRouter, Request

from aenv_run.api.errors import documented, status_of
from aenv_run.api.sandboxes.lookup import Found, gone
from aenv_run.api.server import Serving
from aenv_run.api.strict import StrictRoute
from aenv_run.api.wire.life import ForkAsked, ForkedChild, ForkError
from aenv_run.api.wire.sandboxes import Sandbox
from aenv_run.errors import Conflict, NotFound
from aenv_run.lifecycle import State
from aenv_run.node_api import while_connected
from aenv_run.node_wire import ErrorBody, ForkRequest

router = APIRouter(tags=["sandboxes"], route_class=StrictRoute)


@router.post(
    "/sandboxes/{sandbox_id}/fork",
    status_code=201,
    responses=documented(404, 409, 502, 504, 507),
    response_model_exclude_none=True,
)
async def fork(
    info: Found, serving: Serving, request: Request, body: ForkAsked | None = None
) -> list[ForkedChild]:
    """Copies of this very instant; each is a sandbox of its own, or says why it could not be had.

    A caller who hangs up before the answer takes all of them with him.
    """
    asked = body or ForkAsked()
    if info.state is State.PAUSED:
        raise Conflict(f"sandbox {info.sandbox_id} is paused and cannot be forked", fix="connect to it first")
    with serving.metrics.operation("fork"):
        async with serving.admission.admit(asked.count) as call:
            wanted = ForkRequest(count=asked.count, timeout_s=asked.timeout, request=call)
            try:
                reply = await while_connected(request.receive, serving.node.fork(info.sandbox_id, wanted))
            except NotFound:
                raise gone(info.sandbox_id) from None
    return [
        ForkedChild(sandbox=Sandbox.of(child.sandbox, serving))
        if child.sandbox is not None
        else ForkedChild(error=_told(child.error or ErrorBody(code="internal", message="it could not be had")))
        for child in reply.children
    ]


def _told(error: ErrorBody) -> ForkError:
    return ForkError(code=status_of(error.error()), message=error.message)
