"""What every sandbox of a node shares: its drivers, its repository, its network."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aenv_run.blocks.layers import Layers
from aenv_run.cache import BlobCache
from aenv_run.cache_limit import DEFAULT_LIMIT_BYTES
from aenv_run.catalog import Catalog
from aenv_run.drivers.protocol import Driver, DriverName, Endpoint
from aenv_run.errors import AenvError, DriverUnavailable, RestoreIncompatible
from aenv_run.guest import Guest
from aenv_run.repository import Repository
from aenv_run.sandbox_network import NodeNetwork
from aenv_run.sandbox_record import SandboxDirectory
from aenv_run.snapshot import Blob, MemoryFacts
from aenv_run.warm_images import WarmImages

COLD_FIX = "start it from its disk alone: `--cold`, or cold=True in Python"


def starts_at_once() -> int:
    """How many machines of a node start at the same time, resumes and forks included; the others wait.

    A start keeps a processor busy. With one for each the first of 16 children answers in two thirds of the time
    that it needs with two for each, and the last one a quarter sooner (measured with gVisor on 2 processors).
    """
    return max(2, min(32, len(os.sched_getaffinity(0))))


@dataclass(frozen=True)
class Chosen:
    """A driver that works here, and how guest code runs with it."""

    driver: Driver
    mode: str


@dataclass(frozen=True)
class Tools:
    """``driver`` (in ``mode``) is for new sandboxes; ``others`` are for those that were made with another one."""

    driver: Driver
    mode: str
    repository: Repository
    catalog: Catalog
    cache: BlobCache
    guests: Callable[[Endpoint, str | None], Guest]
    network: NodeNetwork = field(default_factory=NodeNetwork.absent)
    others: Mapping[DriverName, Driver] = field(default_factory=dict)
    cache_limit_bytes: int = DEFAULT_LIMIT_BYTES
    images: WarmImages | None = None  # None: first boots leave none
    layers: Layers | None = None  # None: every layer is fetched before a launch
    starts: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(starts_at_once()))

    def named(self, name: DriverName) -> Driver:
        """The driver of that name, whether or not it works here."""
        driver = self.driver if name == self.driver.name else self.others.get(name)
        if driver is None:
            raise DriverUnavailable(f"the driver {name} is not part of this build of aenv")
        return driver

    def is_far(self, blob: Blob, driver: Driver) -> bool:
        """Blocking: whether a layer is read on demand by machines of that driver."""
        return self.layers is not None and driver.caps.served_layers and self.layers.is_far(blob)

    def troubles(self, directory: SandboxDirectory) -> list[AenvError]:
        """Why layers of a sandbox's disk cannot be read now. Looks at a small file for each that is served."""
        return self.layers.troubles(directory.below) if self.layers is not None else []

    async def choose(self, memory: MemoryFacts | None, wanted: DriverName | None = None) -> Chosen:
        """For a machine from ``memory``: its maker's driver, which alone can restore it, or RestoreIncompatible.

        For one from its disk (None): the one ``wanted`` if it works here, else that of new sandboxes.
        """
        name = wanted if memory is None else memory.driver
        if name is None or name == self.driver.name:
            return Chosen(self.driver, self.mode)
        why = "this build of aenv does not have it"
        for driver in self.others.values():
            if driver.name == name:
                probe = await driver.probe()
                if probe.usable:
                    return Chosen(driver, probe.mode)
                why = probe.why
        if memory is None:
            return Chosen(self.driver, self.mode)
        raise RestoreIncompatible(
            f"the memory was made by the driver {name}, which cannot be used here: {why}", fix=COLD_FIX
        )

    async def sweep(self, directory: Path, name: DriverName | None) -> bool:
        """End what any driver (``name``, if it is known) left in a machine's directory."""
        known = [driver for driver in (self.driver, *self.others.values()) if name in (None, driver.name)]
        found = [await driver.sweep(directory) for driver in known or (self.driver, *self.others.values())]
        return any(found)
