"""The end of a sandbox's time: killed or paused, and tried again where that may help."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass

from aenv_run.errors import AenvError, NoSpace, NotFound
from aenv_run.lifecycle import State
from aenv_run.node_wire import known
from aenv_run.sandbox import HostedSandbox
from aenv_run.types import SandboxId

log = logging.getLogger(__name__)

#: How soon an end that failed is tried again.
RETRY_END_S = 5.0


@dataclass(frozen=True)
class Limits:
    """What the end of a time may take.

    A sandbox that is to be paused at its end and cannot be for lack of space or a passing fault is not thrown away
    for that at once. Any other failure may be its guest's doing, which must not outlive its time.
    """

    prepare_s: float = 10.0  # its guest, to get ready
    pause_s: float = 900.0  # all of a pause
    attempts: int = 5
    retry_s: float = 60.0


@dataclass(frozen=True)
class _Attempts:
    """To pause one whose time is over: how many have failed, and when the next is due."""

    failed: int = 0
    next_s: float = 0.0


class Reaper:
    """Ends what is past its time. ``begin`` runs work of the node's own; ``changed`` says that times moved."""

    def __init__(
        self,
        sandboxes: Mapping[SandboxId, HostedSandbox],
        limits: Limits,
        *,
        kill: Callable[[HostedSandbox], Awaitable[None]],
        begin: Callable[[Coroutine[object, object, None], str], object],
        changed: asyncio.Event,
    ) -> None:
        self._sandboxes, self._limits = sandboxes, limits
        self._kill, self._begin, self._changed = kill, begin, changed
        self._ending: set[SandboxId] = set()
        self._attempts: dict[SandboxId, _Attempts] = {}

    def forget(self, sandbox_id: SandboxId) -> None:
        """Attempts of before count no more: it has new time, or is gone."""
        self._attempts.pop(sandbox_id, None)

    async def reap(self) -> float | None:
        """Begin to kill or pause what is past its time, each by itself; seconds until the next one is."""
        now_s = time.time()
        ends: list[float] = []
        for sandbox in self._sandboxes.values():
            if sandbox.id in self._ending:
                continue
            expires_s, over_s = self._expires_s(sandbox), sandbox.record.time_over_at_s
            if sandbox.record.time_over(now_s):
                self._begin_end(sandbox, sandbox.end_episode())
            elif expires_s is not None and expires_s <= now_s:
                self._begin_end(sandbox, self._expire(sandbox))
            else:
                ends += [end_s for end_s in (expires_s, over_s) if end_s is not None]
        return max(0.05, min(ends) - time.time()) if ends else None

    def _expires_s(self, sandbox: HostedSandbox) -> float | None:
        attempts, expires_s = self._attempts.get(sandbox.id), sandbox.record.expires_at_s
        return max(expires_s, attempts.next_s) if attempts and expires_s is not None else expires_s

    def _begin_end(self, sandbox: HostedSandbox, work: Coroutine[object, object, None]) -> None:
        async def end() -> None:
            try:
                await work
            except NotFound:
                pass  # killed meanwhile
            except Exception:
                log.exception("cannot end %s, whose time is over", sandbox.id)
                await asyncio.sleep(RETRY_END_S)
            finally:
                self._ending.discard(sandbox.id)
                self._changed.set()

        self._ending.add(sandbox.id)
        self._begin(end(), f"end {sandbox.id}")

    async def _expire(self, sandbox: HostedSandbox) -> None:
        if sandbox.record.on_timeout == "kill" or sandbox.record.state is not State.RUNNING:
            log.info("killing %s: its time is over", sandbox.id)
            await self._kill(sandbox)
            return
        log.info("pausing %s: its time is over", sandbox.id)
        try:
            async with asyncio.timeout(self._limits.pause_s):
                await sandbox.pause(limit_s=self._limits.prepare_s, memory=sandbox.record.terms.pause_memory)
            self._attempts.pop(sandbox.id, None)
        except NotFound:
            return  # killed meanwhile
        except Exception as error:
            log.exception("cannot pause %s at the end of its time", sandbox.id)
            if not self._pause_later(sandbox, known(error)):
                await sandbox.end(f"its time was over and it could not be paused: {known(error).message}")

    def _pause_later(self, sandbox: HostedSandbox, error: AenvError) -> bool:
        """Whether it is worth trying again. It then keeps its machine for another while."""
        failed = self._attempts.get(sandbox.id, _Attempts()).failed + 1
        passing = error.retryable or isinstance(error, NoSpace)
        if not passing or failed >= self._limits.attempts:
            return False
        log.info("trying again to pause %s in %g s", sandbox.id, self._limits.retry_s)
        self._attempts[sandbox.id] = _Attempts(failed, time.time() + self._limits.retry_s)
        return True
