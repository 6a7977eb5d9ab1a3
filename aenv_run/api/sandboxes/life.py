"""Pause, resume, connect, and the time to live."""

from __future__ import annotations

from fastapi import APIRouter, Response

from aenv_run.api.errors import documented, refuse
from aenv_run.api.sandboxes.lookup import Found, find, gone
from aenv_run.api.server import Server, Serving
from aenv_run.api.strict import StrictRoute
from aenv_run.api.wire.create import TIMEOUT_V1_S
from aenv_run.api.wire.life import (
    ConnectAsked,
    ConnectV1Asked,
    PauseAsked,
    RefreshAsked,
    ResumeAsked,
    TimeoutAsked,
)
from aenv_run.api.wire.sandboxes import Sandbox
from aenv_run.errors import Conflict, NotFound, SandboxDead
from aenv_run.lifecycle import State
from aenv_run.node_wire import PauseRequest, ResumeRequest, SandboxInfo, TimeoutRequest

router = APIRouter(tags=["sandboxes"], route_class=StrictRoute)
#: Others may pause and resume it at the same time.
RACES = 5
RESUME_ERRORS = documented(404, 409, 422, 502, 504, 507)


@router.post("/sandboxes/{sandbox_id}/pause", status_code=204, responses=documented(404, 409, 422, 502, 504, 507))
async def pause(info: Found, serving: Serving, body: PauseAsked | None = None) -> None:
    """Keep its memory and disk, or its disk alone, and end its machine. It then has no end of its own."""
    asked = body or PauseAsked()
    if info.state in (State.PAUSED, State.PAUSING):
        raise Conflict(f"sandbox {info.sandbox_id} is paused already", fix="connect to it to go on")
    try:
        with serving.metrics.operation("pause"):
            await serving.node.pause(info.sandbox_id, PauseRequest(memory=asked.memory is not False))
        serving.admission.changed()
    except NotFound:
        raise gone(info.sandbox_id) from None
    except SandboxDead as error:
        if asked.require_healthy_guest:
            raise refuse(503, error.message, error_code=error.code, headers={"Should-Retry": "false"}) from error
        raise


@router.post(
    "/sandboxes/{sandbox_id}/resume",
    status_code=201,
    responses=RESUME_ERRORS,
    response_model_exclude_none=True,
    deprecated=True,
)
async def resume(info: Found, serving: Serving, body: ResumeAsked | None = None) -> Sandbox:
    """Go on with one that is paused. One that runs may live longer by it."""
    asked = body or ResumeAsked()
    if asked.auto_pause is not None and asked.auto_pause != (info.on_timeout == "pause"):
        raise refuse(400, "autoPause cannot be changed by a resume", error_code="unsupported")
    found, _ = await bring_back(serving, info, asked.timeout, cold=asked.memory is False)
    return Sandbox.of(found, serving)


@router.post(
    "/v2/sandboxes/{sandbox_id}/connect",
    status_code=200,
    responses={**RESUME_ERRORS, 201: {"model": Sandbox, "description": "it was paused, and is resumed"}},
    response_model_exclude_none=True,
)
async def connect(info: Found, serving: Serving, response: Response, body: ConnectAsked | None = None) -> Sandbox:
    """One that runs, for at least this long; one that is paused is resumed (201)."""
    asked = body or ConnectAsked()
    found, resumed = await bring_back(serving, info, asked.timeout, cold=asked.memory is False)
    response.status_code = 201 if resumed else 200
    return Sandbox.of(found, serving)


@router.post(
    "/sandboxes/{sandbox_id}/connect",
    status_code=200,
    responses={**RESUME_ERRORS, 201: {"model": Sandbox, "description": "it was paused, and is resumed"}},
    response_model_exclude_none=True,
)
async def connect_v1(info: Found, serving: Serving, response: Response, body: ConnectV1Asked) -> Sandbox:
    """As POST /v2/sandboxes/{sandboxID}/connect."""
    found, resumed = await bring_back(serving, info, body.timeout, cold=False)
    response.status_code = 201 if resumed else 200
    return Sandbox.of(found, serving)


async def bring_back(
    server: Server, info: SandboxInfo, timeout_s: float, *, cold: bool
) -> tuple[SandboxInfo, bool]:
    """A sandbox that runs for at least ``timeout_s``, and whether it was resumed for that."""
    for _ in range(RACES):
        try:
            if info.state not in (State.PAUSED, State.PAUSING, State.RESUMING):
                if cold:
                    raise refuse(
                        409,
                        f"sandbox {info.sandbox_id} runs: without its memory only one that is paused can start",
                    )
                request = TimeoutRequest(timeout_s=timeout_s, only_later=True)
                return await server.node.set_timeout(info.sandbox_id, request), False
            asked = ResumeRequest(timeout_s=timeout_s, cold=cold)
            with server.metrics.operation("resume"):
                async with server.admission.admit(request=info.sandbox_id):
                    return await server.node.resume(info.sandbox_id, asked), True
        except NotFound:
            raise gone(info.sandbox_id) from None
        except Conflict as error:
            lost = error  # somebody else was faster
        before = info.state
        info = await find(server, info.sandbox_id)
        if info.state is before:
            break
    raise lost


@router.post("/sandboxes/{sandbox_id}/timeout", status_code=204, responses=documented(404, 409))
async def set_timeout(info: Found, serving: Serving, body: TimeoutAsked) -> None:
    """Its time ends so many seconds from now, sooner or later than before."""
    await _set_timeout(serving, info, TimeoutRequest(timeout_s=body.timeout))


@router.post("/sandboxes/{sandbox_id}/refreshes", status_code=204, responses=documented(404, 409))
async def refresh(info: Found, serving: Serving, body: RefreshAsked | None = None) -> None:
    """Its time ends so many seconds from now, if that is later than before."""
    asked = TIMEOUT_V1_S if body is None or body.duration is None else body.duration
    await _set_timeout(serving, info, TimeoutRequest(timeout_s=asked, only_later=True))


async def _set_timeout(server: Server, info: SandboxInfo, request: TimeoutRequest) -> None:
    if info.state in (State.PAUSED, State.PAUSING):
        raise Conflict(f"sandbox {info.sandbox_id} is paused: it has no end", fix="connect to it with a timeout")
    try:
        await server.node.set_timeout(info.sandbox_id, request)
    except NotFound:
        raise gone(info.sandbox_id) from None
