"""What the pages ask sandboxes and the node for, beside their records."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime

from aenv_run.api.server import Server
from aenv_run.errors import AenvError, NotFound
from aenv_run.node_wire import SandboxInfo
from aenv_run.types import SandboxId

#: A page waits so long for a daemon; one that does not answer is shown without.
_ANSWER_S = 1.0
_AT_ONCE = 16
#: Of a page; the rest is `aenv logs`.
MAX_LINES = 300


async def memory_used_bytes(server: Server, sandboxes: Iterable[SandboxInfo]) -> dict[SandboxId, int]:
    """Of those that run and whose daemons answer."""
    turns = asyncio.Semaphore(_AT_ONCE)
    found: dict[SandboxId, int] = {}

    async def ask(info: SandboxInfo) -> None:
        if info.address is None:
            return
        async with turns:
            with suppress(AenvError, TimeoutError):
                async with asyncio.timeout(_ANSWER_S):
                    found[info.sandbox_id] = await _used_bytes(server, info.sandbox_id)

    await asyncio.gather(*map(ask, sandboxes))
    return found


async def _used_bytes(server: Server, sandbox_id: SandboxId) -> int:
    info = await server.node.get(sandbox_id)  # a list has no tokens
    if info.address is None:
        raise NotFound("it has no machine any more")
    guest = server.guests(info.address.endpoint, info.access_token)
    try:
        return (await guest.metrics()).mem_used_bytes
    finally:
        await guest.aclose()


async def log_lines(server: Server, info: SandboxInfo) -> list[str]:
    """Its last ones, oldest first."""
    entries = (await server.node.log_of(info.sandbox_id)).entries[-MAX_LINES:]
    return [f"{datetime.fromtimestamp(entry.at_s, UTC):%H:%M:%S}  {entry.message}" for entry in entries]
