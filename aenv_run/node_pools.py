"""Warm pools: machines of a snapshot that stand ready, so that a launch only gives one its identity.

A warm machine is a sandbox that nobody was given: STARTING on disk, so that the node that follows a crash removes
it. Its network slot, its writable overlay and its engine are there, its memory is loaded, its daemon has answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from pydantic import ValidationError

from aenv_run import durable
from aenv_run.drivers.protocol import DriverName
from aenv_run.errors import AenvError, NotFound
from aenv_run.node_wire import PoolInfo, PoolSettings, PoolsFile, known
from aenv_run.paths import Home
from aenv_run.sandbox import HostedSandbox
from aenv_run.threads import in_thread, to_the_end
from aenv_run.types import SnapshotId

log = logging.getLogger(__name__)

#: After a machine that could not be warmed up; doubled each time, up to the second.
RETRY_S, MAX_RETRY_S = 1.0, 60.0

Make = Callable[[SnapshotId], Awaitable[HostedSandbox]]


@dataclass
class _Pool:
    settings: PoolSettings
    warm: deque[tuple[HostedSandbox, asyncio.Task[None]]] = field(default_factory=deque)
    filling: bool = False
    taken: int = 0
    missed: int = 0
    failures: int = 0
    retry_at_s: float = 0.0
    problem: str = ""

    def is_short(self) -> bool:
        """Whether it wants more. Filling begins below the low water mark and goes on to the high one."""
        self.filling = len(self.warm) < (self.settings.high if self.filling else self.settings.low)
        return self.filling

    def info(self) -> PoolInfo:
        return PoolInfo(
            **self.settings.model_dump(),
            ready=len(self.warm),
            taken=self.taken,
            missed=self.missed,
            problem=self.problem,
        )


class Pools:
    """All pools of a node. ``make`` gives a warm sandbox of a snapshot, or raises and leaves nothing."""

    def __init__(self, home: Home, make: Make) -> None:
        self._home, self._make = home, make
        self._pools: dict[SnapshotId, _Pool] = {}
        self._changing = asyncio.Lock()  # one change of the settings at a time
        self._due = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Read what is kept from an earlier node, and fill it."""
        try:
            kept = PoolsFile.model_validate_json(self._home.pools.read_bytes()).pools
        except FileNotFoundError:
            kept = ()
        except (OSError, ValidationError) as error:
            log.error("%s cannot be read, there are no pools: %s", self._home.pools, error)
            kept = ()
        self._pools = {settings.snapshot_id: _Pool(settings) for settings in kept}
        self._keep()

    @property
    def any(self) -> bool:
        """Whether there is a pool: a node with one does not end by itself."""
        return bool(self._pools)

    def infos(self) -> list[PoolInfo]:
        """All, by reference."""
        return sorted((pool.info() for pool in self._pools.values()), key=lambda info: info.reference)

    def find(self, reference: str) -> SnapshotId | None:
        """The pool that is listed under ``reference``, also when the catalog has forgotten the name."""
        for snapshot_id, pool in self._pools.items():
            if reference in (pool.settings.reference, snapshot_id, snapshot_id.short):
                return snapshot_id
        return None

    async def set(self, settings: PoolSettings) -> PoolInfo:
        """Make or change one, and fill it up. Durable first: if that fails, nothing has changed."""
        async with self._changing:
            kept = {snapshot_id: pool.settings for snapshot_id, pool in self._pools.items()}
            await in_thread(self._write, (kept | {settings.snapshot_id: settings}).values())
            pool = self._pools.setdefault(settings.snapshot_id, _Pool(settings))
            pool.settings, pool.failures, pool.retry_at_s, pool.filling = settings, 0, 0.0, True
            while len(pool.warm) > settings.high:
                await self._drop(pool)
            self._keep()
            return pool.info()

    async def remove(self, snapshot_id: SnapshotId) -> None:
        """End one and all that stand ready in it. Durable first: if that fails, it is there as before."""
        async with self._changing:
            if snapshot_id not in self._pools:
                raise NotFound(
                    f"there is no pool of snapshot {snapshot_id.short}", fix="`aenv pool ls` shows them"
                )
            kept = [pool.settings for other, pool in self._pools.items() if other != snapshot_id]
            await in_thread(self._write, kept)
            pool = self._pools.pop(snapshot_id)
            while pool.warm:
                await self._drop(pool)

    def take(self, snapshot_id: SnapshotId, driver: DriverName) -> HostedSandbox | None:
        """The one that has stood ready the longest, now the caller's; None when there is none."""
        pool = self._pools.get(snapshot_id)
        if pool is None:
            return None
        self._due.set()
        if not pool.warm or pool.warm[0][0].record.driver is not driver:
            pool.missed += 1
            return None
        sandbox, watcher = pool.warm.popleft()
        watcher.cancel()
        pool.taken += 1
        return sandbox

    async def close(self) -> None:
        """End all that stands ready; the settings stay for the next node."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        for pool in self._pools.values():
            while pool.warm:
                await self._drop(pool)

    # -- pieces --------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        self._due.set()
        if (self._keeper is None or self._keeper.done()) and self._pools:
            self._keeper = asyncio.create_task(self._fill_forever(), name="fill the pools")

    async def _fill_forever(self) -> None:
        """One machine at a time: callers' launches come first."""
        while True:
            self._due.clear()
            now_s = asyncio.get_running_loop().time()
            short = [pool for pool in self._pools.values() if pool.is_short()]
            due = [pool for pool in short if pool.retry_at_s <= now_s]
            if due:
                await self._fill(min(due, key=lambda pool: len(pool.warm)))
                continue
            wait_s = min((pool.retry_at_s - now_s for pool in short), default=None)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._due.wait()

    async def _fill(self, pool: _Pool) -> None:
        snapshot_id = pool.settings.snapshot_id
        try:
            sandbox = await self._make(snapshot_id)
        except Exception as error:
            if not isinstance(error, AenvError | OSError):
                log.exception("pool of %s", pool.settings.reference)
            pool.failures += 1
            wait_s = min(RETRY_S * 2 ** (pool.failures - 1), MAX_RETRY_S)
            pool.retry_at_s = asyncio.get_running_loop().time() + wait_s
            pool.problem = known(error).message
            log.warning("pool of %s: %s (again in %g s)", pool.settings.reference, pool.problem, wait_s)
            return
        pool.failures, pool.problem = 0, ""
        if self._pools.get(snapshot_id) is not pool:  # removed meanwhile
            await self._discard(pool, sandbox)
            return
        watcher = asyncio.create_task(self._watch(pool, sandbox), name=f"watch warm {sandbox.id}")
        pool.warm.append((sandbox, watcher))

    async def _watch(self, pool: _Pool, sandbox: HostedSandbox) -> None:
        """One whose machine ends is replaced."""
        await sandbox.ended()
        pool.warm = deque(entry for entry in pool.warm if entry[0] is not sandbox)
        log.warning("pool of %s: machine %s ended while it stood ready", pool.settings.reference, sandbox.id)
        self._due.set()
        await self._discard(pool, sandbox)

    async def _drop(self, pool: _Pool) -> None:
        sandbox, watcher = pool.warm.pop()
        watcher.cancel()
        await self._discard(pool, sandbox)

    async def _discard(self, pool: _Pool, sandbox: HostedSandbox) -> None:
        """What fails here must not keep the others from being filled or ended."""
        try:
            await to_the_end(sandbox.discard())
        except (AenvError, OSError) as error:
            log.error("pool of %s: %s could not be removed: %s", pool.settings.reference, sandbox.id, error)

    def _write(self, pools: Iterable[PoolSettings]) -> None:
        durable.replace(self._home.pools, PoolsFile(pools=tuple(pools)).model_dump_json(indent=1).encode())
