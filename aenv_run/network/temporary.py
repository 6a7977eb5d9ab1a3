"""Slots of a process that ends by itself, such as a build: apart from the node's, and removed with the process.

Each is a home of its own within the home, so that its slots have other ids and other records. The process holds a
lock there; whoever comes later removes the slots of those whose lock is free.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from pathlib import Path

from aenv_run.errors import AenvError
from aenv_run.network.addressing import SlotId, SlotKind
from aenv_run.network.host import RUN_DIRECTORY
from aenv_run.network.policy import NetworkPolicy
from aenv_run.network.pool import Network, NetworkConfig
from aenv_run.network.slot import Lease
from aenv_run.node_socket import FileLock
from aenv_run.paths import Home

log = logging.getLogger(__name__)


def _homes(home: Home) -> Path:
    return home.network / "temporary"


def _network(directory: Path, config: NetworkConfig, run_directory: Path) -> Network:
    cold = config.model_copy(update={"low_water": 0, "high_water": 0})
    return Network(Home(directory), cold, kinds=(), run_directory=run_directory)


async def remove_abandoned(home: Home, config: NetworkConfig, *, run_directory: Path = RUN_DIRECTORY) -> None:
    """Remove the slots of processes that were killed."""
    for directory in list(_homes(home).glob("*")):
        lock = FileLock(directory / "lock")
        if not lock.acquire():
            continue
        try:
            network = _network(directory, config, run_directory)
            await network.start(())
            await network.close()
            await asyncio.to_thread(shutil.rmtree, directory)
        except (AenvError, OSError) as error:
            log.warning("network slots of a process that is gone could not be removed: %s", error)
        finally:
            lock.release()


class TemporaryNetwork:
    """Nothing is made before the first ``acquire``."""

    def __init__(self, home: Home, config: NetworkConfig, *, run_directory: Path = RUN_DIRECTORY) -> None:
        self._home = home
        self._config = config
        self._run_directory = run_directory
        self._starting = asyncio.Lock()
        self._directory: Path | None = None
        self._lock: FileLock | None = None
        self._network: Network | None = None

    async def acquire(self, kind: SlotKind, policy: NetworkPolicy) -> Lease:
        """A slot with ``policy`` in force."""
        async with self._starting:
            network = self._network or await self._start()
        lease = await network.acquire(kind)
        try:
            if policy != network.policy(lease.slot_id):
                await network.apply(lease.slot_id, policy)
        except BaseException:
            await asyncio.shield(network.release(lease.slot_id))
            raise
        return lease

    async def release(self, slot_id: SlotId) -> None:
        """The machine is gone. Idempotent."""
        if self._network is not None:
            await self._network.release(slot_id)

    async def close(self) -> None:
        """Remove all that is left. Idempotent."""
        if self._network is not None:
            for slot_id in (await self._network.status()).leased:
                await self._network.release(slot_id)
            await self._network.close()
            self._network = None
        if self._directory is not None:
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)
            self._directory = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    async def _start(self) -> Network:
        await remove_abandoned(self._home, self._config, run_directory=self._run_directory)
        while self._directory is None:
            directory = _homes(self._home) / secrets.token_hex(4)
            lock = FileLock(directory / "lock")
            if lock.acquire() and (directory / "lock").exists():  # else another took it for an abandoned one
                self._directory, self._lock = directory, lock
        network = _network(self._directory, self._config, self._run_directory)
        await network.start(())
        self._network = network
        return network
