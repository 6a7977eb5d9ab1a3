"""From the cells of a recipe to plans: what their bases mean today, the driver, and the facts of this host."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from aenv_build.bases.image import ImageSource, ResolvedImage
from aenv_build.language.document import Where
from aenv_build.language.image_reference import parse_image
from aenv_build.language.load import Source
from aenv_build.language.recipe import Base
from aenv_build.planning.base import FoundBase
from aenv_build.planning.files import Readings
from aenv_build.planning.graph import check_graph, check_network
from aenv_build.planning.keys import HostFacts
from aenv_build.planning.lent import Lent
from aenv_build.planning.lock import FIX, Lock
from aenv_build.planning.plan import Plan, machine_of, make_plan
from aenv_build.running.staging_network import lacks_internet
from aenv_run.catalog import Catalog
from aenv_run.drivers.protocol import Driver
from aenv_run.drivers.select import Selected, select
from aenv_run.errors import AenvError, Unsupported
from aenv_run.paths import Home
from aenv_run.repository import Repository
from aenv_run.signatures import require_signed
from aenv_run.snapshot import MemoryFacts, Snapshot
from aenv_run.types import Architecture, Digest, MachineSpec, SnapshotId

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


async def prepare(
    sources: Sequence[Source],
    driver: str,
    home: Home,
    repository: Repository,
    lent: Lent,
    lock: Lock | None = None,
) -> tuple[Selected, list[Plan]]:
    """One plan for each cell, all with one driver. Starts nothing. What ``lock`` pins is not looked up again."""
    for source in sources:
        check_graph(source)
        check_network(source, lent)
    work = Preparation(home, repository, lock or Lock())
    for source in sources:
        await work.base_snapshot(source)  # what is not there is told before a driver is looked for
    internet = any(source.recipe.machine.internet for source in sources)
    selected = await select(driver, home, lacks=partial(lacks_internet, home) if internet else (lambda caps: ""))
    return selected, [await work.plan(source, selected.driver) for source in sources]


def this_architecture() -> Architecture:
    """Of this host, in Debian's word."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise Unsupported(f"the architecture {machine} is not supported", fix="use x86_64 or aarch64")
    return Architecture(_ARCHITECTURES[machine])


@dataclass
class Preparation:
    """Makes plans of a recipe's cells. What they have in common is found out once; what is locked is not asked."""

    home: Home
    repository: Repository
    lock: Lock
    readings: Readings = field(default_factory=Readings)
    _snapshots: dict[str, Snapshot] = field(default_factory=dict)
    _images: dict[str, ResolvedImage] = field(default_factory=dict)
    _facts: dict[MachineSpec, MemoryFacts] = field(default_factory=dict)

    async def plan(self, source: Source, driver: Driver) -> Plan:
        """The cell's plan on that driver."""
        source = self._with_commits(source)
        base = await self.base_snapshot(source)
        facts = await self._host_facts(driver, machine_of(source, base))
        found = await self._found(source, source.recipe.base, ("base",), facts.architecture)
        others = {
            index: await self._found(source, step.base, ("steps", index, "base"), facts.architecture)
            for index, step in enumerate(source.recipe.steps)
            if step.base is not None
        }
        return await asyncio.to_thread(
            make_plan, source, facts, base, found.image, self.readings, found.release, others
        )

    async def base_snapshot(self, source: Source) -> Snapshot | None:
        """The snapshot that the recipe begins with, if it is one."""
        return await self._snapshot(source, source.recipe.base, ("base",))

    async def _found(self, source: Source, base: Base, where: Where, architecture: Architecture) -> FoundBase:
        image = await self._base_image(source, base, where, architecture)
        release = await self._release(source, base, where)
        return FoundBase(await self._snapshot(source, base, where), image, release)

    async def _snapshot(self, source: Source, base: Base, where: Where) -> Snapshot | None:
        name = base.snapshot
        if name is None:
            return None
        if name not in self._snapshots:
            try:
                pin = self.lock.find("snapshot", name)
                if pin is None:
                    pin = (await asyncio.to_thread(Catalog(self.repository).resolve, name)).snapshot_id
                await asyncio.to_thread(require_signed, self.repository, SnapshotId(pin))
                self._snapshots[name] = await asyncio.to_thread(self.repository.snapshot, SnapshotId(pin))
            except AenvError as error:
                raise _at_base(source, (*where, "snapshot"), error) from error
        return self._snapshots[name]

    async def _base_image(
        self, source: Source, base: Base, where: Where, architecture: Architecture
    ) -> ResolvedImage | None:
        name = base.image
        if name is None:
            return None
        if name not in self._images:
            try:
                reference = parse_image(name).at(source.folder)
                if (pin := self.lock.find("image", name)) is not None:
                    reference = reference.pinned(Digest(pin))
                kept = self.home.cache / "images"
                self._images[name] = await ImageSource(reference, kept).resolve(architecture)
            except AenvError as error:
                raise _at_base(source, (*where, "image"), error) from error
        return self._images[name]

    async def _release(self, source: Source, base: Base, where: Where) -> Digest | None:
        """What the base's archive of packages is bound to; a root file system that is locked must be that file."""
        if base.archive is not None and (pin := self.lock.find("archive", base.archive)) is not None:
            path = source.folder / base.archive
            found = await asyncio.to_thread(self.readings.digest, path) if path.is_file() else pin
            if found != pin:
                raise source.error(
                    (*where, "archive"), f"{base.archive} is locked to {pin}, and is {found} today", fix=FIX
                )
        if base.debootstrap is None or base.debootstrap.mirror is None:
            return None
        pin = self.lock.find("release", f"{base.debootstrap.mirror} {base.debootstrap.suite}")
        return Digest(pin) if pin is not None else None

    def _with_commits(self, source: Source) -> Source:
        """The recipe with the locked commit wherever it names a ref of git."""
        steps = []
        for step in source.recipe.steps:
            git = step.git
            if git is not None and (pin := self.lock.find("git", f"{git.url} {git.ref}")) is not None:
                pinned = git.model_copy(update={"commit": pin, "ref": None})
                steps.append(step.model_copy(update={"git": pinned}))
            else:
                steps.append(step)
        return replace(source, recipe=source.recipe.model_copy(update={"steps": tuple(steps)}))

    async def _host_facts(self, driver: Driver, machine: MachineSpec) -> HostFacts:
        if machine not in self._facts:
            self._facts[machine] = await driver.facts(machine)
        memory = self._facts[machine]
        return HostFacts(this_architecture(), memory.envd_digest, memory)


def _at_base(source: Source, where: Where, error: AenvError) -> AenvError:
    return type(error)(f"{source.document.mark(where)}: {error.message}", fix=error.fix)
