"""Bodies of what changes a sandbox: pause, resume, connect, times, network, fork."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from aenv_run.api.wire.create import TIMEOUT_V1_S, TIMEOUT_V2_S, NetworkAsked, Timeout
from aenv_run.api.wire.model import Asked, Flag, Told, Whole
from aenv_run.api.wire.sandboxes import Sandbox
from aenv_run.node_wire import MAX_TIMEOUT_S

MAX_CHILDREN = 20


class PauseAsked(Asked):
    """POST …/pause."""

    memory: Flag | None = Field(None, description="false: keep the file system only; its resume is a cold boot")
    require_healthy_guest: Flag | None = Field(None, description="503 where its daemon does not answer")


class ResumeAsked(Asked):
    """POST …/resume, of the first generation."""

    timeout: Timeout = TIMEOUT_V1_S
    auto_pause: Flag | None = None
    memory: Flag | None = Field(None, description="false: boot from its disk")


class ConnectAsked(Asked):
    """POST /v2/…/connect."""

    timeout: Timeout = TIMEOUT_V2_S
    memory: Flag | None = Field(None, description="false: boot from its disk")


class ConnectV1Asked(Asked):
    """POST /sandboxes/…/connect: the time is not optional."""

    timeout: Timeout


class TimeoutAsked(Asked):
    """POST …/timeout."""

    timeout: Timeout


class RefreshAsked(Asked):
    """POST …/refreshes."""

    duration: Annotated[Whole, Field(ge=0, le=3600)] | None = None


class NetworkUpdate(NetworkAsked):
    """PUT …/network: what is left out goes back to its default."""

    allow_internet_access: Flag | None = Field(None, alias="allow_internet_access")


class ForkAsked(Asked):
    """POST …/fork."""

    timeout: Annotated[Whole, Field(ge=1, le=MAX_TIMEOUT_S)] | None = Field(
        None, description="of each child; without it as was asked for the parent last"
    )
    count: Whole = Field(1, ge=1, le=MAX_CHILDREN)


class ForkError(Told):
    """Why a child could not be had."""

    code: int
    message: str


class ForkedChild(Told):
    """One child, or why there is none."""

    sandbox: Sandbox | None = None
    error: ForkError | None = None
