"""Who may work on a sandbox: one operation at a time, and all of them can be interrupted with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aenv_run.errors import AenvError

#: How long the end of a sandbox's time waits for an operation that runs, before it interrupts it.
PATIENCE_S = 60.0


class Turns:
    """``lock`` is the turn; ``killed`` says that nobody gets one any more. ``settled``: wait for a take-over."""

    def __init__(self, settled: Callable[[], Awaitable[None]]) -> None:
        self.lock = asyncio.Lock()
        self.killed = False
        self._settled = settled
        self._operations: set[asyncio.Task[object]] = set()
        self._interrupt: AenvError | None = None  # what the operations that are being cancelled are told

    async def cancel(self, error: AenvError) -> None:
        """Cancel what runs and wait until it has ended; its callers get ``error``."""
        self._interrupt = error
        pending = [task for task in self._operations if task is not asyncio.current_task()]
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
        if not self.killed:
            self._interrupt = None

    async def take(self, error: AenvError) -> None:
        """Take the lock; an operation that runs too long is interrupted and its callers get ``error``."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._settled()
                await self.lock.acquire()
        except TimeoutError:
            await self.cancel(error)
            await self.lock.acquire()

    @asynccontextmanager
    async def tracked(self) -> AsyncIterator[None]:
        """Make the running task one that can be interrupted: its caller sees the reason, not a cancel."""
        task = asyncio.current_task()
        assert task is not None
        self._operations.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._interrupt is not None and task.uncancel() == 0:
                raise self._interrupt from None
            raise
        finally:
            self._operations.discard(task)
