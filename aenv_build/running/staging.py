"""A staging machine: boots or restores a committed snapshot, runs steps, gives captures. Dies with the build."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from aenv_build.running.staging_network import NOTHING, Reach, StagingNetwork
from aenv_run.blocks.layers import Layers
from aenv_run.cache import BlobCache
from aenv_run.capture import Capture
from aenv_run.drivers.protocol import BootSpec, Driver, Endpoint, Machine, RestoreSpec
from aenv_run.errors import AenvError, CorruptData, SandboxDead
from aenv_run.guest import Guest, Identity
from aenv_run.memory_depth import within_depth
from aenv_run.nbd import DiskLayer
from aenv_run.network import Lease
from aenv_run.snapshot import Blob, Snapshot
from aenv_run.threads import in_thread, to_the_end
from aenv_run.types import MachineSpec

#: Makes the client of the daemon at an endpoint.
GuestFactory: TypeAlias = Callable[[Endpoint], Guest]
HOSTNAME = "build"
#: Software emulation on a busy host needs most of it.
BOOT_TIMEOUT_S = 180.0


@dataclass
class Slots:
    """How many staging machines may live at once, and where their directories are made."""

    semaphore: asyncio.Semaphore
    directory: Path
    network: StagingNetwork
    guests: GuestFactory = Guest
    layers: Layers | None = None  # None: every layer is fetched before a start
    made: int = 0

    def next_directory(self, what: str) -> Path:
        """A fresh name; short, because a unix socket's path is bounded."""
        self.made += 1
        return self.directory / f"{what}{self.made}"


