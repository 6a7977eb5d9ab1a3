"""How many sandboxes may have a machine at the same time."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aenv_run.errors import LimitReached
from aenv_run.lifecycle import LIVE
from aenv_run.node_client import NodeClient
from aenv_run.node_wire import calls_of

#: So long a full server refuses without counting anew: a crowd of callers must not keep the node busy.
TRUST_S = 0.25


def _refusal(occupied: int, count: int, limit: int) -> LimitReached:
    return LimitReached(
        f"{occupied} of at most {limit} sandboxes run or are being started, {count} more are asked for",
        fix="try again when one has ended; `aenv serve --max-sandboxes` sets the limit",
    )


class Admission:
    """``limit`` sandboxes with a machine; None: as many as fit. What is being started counts."""

    def __init__(self, node: NodeClient, limit: int | None) -> None:
        self._node, self._limit = node, limit
        self._lock = asyncio.Lock()
        self._starting: set[str] = set()
        self._counted, self._counted_at_s = 0, float("-inf")
        self._bound, self._bound_at_s = 0, float("-inf")  # no more than these run or are being started

    @asynccontextmanager
    async def admit(self, count: int = 1, *, request: str | None = None) -> AsyncIterator[str]:
        """Room for ``count`` more while they are started, or ``LimitReached``.

        Gives the name of the request: a create that carries it (``Terms.request``) is not counted twice. The name
        of a resume is its sandbox's: several at once are one.
        """
        name = request or secrets.token_hex(12)
        names = set(calls_of(name, count))
        if self._limit is None:
            yield name
            return
        self._refuse_while_full(names, self._limit)  # nobody needs to be asked or waited for
        async with self._lock:
            if more := names - self._starting:  # the resumes of one sandbox are one more machine
                await self._require(more, self._limit)
            self._starting |= names
        try:
            yield name
        finally:
            await asyncio.shield(self._forget(names))

    def changed(self) -> None:
        """A sandbox has ended or is paused: who comes next is counted anew."""
        self._counted_at_s = float("-inf")

    def _refuse_while_full(self, names: set[str], limit: int) -> None:
        if (count := len(names - self._starting)) and len(self._starting) + count > limit:
            raise _refusal(len(self._starting), count, limit)

    async def _require(self, names: set[str], limit: int) -> None:
        self._refuse_while_full(names, limit)
        count = len(names)
        if time.monotonic() < self._counted_at_s + TRUST_S and self._counted + count > limit:
            raise _refusal(self._counted, count, limit)
        if time.monotonic() >= self._bound_at_s + TRUST_S:
            health = await self._node.health()
            known = health is not None and health.ready
            self._bound = health.live + len(self._starting) if health is not None and known else limit
            self._bound_at_s = time.monotonic()
        if self._bound + count <= limit:
            self._bound += count
            return  # at most so many: nobody needs to be asked for each
        found = {info.terms.request or info.sandbox_id for info in await self._node.list() if info.state in LIVE}
        occupied = len(found | self._starting)
        if occupied + count > limit:
            self._counted, self._counted_at_s = occupied, time.monotonic()
            raise _refusal(occupied, count, limit)

    async def _forget(self, names: set[str]) -> None:
        """Not while others are counted: what has just become a running sandbox must be in one of the two sets."""
        async with self._lock:
            self._starting -= names
