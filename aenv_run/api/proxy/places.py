"""Where a sandbox is now, resumed first if it is paused and traffic wakes it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from aenv_run.api.proxy import refusals
from aenv_run.api.proxy.address import Target
from aenv_run.drivers.protocol import Endpoint
from aenv_run.errors import AenvError, Conflict, LimitReached, NotFound, SandboxDead
from aenv_run.lifecycle import State
from aenv_run.node_wire import ResumeRequest, SandboxInfo
from aenv_run.types import SandboxId

log = logging.getLogger(__name__)

#: What was found is believed for so long, and not longer than the sandbox's record stays what it was.
BELIEVED_S = 1.0
MAX_KNOWN = 4096
RESUME_S = 60.0
#: A sandbox that traffic woke lives at least so long.
MIN_LIFE_S = 300.0
Stamp = Callable[[SandboxId], object]


class SandboxNode(Protocol):
    """What is asked of the node."""

    async def get(self, sandbox_id: str) -> SandboxInfo:
        """One, when nothing is being done with it."""

    async def resume(self, sandbox_id: str, request: ResumeRequest) -> SandboxInfo:
        """Resume it."""


@dataclass(frozen=True)
class Door:
    """What a sandbox asks of a request: ``traffic_token`` for its ports, None when they are public.

    ``access_token`` is the daemon's; who calls a sandbox that is not ``secure`` need not have it.
    """

    access_token: str | None
    secure: bool = True
    traffic_token: str | None = None


@dataclass(frozen=True)
class Place:
    """A machine of a sandbox, of which ``number`` tells it from those that it had before at the same address."""

    sandbox_id: SandboxId
    endpoint: Endpoint
    door: Door
    number: int = 0
    mask_host: str | None = None

    @property
    def machine(self) -> tuple[Endpoint, str | None, int]:
        """Equal for one machine only."""
        return self.endpoint, self.door.access_token, self.number


class Places:
    """Asks the node, at most about once a second for each sandbox. ``stamp`` changes whenever its record does."""

    def __init__(self, node: SandboxNode, *, traffic_token: Callable[[str], str], stamp: Stamp) -> None:
        self._node = node
        self._traffic_token = traffic_token
        self._stamp = stamp
        self._known: OrderedDict[SandboxId, tuple[float, object, SandboxInfo]] = OrderedDict()
        self._asking: dict[SandboxId, asyncio.Task[SandboxInfo | None]] = {}
        self._resuming: dict[SandboxId, asyncio.Task[SandboxInfo]] = {}

    async def find(self, target: Target, check: Callable[[Door], object]) -> Place:
        """Where it runs; ``Refused`` when it does not, and is not to be resumed or cannot be.

        ``check`` raises for who may not use it: nobody else wakes it.
        """
        info = await self._info(target.sandbox_id)
        if info is not None and info.state is State.PAUSED and info.terms.auto_resume:
            check(self._door(info))
            info = await self._woken(target, info)
        if info is None or info.state is State.DEAD:
            raise refusals.not_found(target)
        if (place := self.place(info)) is None:
            raise refusals.paused(target)
        return place

    async def now(self, sandbox_id: SandboxId) -> Place | None:
        """Where it runs, asked anew; None when it does not. Never resumes it."""
        self.forget(sandbox_id)
        info = await self._info(sandbox_id)
        return self.place(info) if info is not None else None

    def forget(self, sandbox_id: SandboxId) -> None:
        """Ask again next time: what was found did not answer."""
        self._known.pop(sandbox_id, None)

    def stamp(self, sandbox_id: SandboxId) -> object:
        """Of its record now."""
        return self._stamp(sandbox_id)

    def place(self, info: SandboxInfo) -> Place | None:
        """The machine of a sandbox that has one."""
        if info.address is None:
            return None
        return Place(
            sandbox_id=info.sandbox_id,
            endpoint=Endpoint(info.address.host, info.address.port),
            door=self._door(info),
            number=info.launches,
            mask_host=info.terms.mask_host,
        )

    def _door(self, info: SandboxInfo) -> Door:
        token = None if info.terms.public_ports else self._traffic_token(info.sandbox_id)
        return Door(info.access_token, info.terms.secure, token)

    async def _info(self, sandbox_id: SandboxId) -> SandboxInfo | None:
        found = self._known.get(sandbox_id)
        if found is not None:
            at_s, stamp, info = found
            if time.monotonic() < at_s + BELIEVED_S and stamp == self._stamp(sandbox_id):
                return info
        task = self._asking.get(sandbox_id)
        if task is None:
            task = asyncio.create_task(self._ask(sandbox_id))
            self._asking[sandbox_id] = task
            task.add_done_callback(lambda _: self._asking.pop(sandbox_id, None))
        return await asyncio.shield(task)

    async def _ask(self, sandbox_id: SandboxId) -> SandboxInfo | None:
        stamp = self._stamp(sandbox_id)  # before: what changes while we ask is asked for again
        try:
            info = await self._node.get(sandbox_id)
        except NotFound:
            self._known.pop(sandbox_id, None)
            return None
        self._known[sandbox_id] = (time.monotonic(), stamp, info)
        self._known.move_to_end(sandbox_id)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return info

    async def _woken(self, target: Target, info: SandboxInfo) -> SandboxInfo | None:
        """Resumed once, however many ask at the same time; it goes on also when they all hang up."""
        task = self._resuming.get(target.sandbox_id)
        if task is None:
            task = asyncio.create_task(self._resume(info), name=f"auto-resume {info.sandbox_id}")
            self._resuming[target.sandbox_id] = task
            task.add_done_callback(lambda _: self._resuming.pop(target.sandbox_id, None))
        try:
            async with asyncio.timeout(RESUME_S):
                return await asyncio.shield(task)
        except TimeoutError as error:
            raise refusals.too_slow(target, f"the sandbox did not resume within {RESUME_S:g} s") from error
        except (NotFound, SandboxDead):
            return None
        except LimitReached as error:
            raise refusals.no_room(target, error.message) from error
        except AenvError as error:
            raise refusals.no_resume(target, error.message) from error

    async def _resume(self, info: SandboxInfo) -> SandboxInfo:
        timeout_s = max(info.timeout_s or 0.0, MIN_LIFE_S)
        try:
            woken = await self._node.resume(info.sandbox_id, ResumeRequest(timeout_s=timeout_s))
            log.info("%s was resumed by traffic", info.sandbox_id)
        except Conflict:  # somebody else resumed it just now
            woken = await self._node.get(info.sandbox_id)
            if woken.state is State.PAUSED:
                raise
        self.forget(info.sandbox_id)
        return woken
