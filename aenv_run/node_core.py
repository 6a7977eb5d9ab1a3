"""All sandboxes of one home: made, found, expired, reconciled. No HTTP here; node_api.py serves it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass

from aenv_run.blocks.layers import Layers
from aenv_run.cache_limit import trim
from aenv_run.catalog import Resolved, require_publishable
from aenv_run.errors import (
    AenvError,
    BootFailed,
    Conflict,
    CorruptData,
    InvalidInput,
    NotFound,
    RestoreIncompatible,
    SandboxDead,
)
from aenv_run.lifecycle import LIVE, State
from aenv_run.network import NetworkPolicy, SlotId
from aenv_run.node_holding import NodeHolding
from aenv_run.node_launch import Launcher
from aenv_run.node_pools import Pools
from aenv_run.node_reaper import Limits, Reaper
from aenv_run.node_requests import again_of, check_environment, hooks_of
from aenv_run.node_wire import (
    CreateRequest,
    ErrorBody,
    ForkEntry,
    ForkRequest,
    ForkStart,
    NetworkRequest,
    PoolInfo,
    PoolRequest,
    ResetRequest,
    SandboxInfo,
    SandboxLogReply,
    SnapshotReply,
    calls_of,
    known,
)
from aenv_run.node_wire import SnapshotRequest as SnapshotAsk
from aenv_run.paths import Home
from aenv_run.sandbox import HostedSandbox
from aenv_run.sandbox_record import RECORD_NAME, Record, SandboxDirectory
from aenv_run.sandbox_tools import Tools
from aenv_run.snapshot import Snapshot
from aenv_run.threads import in_thread, to_the_end
from aenv_run.types import SandboxId, SnapshotId

log = logging.getLogger(__name__)

MIN_PREFIX = 3
DEFAULT_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Counts:
    """How many sandboxes are in which kind of state."""

    live: int
    paused: int
    dead: int


class Node:
    """The collection. Every method may be called at any time; each sandbox takes care of its own order."""

    def __init__(self, home: Home, tools: Tools, *, limits: Limits | None = None) -> None:
        self._home = home
        self._tools = tools
        self._sandboxes: dict[SandboxId, HostedSandbox] = {}
        self._launcher = Launcher(home, tools)
        self._tasks: set[asyncio.Task[None]] = set()  # all that the node does by itself
        self._trim_due, self._trimming = asyncio.Event(), asyncio.Lock()
        self.pools = Pools(home, self._launcher.warm)
        self.changed = asyncio.Event()
        self._holding = NodeHolding(home, tools.repository, self._uses)
        self._reaper = Reaper(
            self._sandboxes, limits or Limits(), kill=self.kill, begin=self._begin, changed=self.changed
        )

    # -- callers' operations -------------------------------------------------------------------------------

    async def create(self, request: CreateRequest) -> SandboxInfo:
        """Launch a snapshot, by a machine that stands ready if there is one. Cancel or failure leaves nothing."""
        check_environment(request.env)
        resolved = await asyncio.to_thread(self._tools.catalog.resolve, request.snapshot)
        async with self._holding.using(resolved.snapshot_id):
            snapshot, record = await self._launcher.plan(request, resolved)
            return self.info(await self._start(request, snapshot, record))

    async def _start(self, request: CreateRequest, snapshot: Snapshot, record: Record) -> HostedSandbox:
        if record.machine == snapshot.machine and request.hooks and not request.cold:
            warm = self.pools.take(record.snapshot_id, record.driver)
            if warm is not None and await self._claim(warm, record):
                return warm
        return await self._launch_new(request, record, snapshot)

    async def _launch_new(self, request: CreateRequest, record: Record, snapshot: Snapshot) -> HostedSandbox:
        """Of a snapshot without memory the first launch boots, and those after it restore what that one leaves."""
        sandbox = await self._launcher.make(record, snapshot, memory=not request.cold)
        of_image = snapshot.memory is None and sandbox.record.memory is not None
        try:
            await self._launch(sandbox, cold=request.cold, hooks=request.hooks)
        except (BootFailed, CorruptData, RestoreIncompatible) as error:
            if not of_image:
                raise
            log.warning("the warm image of %s is of no use and is removed: %s", record.reference, error)
            await self._launcher.drop_image(record, snapshot)
            return await self._launch_new(request, record, snapshot)
        self._trim_soon()
        if snapshot.memory is None and not of_image and not request.cold:
            self._begin(self._keep_image(record), f"warm image of {record.reference}")
        return sandbox

    async def _keep_image(self, record: Record) -> None:
        try:
            await self._launcher.keep_image(record.snapshot_id)
        except (AenvError, OSError) as error:  # the next first boot tries again
            log.warning("no warm image of %s: %s", record.reference, error)

    async def _claim(self, warm: HostedSandbox, record: Record) -> bool:
        """False when the machine that stood ready is no good: the caller then launches one."""
        self._sandboxes[warm.id] = warm
        try:
            await warm.claim(record)
        except (SandboxDead, OSError) as error:
            log.warning("the machine that stood ready as %s could not be used: %s", warm.id, error)
            await to_the_end(self.kill(warm))
            return False
        except BaseException:
            await to_the_end(self.kill(warm))
            raise
        self.changed.set()
        return True

    async def set_pool(self, request: PoolRequest) -> PoolInfo:
        """Keep machines of a snapshot ready, from now on and after a restart of the node."""
        resolved = await asyncio.to_thread(self._tools.catalog.resolve, request.snapshot)
        async with self._holding.using(resolved.snapshot_id):
            info = await self.pools.set(await self._launcher.pool_settings(request))
        self.changed.set()
        return info

    async def remove_pool(self, reference: str) -> None:
        """End a pool, by what it is listed as, or its snapshot's name or id."""
        snapshot_id = self.pools.find(reference)
        if snapshot_id is None:
            snapshot_id = (await asyncio.to_thread(self._tools.catalog.resolve, reference)).snapshot_id
        await self.pools.remove(snapshot_id)
        self._holding.changed()
        self.changed.set()

    async def reset(self, sandbox: HostedSandbox, request: ResetRequest) -> SandboxInfo:
        """A new one, as ``sandbox`` was asked for; then ``sandbox`` is killed. Cancel or failure changes nothing.

        A published port's path belongs to one sandbox: it is the new one's as soon as the old one is gone.
        """
        before = sandbox.record
        again = again_of(before, request)
        async with self._holding.using(before.snapshot_id):
            snapshot, record = await self._launcher.plan(again, Resolved(snapshot_id=before.snapshot_id))
            record = record.model_copy(update={"reference": before.reference})
            fresh = await self._start(again, snapshot, record)
        if not before.publish:
            self._begin(self.kill(sandbox), f"kill {sandbox.id}")
            return self.info(fresh)
        await to_the_end(self.kill(sandbox))
        try:
            await to_the_end(fresh.publish(before.publish))
        except BaseException:
            await to_the_end(self.kill(fresh))
            raise
        return self.info(fresh)

    def infos(self) -> list[SandboxInfo]:
        """All, oldest first, without tokens."""
        infos = sorted((self.info(sandbox) for sandbox in self._sandboxes.values()), key=lambda i: i.created_at_s)
        return [info.model_copy(update={"access_token": None}) for info in infos]

    def info(self, sandbox: HostedSandbox) -> SandboxInfo:
        """What callers may know of it."""
        found = list(self._tools.troubles(sandbox.directory))
        if self._holding.trouble is not None:
            found.append(self._holding.trouble)
        return SandboxInfo.of(sandbox.record, sandbox.state, tuple(map(ErrorBody.of, found)))

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

    async def pause(self, sandbox: HostedSandbox, *, hooks: bool = True, memory: bool = True) -> SandboxInfo:
        """Pause; see ``HostedSandbox``."""
        await sandbox.pause(before="pause" if hooks else None, memory=memory)
        self.changed.set()
        return self.info(sandbox)

    async def resume(
        self, sandbox: HostedSandbox, *, timeout_s: float, cold: bool, hooks: bool = True
    ) -> SandboxInfo:
        """Resume for ``timeout_s``."""
        await sandbox.resume(timeout_s=timeout_s, cold=cold, hooks=hooks)
        self.changed.set()
        return self.info(sandbox)

    async def fork(
        self, sandbox: HostedSandbox, request: ForkRequest
    ) -> AsyncGenerator[ForkStart | ForkEntry, None]:
        """How long it stood still, then each child as soon as it is ready, or why it could not be had.

        A cancel, or ``aclose`` before the last one, removes all children, also those already given.
        """
        ids = [SandboxId.new() for _ in range(request.count)]
        timeout_s = request.timeout_s or sandbox.record.timeout_s or DEFAULT_TIMEOUT_S
        calls = dict(zip(ids, calls_of(request.request, request.count), strict=True))
        children, stopped_ms = await sandbox.split(calls, timeout_s=timeout_s)
        sandbox.log.add("forked", children=",".join(child.id for child in children))
        launches = [asyncio.create_task(self._launch_child(*numbered)) for numbered in enumerate(children)]
        try:
            yield ForkStart(stopped_ms=round(stopped_ms, 1))
            for ready in asyncio.as_completed(launches):
                yield await ready
        except BaseException:
            await to_the_end(self._take_back(children, launches))
            raise

    async def snapshot(self, sandbox: HostedSandbox, request: SnapshotAsk) -> SnapshotReply:
        """Commit, and publish under a name if one is given. The name is the last thing written."""
        if request.tags and request.name is None:
            raise InvalidInput("a tag needs a name", fix="give --name too")
        if request.name is not None:
            require_publishable(request.name)
        hooks = hooks_of(request, sandbox.record)
        snapshot, stopped_ms = await sandbox.snapshot(
            memory=request.memory,
            labels=request.labels,
            hooks=hooks,
            before="snapshot" if request.hooks else None,
        )
        self._holding.changed()
        version: int | None = None
        if request.name is not None:
            publish = self._tools.catalog.publish
            version = int(await asyncio.to_thread(publish, request.name, snapshot.id, request.tags))
        return SnapshotReply(
            snapshot_id=snapshot.id, name=request.name, version=version, stopped_ms=round(stopped_ms, 1)
        )

    async def set_timeout(
        self, sandbox: HostedSandbox, timeout_s: float, *, only_later: bool = False
    ) -> SandboxInfo:
        """Its time ends ``timeout_s`` from now."""
        await sandbox.set_timeout(timeout_s, only_later=only_later)
        self._reaper.forget(sandbox.id)
        self.changed.set()
        return self.info(sandbox)

    async def set_network(self, sandbox: HostedSandbox, request: NetworkRequest) -> SandboxInfo:
        """Change what it may reach, also of what is connected now."""
        driver = self._tools.named(sandbox.record.driver)
        if request.replace:
            asked = request.allow or (), request.deny or ()
            policy = self._tools.network.policy(driver, request.internet, *asked)
        else:
            changes = request.model_dump(exclude_none=True, exclude={"replace"})
            policy = NetworkPolicy(**{**sandbox.record.policy.model_dump(), **changes})
        self._tools.network.require(policy, driver)
        await sandbox.set_policy(policy)
        return self.info(sandbox)

    async def log_of(self, sandbox: HostedSandbox) -> SandboxLogReply:
        """What happened to it, and what its guest's console shows while it has a machine."""
        console = await sandbox.console()
        return SandboxLogReply(entries=tuple(await in_thread(sandbox.log.read, console)))

    async def kill(self, sandbox: HostedSandbox) -> None:
        """Kill and forget. Idempotent."""
        await sandbox.discard()
        self._sandboxes.pop(sandbox.id, None)
        self._holding.changed()
        self._reaper.forget(sandbox.id)
        self.changed.set()
        self._trim_soon()

    async def kill_live(self) -> None:
        """Kill all that have a machine; paused and dead ones stay."""
        live = [sandbox for sandbox in self._sandboxes.values() if sandbox.state in LIVE]
        await _all(self.kill(sandbox) for sandbox in live)

    # -- the node's own work -------------------------------------------------------------------------------

    def counts(self) -> Counts:
        """Live, paused, dead."""
        states = [sandbox.state for sandbox in self._sandboxes.values()]
        paused, dead = states.count(State.PAUSED), states.count(State.DEAD)
        return Counts(len(states) - paused - dead, paused, dead)

    async def reconcile(self) -> None:
        """Find what earlier nodes left. It is listed when this returns, and taken over in the background.

        One guest that does not answer delays nobody but its own callers. ``settled`` waits for all.
        """
        self._home.sandboxes.mkdir(parents=True, exist_ok=True, mode=0o700)
        await self._holding.start()
        found = [SandboxDirectory(path) for path in self._home.sandboxes.iterdir() if path.is_dir()]
        slots = await self._tools.network.start(await asyncio.to_thread(_slots_in_use, found))
        await _all(self._find_again(directory, slots) for directory in found)
        self.pools.start()
        self._holding.keep()
        self._trim_soon()
        if (layers := self._tools.layers) is not None:
            self._begin(self._prepare(layers), "the block server")

    async def _prepare(self, layers: Layers) -> None:
        try:
            await in_thread(layers.prepare)
        except (AenvError, OSError) as error:  # the launch that needs it says so
            log.warning("the block server is not ready: %s", error)

    async def settled(self) -> None:
        """Return when all that the node began by itself has ended."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def reap(self) -> float | None:
        """Begin to end what is past its time; seconds until the next one is."""
        return await self._reaper.reap()

    async def close(self) -> None:
        """Let go of every sandbox; machines run on, but for those that stand ready."""
        await self.pools.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._holding.close()
        await _all(sandbox.close() for sandbox in self._sandboxes.values())
        await self._tools.network.close()

    # -- pieces --------------------------------------------------------------------------------------------

    def _uses(self) -> dict[SnapshotId, tuple[str, ...]]:
        """What a sandbox was started from, and the newest snapshot that its state stands on; and pools."""
        uses: dict[SnapshotId, tuple[str, ...]] = {}
        for sandbox in self._sandboxes.values():
            if sandbox.state is not State.DEAD:
                for id in {sandbox.record.snapshot_id, sandbox.record.base_id}:
                    uses[id] = (*uses.get(id, ()), f"sandbox {sandbox.id}")
        for pool in self.pools.infos():
            uses[pool.snapshot_id] = (*uses.get(pool.snapshot_id, ()), f"pool {pool.reference}")
        return uses

    async def _launch(self, sandbox: HostedSandbox, *, cold: bool = False, hooks: bool = True) -> None:
        self._sandboxes[sandbox.id] = sandbox
        try:
            await sandbox.launch(cold=cold, hooks=hooks)
        except BaseException:
            await to_the_end(self.kill(sandbox))
            raise
        self.changed.set()

    async def _launch_child(self, index: int, child: HostedSandbox) -> ForkEntry:
        try:
            await self._launch(child)
        except Exception as error:
            if not isinstance(error, AenvError | OSError):
                log.exception("child %s could not be launched", child.id)
            return ForkEntry(index=index, error=ErrorBody.of(known(error, where="the node's log")))
        return ForkEntry(index=index, sandbox=self.info(child))

    async def _take_back(self, children: list[HostedSandbox], launches: list[asyncio.Task[ForkEntry]]) -> None:
        for launch in launches:
            launch.cancel()
        await asyncio.gather(*launches, return_exceptions=True)
        await _all(self.kill(child) for child in children)

    def _begin(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _trim_soon(self) -> None:
        """Bring the cache within its bound, off the path; one at a time, and one more for what came meanwhile."""
        if not self._trim_due.is_set():
            self._trim_due.set()
            self._begin(self._trim_cache(), "trim the cache")

    async def _trim_cache(self) -> None:
        async with self._trimming:
            self._trim_due.clear()
            try:
                done = await in_thread(trim, self._tools.cache.root, self._tools.cache_limit_bytes)
            except OSError as error:
                log.error("the cache %s could not be kept within its bound: %s", self._tools.cache.root, error)
                return
        if done.removed:
            log.info("removed %d blobs (%d bytes) from the cache", done.removed, done.freed_bytes)

    async def _find_again(self, directory: SandboxDirectory, slots: frozenset[SlotId] | None) -> None:
        try:
            await self._find_one(directory, slots)
        except (AenvError, OSError):  # one that cannot be had keeps no other from being found
            log.exception("leaving %s as it is", directory.root)

    async def _find_one(self, directory: SandboxDirectory, slots: frozenset[SlotId] | None) -> None:
        try:
            record = await asyncio.to_thread(directory.read)
        except NotFound:
            # No record was ever written, so nobody was given the id.
            log.info("removing the half-made sandbox directory %s", directory.root)
            await self._tools.sweep(directory.machine, None)
            await asyncio.to_thread(directory.remove)
            return
        except CorruptData as error:
            log.error("%s", error)
            await self._list_damaged(directory, error)
            return
        sandbox = HostedSandbox(directory, record, self._tools)
        sandbox.begin_take_over()
        if record.state is not State.STARTING:
            self._sandboxes[sandbox.id] = sandbox
        self._begin(self._take_over(sandbox, slots), f"take over {sandbox.id}")

    async def _list_damaged(self, directory: SandboxDirectory, error: AenvError) -> None:
        """Nobody can run on without a record: its engine ends; it is listed as dead until somebody removes it."""
        await self._tools.sweep(directory.machine, None)
        try:
            sandbox_id = SandboxId(directory.root.name)
        except InvalidInput:
            return  # nobody can have it by that name
        created_at_s = (await asyncio.to_thread(directory.root.stat)).st_mtime
        record = Record.unreadable(sandbox_id, error.message, self._tools.driver.name, created_at_s)
        self._sandboxes[sandbox_id] = HostedSandbox(directory, record, self._tools)

    async def _take_over(self, sandbox: HostedSandbox, slots: frozenset[SlotId] | None) -> None:
        try:
            if not await sandbox.take_over(slots):
                log.info("removed the half-made sandbox %s", sandbox.id)
        except NotFound:
            pass  # it was killed meanwhile
        except Exception:
            log.exception("cannot take over %s", sandbox.directory.root / RECORD_NAME)
        finally:
            self.changed.set()


async def _all(work: Iterable[Awaitable[None]]) -> None:
    """Do all to the end, then raise the first failure."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def _slots_in_use(directories: Iterable[SandboxDirectory]) -> set[SlotId]:
    """Blocking: the network slots of sandboxes that run, as far as their records can be read."""
    found: set[SlotId] = set()
    for directory in directories:
        with suppress(AenvError, OSError):
            record = directory.read()
            if record.state is State.RUNNING and record.slot is not None:
                found.add(record.slot)
    return found
