"""PUT /sandboxes/{id}/network."""

from __future__ import annotations

from fastapi import APIRouter

from aenv_run.api.errors import documented, refuse
from aenv_run.api.sandboxes.lookup import Found, gone
from aenv_run.api.server import Serving
from aenv_run.api.strict import StrictRoute
from aenv_run.api.wire.create import egress
from aenv_run.api.wire.life import NetworkUpdate
from aenv_run.errors import Conflict, NotFound
from aenv_run.lifecycle import State
from aenv_run.node_wire import NetworkRequest

router = APIRouter(tags=["sandboxes"], route_class=StrictRoute)


@router.put("/sandboxes/{sandbox_id}/network", status_code=204, responses=documented(404, 409))
async def update(info: Found, serving: Serving, body: NetworkUpdate) -> None:
    """What it may reach, from now on and also of what is connected; what is left out goes back to its default."""
    if (part := body.refused()) is not None:
        raise refuse(400, f"{part} is not supported", error_code="unsupported")
    if body.allow_public_traffic is not None or body.mask_request_host is not None:
        raise refuse(400, "who may reach its ports is settled when it is made", error_code="unsupported")
    if info.state is State.PAUSED:
        raise Conflict(f"sandbox {info.sandbox_id} is paused", fix="connect to it first")
    internet, allow, deny = egress(body.allow_internet_access, body.allow_out, body.deny_out)
    wanted = NetworkRequest(internet=internet, allow=allow, deny=deny, replace=True)
    try:
        await serving.node.set_network(info.sandbox_id, wanted)
    except NotFound:
        raise gone(info.sandbox_id) from None
