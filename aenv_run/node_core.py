"""All sandboxes of one home: made, found, expired, reconciled. No HTTP here; node_api.py serves it."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from dataclasses import dataclass

from pydantic import ValidationError

from aenv_run.catalog import Resolved, require_publishable
from aenv_run.errors import AenvError, Conflict, InvalidInput, NotFound, SandboxDead
from aenv_run.lifecycle import LIVE, State
from aenv_run.network import NetworkPolicy, SlotId
from aenv_run.node_wire import (
    CreateRequest,
    ErrorBody,
    ForkEntry,
    ForkRequest,
    ForkStart,
    NetworkRequest,
    SandboxInfo,
    SnapshotReply,
    known,
)
from aenv_run.node_wire import SnapshotRequest as SnapshotAsk
from aenv_run.paths import Home
from aenv_run.sandbox import HostedSandbox, Tools
from aenv_run.sandbox_files import in_thread, link_snapshot
from aenv_run.sandbox_record import RECORD_NAME, Record, SandboxDirectory
from aenv_run.snapshot import Snapshot
from aenv_run.types import MachineSpec, SandboxId

log = logging.getLogger(__name__)

MIN_PREFIX = 3
#: A sandbox that was to be paused at its end and could not be (disk full) is not thrown away for that.
RETRY_PAUSE_S = 60


@dataclass(frozen=True)
class Counts:
    """How many sandboxes are in which kind of state."""

    live: int
    paused: int
    dead: int


class Node:
    """The collection. Every method may be called at any time; each sandbox takes care of its own order."""

    def __init__(self, home: Home, tools: Tools, *, launches_at_once: int | None = None) -> None:
        self._home = home
        self._tools = tools
        self._sandboxes: dict[SandboxId, HostedSandbox] = {}
        self._launches = asyncio.Semaphore(launches_at_once or min(4, 2 * (os.cpu_count() or 1)))
        self.changed = asyncio.Event()

    # -- callers' operations -------------------------------------------------------------------------------

    async def create(self, request: CreateRequest) -> SandboxInfo:
        """Launch a snapshot. Cancel or failure leaves nothing."""
        check_environment(request.env)
        resolved = await asyncio.to_thread(self._tools.catalog.resolve, request.snapshot)
        snapshot = await asyncio.to_thread(self._tools.repository.snapshot, resolved.snapshot_id)
        directory = SandboxDirectory(self._home.sandboxes / SandboxId.new())
        record = self._record(request, resolved, snapshot, SandboxId(directory.root.name))
        if request.publish:
            self._tools.network.require_ports()
        try:
            record = await in_thread(self._prepare, directory, record, snapshot, not request.cold)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(directory.remove))
            raise
        sandbox = HostedSandbox(directory, record, self._tools)
        await self._launch(sandbox, cold=request.cold)
        return self.info(sandbox)

    def infos(self) -> list[SandboxInfo]:
        """All, oldest first, without tokens."""
        infos = sorted((self.info(sandbox) for sandbox in self._sandboxes.values()), key=lambda i: i.created_at_s)
        return [info.model_copy(update={"access_token": None}) for info in infos]

    def info(self, sandbox: HostedSandbox) -> SandboxInfo:
        """What callers may know of it."""
        return SandboxInfo.of(sandbox.record, sandbox.state)

    def find(self, prefix: str) -> HostedSandbox:
        """By id or unique prefix."""
        matches = [s for s in self._sandboxes if len(prefix) >= MIN_PREFIX and s.startswith(prefix)]
        if len(matches) == 1:
            return self._sandboxes[matches[0]]
        if matches:
            raise Conflict(
                f"{prefix} is the start of {len(matches)} sandbox ids", fix="give more letters of the id"
            )
        raise NotFound(f"there is no sandbox {prefix[:40]}", fix="`aenv ls -a` shows those that exist")

    async def pause(self, sandbox: HostedSandbox) -> SandboxInfo:
        """Pause; see ``HostedSandbox``."""
        await sandbox.pause()
        self.changed.set()
        return self.info(sandbox)

    async def resume(self, sandbox: HostedSandbox, *, timeout_s: float, cold: bool) -> SandboxInfo:
        """Resume for ``timeout_s``."""
        async with self._launches:
            await sandbox.resume(expires_at_s=time.time() + timeout_s, cold=cold)
        self.changed.set()
        return self.info(sandbox)

    async def fork(
        self, sandbox: HostedSandbox, request: ForkRequest
    ) -> AsyncGenerator[ForkStart | ForkEntry, None]:
        """How long it stood still, then each child as soon as it is ready, or why it could not be had.

        A cancel, or ``aclose`` before the last one, removes all children, also those already given.
        """
        ids = [SandboxId.new() for _ in range(request.count)]
        children, stopped_ms = await sandbox.split(ids, expires_at_s=time.time() + request.timeout_s)
        launches = [asyncio.create_task(self._launch_child(*numbered)) for numbered in enumerate(children)]
        try:
            yield ForkStart(stopped_ms=round(stopped_ms, 1))
            for ready in asyncio.as_completed(launches):
                yield await ready
        except BaseException:
            await asyncio.shield(self._take_back(children, launches))
            raise

    async def snapshot(self, sandbox: HostedSandbox, request: SnapshotAsk) -> SnapshotReply:
        """Commit, and publish under a name if one is given. The name is the last thing written."""
        if request.tags and request.name is None:
            raise InvalidInput("a tag needs a name", fix="give --name too")
        if request.name is not None:
            require_publishable(request.name)
        snapshot, stopped_ms = await sandbox.snapshot(memory=request.memory, labels=request.labels)
        version: int | None = None
        if request.name is not None:
            publish = self._tools.catalog.publish
            version = int(await asyncio.to_thread(publish, request.name, snapshot.id, request.tags))
        return SnapshotReply(
            snapshot_id=snapshot.id, name=request.name, version=version, stopped_ms=round(stopped_ms, 1)
        )

    async def set_timeout(self, sandbox: HostedSandbox, timeout_s: float) -> SandboxInfo:
        """Its time ends ``timeout_s`` from now."""
        await sandbox.set_expiry(time.time() + timeout_s)
        self.changed.set()
        return self.info(sandbox)

    async def set_network(self, sandbox: HostedSandbox, request: NetworkRequest) -> SandboxInfo:
        """Change what it may reach, also of what is connected now."""
        changes = request.model_dump(exclude_none=True)
        policy = NetworkPolicy(**{**sandbox.record.policy.model_dump(), **changes})
        self._tools.network.require(policy)
        await sandbox.set_policy(policy)
        return self.info(sandbox)

    async def kill(self, sandbox: HostedSandbox) -> None:
        """Kill and forget. Idempotent."""
        await sandbox.discard()
        self._sandboxes.pop(sandbox.id, None)
        self.changed.set()

    async def kill_live(self) -> None:
        """Kill all that have a machine; paused and dead ones stay."""
        live = [sandbox for sandbox in self._sandboxes.values() if sandbox.state in LIVE]
        await asyncio.gather(*(self.kill(sandbox) for sandbox in live))

    # -- the node's own work -------------------------------------------------------------------------------

    def counts(self) -> Counts:
        """Live, paused, dead."""
        states = [sandbox.state for sandbox in self._sandboxes.values()]
        paused, dead = states.count(State.PAUSED), states.count(State.DEAD)
        return Counts(len(states) - paused - dead, paused, dead)

    async def reconcile(self) -> None:
        """Take over what earlier nodes left: attach live machines, name the dead, remove the half-made."""
        self._home.sandboxes.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = [SandboxDirectory(path) for path in self._home.sandboxes.iterdir() if path.is_dir()]
        slots = await self._tools.network.start(await asyncio.to_thread(_slots_in_use, found))
        await asyncio.gather(*(self._reconcile_one(directory, slots) for directory in found))

    async def reap(self) -> float | None:
        """Kill or pause what is past its time; seconds until the next one is."""
        now_s = time.time()
        over = [sandbox for sandbox in self._sandboxes.values() if sandbox.record.time_over(now_s)]
        for result in await asyncio.gather(*(sandbox.end_episode() for sandbox in over), return_exceptions=True):
            if isinstance(result, Exception):
                log.error("cannot end a sandbox whose max seconds are over: %s", result)
        due = [sandbox for sandbox in self._sandboxes.values() if sandbox.record.expired(now_s)]
        for result in await asyncio.gather(*(self._expire(sandbox) for sandbox in due), return_exceptions=True):
            if isinstance(result, Exception):  # one that cannot be ended must not keep the others alive
                log.error("cannot end a sandbox whose time is over: %s", result)
        times = [t for s in self._sandboxes.values() for t in (s.record.expires_at_s, s.record.time_over_at_s)]
        ends = [end_s for end_s in times if end_s is not None]
        return max(0.05, min(ends) - time.time()) if ends else None

    async def close(self) -> None:
        """Let go of every sandbox; machines run on."""
        await asyncio.gather(*(sandbox.close() for sandbox in self._sandboxes.values()))
        await self._tools.network.close()

    # -- pieces --------------------------------------------------------------------------------------------

    def _record(
        self, request: CreateRequest, resolved: Resolved, snapshot: Snapshot, sandbox_id: SandboxId
    ) -> Record:
        now_s = time.time()
        reference = f"{resolved.name}:{resolved.version}" if resolved.name else resolved.snapshot_id.short
        return Record(
            id=sandbox_id,
            snapshot_id=resolved.snapshot_id,
            base_id=resolved.snapshot_id,
            reference=reference,
            state=State.STARTING,
            driver=self._tools.driver.name,
            mode=self._tools.mode,
            architecture=snapshot.architecture,
            machine=machine_of(request, snapshot),
            context=snapshot.context,
            env=request.env,
            metadata=request.metadata,
            policy=self._tools.network.policy(request.internet, request.allow, request.deny),
            publish=request.publish,
            max_seconds=request.max_seconds,
            seconds_left=request.max_seconds,
            created_at_s=now_s,
            expires_at_s=now_s + request.timeout_s,
            on_timeout=request.on_timeout,
            access_token=secrets.token_urlsafe(32),
            machine_id=uuid.uuid4().hex,
            disk=(),
        )

    def _prepare(self, directory: SandboxDirectory, record: Record, snapshot: Snapshot, memory: bool) -> Record:
        directory.create()
        disk, kept, serial = link_snapshot(self._tools.cache, snapshot, directory, memory=memory)
        ready = record.model_copy(update={"disk": disk, "memory": kept, "serial": serial})
        directory.write(ready)
        return ready

    async def _launch(self, sandbox: HostedSandbox, *, cold: bool = False) -> None:
        self._sandboxes[sandbox.id] = sandbox
        try:
            async with self._launches:
                await sandbox.launch(cold=cold)
        except BaseException:
            await asyncio.shield(self.kill(sandbox))
            raise
        self.changed.set()

    async def _launch_child(self, index: int, child: HostedSandbox) -> ForkEntry:
        try:
            await self._launch(child)
        except (AenvError, OSError) as error:
            return ForkEntry(index=index, error=ErrorBody.of(known(error)))
        return ForkEntry(index=index, sandbox=self.info(child))

    async def _take_back(self, children: list[HostedSandbox], launches: list[asyncio.Task[ForkEntry]]) -> None:
        for launch in launches:
            launch.cancel()
        await asyncio.gather(*launches, return_exceptions=True)
        await asyncio.gather(*(self.kill(child) for child in children))

    async def _reconcile_one(self, directory: SandboxDirectory, slots: frozenset[SlotId] | None) -> None:
        try:
            record = await asyncio.to_thread(directory.read)
            sandbox = HostedSandbox(directory, record, self._tools)
            if await sandbox.reattach(slots):
                self._sandboxes[sandbox.id] = sandbox
        except NotFound:
            # No record was ever written, so no machine was ever started and nobody was given the id.
            log.info("removing the half-made sandbox directory %s", directory.root)
            await asyncio.to_thread(directory.remove)
        except (AenvError, OSError) as error:
            log.error("leaving %s as it is: %s", directory.root / RECORD_NAME, error)

    async def _expire(self, sandbox: HostedSandbox) -> None:
        if sandbox.record.on_timeout == "pause" and sandbox.record.state is State.RUNNING:
            log.info("pausing %s: its time is over", sandbox.id)
            try:
                await self.pause(sandbox)
                return
            except (SandboxDead, NotFound):
                pass
            except (AenvError, OSError) as error:
                log.error("cannot pause %s, trying again in %d s: %s", sandbox.id, RETRY_PAUSE_S, error)
                with suppress(AenvError):
                    await sandbox.set_expiry(time.time() + RETRY_PAUSE_S)
                return
        log.info("killing %s: its time is over", sandbox.id)
        await self.kill(sandbox)


def machine_of(request: CreateRequest, snapshot: Snapshot) -> MachineSpec:
    """The snapshot's machine, with another size if one is asked for: memory images are bound to theirs."""
    wanted = {"memory_mib": request.memory_mib, "cpus": request.cpus}
    changes = {name: value for name, value in wanted.items() if value is not None}
    if not changes:
        return snapshot.machine
    if snapshot.memory is not None and not request.cold:
        raise InvalidInput(
            f"{' and '.join(changes)} cannot differ from the snapshot's when its memory is restored",
            fix="start it cold (`--cold`, or cold=True in Python)",
        )
    try:
        return MachineSpec.model_validate({**snapshot.machine.model_dump(), **changes})
    except ValidationError as error:
        raise InvalidInput(
            f"no such machine: {error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}"
        ) from error


def _slots_in_use(directories: Iterable[SandboxDirectory]) -> set[SlotId]:
    """Blocking: the network slots of sandboxes that run, as far as their records can be read."""
    found: set[SlotId] = set()
    for directory in directories:
        with suppress(AenvError, OSError):
            record = directory.read()
            if record.state is State.RUNNING and record.slot is not None:
                found.add(record.slot)
    return found


def check_environment(env: dict[str, str]) -> None:
    """Refuse names that no process can have."""
    for name in env:
        if not name or "=" in name or "\0" in name + env[name]:
            raise InvalidInput(f"{name[:60]!r} is not the name of an environment variable")
