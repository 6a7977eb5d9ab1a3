"""The sandbox that a path names."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Depends, Path

from aenv_run.api.errors import ApiError, refuse
from aenv_run.api.server import Server, Serving
from aenv_run.errors import NotFound
from aenv_run.lifecycle import State
from aenv_run.node_wire import SandboxInfo
from aenv_run.types import SandboxId

SandboxPath = Annotated[str, Path(description="the sandbox's id")]


def gone(sandbox_id: str, reason: str = "") -> ApiError:
    """404 for a sandbox: it never was, was killed, or its machine ended."""
    why = f": {reason}" if reason else ""
    return refuse(404, f"sandbox {sandbox_id[:40]!r} was not found{why}", error_code="not_found")


async def find(server: Server, sandbox_id: str) -> SandboxInfo:
    """The sandbox by its whole id; 404 also when it is dead."""
    if not re.fullmatch(SandboxId.pattern, sandbox_id):
        raise gone(sandbox_id)
    try:
        info = await server.node.get(sandbox_id)
    except NotFound:
        raise gone(sandbox_id) from None
    if info.state is State.DEAD:
        raise gone(sandbox_id, info.reason)
    return info


async def _found(sandbox_id: SandboxPath, serving: Serving) -> SandboxInfo:
    return await find(serving, sandbox_id)


#: Of a route with ``{sandbox_id}``: 404 is answered before it begins.
Found = Annotated[SandboxInfo, Depends(_found)]