class StagingMachine:
    """Use ``start``; ``close`` always. Holds one slot from start to close."""

    def __init__(self, slots: Slots, directory: Path, snapshot: Snapshot, reach: Reach) -> None:
        self.reach = reach
        self._slots = slots
        self._directory = directory
        self._machine: Machine | None = None
        self._lease: Lease | None = None
        self._guest: Guest | None = None
        self.closed = False
        #: A step was given secrets or settings of the builder here: its memory must not be captured.
        self.was_given = False
        self._captures = 0
        #: The snapshot whose disk is what this machine's disk was at its last capture.
        self.snapshot = snapshot
        self._layers_taken = 0
        self._watch = slots.layers.watch(snapshot.disk) if slots.layers is not None else None
        self._driver: Driver | None = None
        #: The memory that it was restored from, which its captures stand on.
        self.memory_below: dict[str, Blob] = {}
        self._memory_files: dict[str, Path] = {}

    @classmethod
    async def start(
        cls,
        slots: Slots,
        driver: Driver,
        cache: BlobCache,
        snapshot: Snapshot,
        machine: MachineSpec,
        *,
        reach: Reach = NOTHING,
        restore: bool = False,
        initialise: bool = True,
    ) -> StagingMachine:
        """Boot the snapshot's disk, or restore its memory; wait for a slot first."""
        await slots.semaphore.acquire()
        staged = cls(slots, slots.next_directory("m"), snapshot, reach)
        try:
            await staged._start(driver, cache, machine, restore=restore)
            if initialise:
                await staged.guest.initialise(Identity.fresh(HOSTNAME))
        except BaseException:
            await staged.close()
            raise
        return staged

    async def _start(self, driver: Driver, cache: BlobCache, machine: MachineSpec, *, restore: bool) -> None:
        self._directory.mkdir(mode=0o700, parents=True)
        self._driver = driver
        self._lease = await self._slots.network.plug(driver, self.reach)
        network = self._lease.slot if self._lease else None
        disk = await in_thread(self._disk, driver, cache)
        boot = BootSpec(
            machine, disk, self._directory, self.reach.internet, network, ephemeral=True, timeout_s=BOOT_TIMEOUT_S
        )
        try:
            self._machine = await self._begin(driver, cache, boot, restore=restore)
            self._guest = self._slots.guests(self._machine.endpoint)
            await self._guest.wait_ready(BOOT_TIMEOUT_S)
        except (SandboxDead, CorruptData) as error:
            if self._slots.layers is None or not (troubles := self._slots.layers.troubles(self._below)):
                raise
            why = troubles[0]
            raise type(why)(f"the disk cannot be read: {why.message}", fix=why.fix) from error

    async def _begin(self, driver: Driver, cache: BlobCache, boot: BootSpec, *, restore: bool) -> Machine:
        if restore and self.snapshot.memory is not None:
            files = self.snapshot.memory.files
            memory = {role: await in_thread(cache.path, blob) for role, blob in files.items()}
            self.memory_below, self._memory_files = files, memory
            facts = self.snapshot.memory.facts
            return await driver.restore(RestoreSpec(**vars(boot), memory=memory, facts=facts))
        return await driver.boot(boot)

    @asynccontextmanager
    async def whole(self, what: str) -> AsyncIterator[None]:
        """Around what makes ``what`` of this machine: it fails if, since its start, its disk could not be read.

        Then that is the reason also of whatever else failed. A command that goes on after an I/O error would leave
        a result that is found again in the cache long after the store has come back.
        """
        try:
            yield
        except AenvError as error:
            if (why := await in_thread(self._unread, what)) is not None:
                raise why from error
            raise
        if (why := await in_thread(self._unread, what)) is not None:
            raise why

    def _unread(self, what: str) -> AenvError | None:
        return self._watch.unread(what) if self._watch is not None else None

    @property
    def _below(self) -> Path:
        """What it has open of layers that are read on demand."""
        return self._directory.with_name(f"{self._directory.name}-below")

    def _disk(self, driver: Driver, cache: BlobCache) -> tuple[DiskLayer, ...]:
        if self._slots.layers is None:
            return tuple(cache.path(blob) for blob in self.snapshot.disk)
        self._below.mkdir(mode=0o700)
        served = driver.caps.served_layers
        return tuple(
            self._slots.layers.open(blob, self._below, f"{number:02}", served=served)
            for number, blob in enumerate(self.snapshot.disk)
        )

    @property
    def guest(self) -> Guest:
        """The client of its daemon."""
        assert self._guest is not None
        return self._guest

    @property
    def machine(self) -> Machine:
        """The engine's side."""
        assert self._machine is not None
        return self._machine

    def scratch(self, name: str) -> Path:
        """A file of this machine's life for data on its way in."""
        return self._directory.with_name(f"{self._directory.name}-{name}")

    async def capture(self, *, memory: bool, keep_running: bool) -> Capture:
        """What is new since the last capture (``Machine.capture`` counts from the start of the machine)."""
        self._captures += 1
        directory = self._directory.with_name(f"{self._directory.name}-c{self._captures}")
        async with self.whole("what was made here"):
            whole = await to_the_end(self.machine.capture(directory, memory=memory, keep_running=keep_running))
        if memory and self._driver is not None:
            whole = await within_depth(self._driver, whole, self._memory_files)
        new = whole.disk[self._layers_taken :]
        self._layers_taken = len(whole.disk)
        if memory and keep_running:  # its processes stand still since the detach
            await self.guest.initialise(Identity.fresh(HOSTNAME))
        return replace(whole, disk=new)

    async def close(self) -> None:
        """End the machine and free its slot. Idempotent, and finishes even when cancelled."""
        if self.closed:
            return
        self.closed = True
        await to_the_end(self._close())

    async def _close(self) -> None:
        try:
            if self._guest is not None:
                await self._guest.aclose()
            if self._machine is not None:
                await self._machine.kill()
            if self._lease is not None:
                await self._slots.network.unplug(self._lease)
        finally:
            self._slots.semaphore.release()
            for path in self._directory.parent.glob(f"{self._directory.name}*"):
                if path.name == self._directory.name or path.name.startswith(f"{self._directory.name}-"):
                    if path.is_dir():
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        path.unlink(missing_ok=True)
