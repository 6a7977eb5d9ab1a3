"""From the cells of a recipe to plans: what their bases mean today, the driver, and the facts of this host."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from aenv_build.bases.image import ImageSource, ResolvedImage
from aenv_build.files import Readings
from aenv_build.graph import check_graph, check_network
from aenv_build.image_reference import parse_image
from aenv_build.keys import HostFacts
from aenv_build.lent import Lent
from aenv_build.load import Source
from aenv_build.plan import Plan, machine_of, make_plan
from aenv_build.staging_network import lacks_internet
from aenv_run.catalog import Catalog
from aenv_run.drivers.select import Selected, select
from aenv_run.errors import AenvError, Unsupported
from aenv_run.paths import Home
from aenv_run.repository import Repository
from aenv_run.snapshot import MemoryFacts, Snapshot
from aenv_run.types import Architecture, MachineSpec

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


async def prepare(
    sources: Sequence[Source], driver: str, home: Home, repository: Repository, lent: Lent
) -> tuple[Selected, list[Plan]]:
    """One plan for each cell, all with one driver. Starts nothing."""
    for source in sources:
        check_graph(source)
        check_network(source, lent)
    work = _Preparation(home, repository)
    bases = [await work.base_snapshot(source) for source in sources]
    internet = any(source.recipe.machine.internet for source in sources)
    selected = await select(driver, home, lacks=partial(lacks_internet, home) if internet else (lambda caps: ""))
    plans = []
    for source, base in zip(sources, bases, strict=True):
        facts = await work.facts(selected, machine_of(source, base))
        image = await work.base_image(source, facts.architecture)
        plans.append(await asyncio.to_thread(make_plan, source, facts, base, image, work.readings))
    return selected, plans


def this_architecture() -> Architecture:
    """Of this host, in Debian's word."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise Unsupported(f"the architecture {machine} is not supported", fix="use x86_64 or aarch64")
    return Architecture(_ARCHITECTURES[machine])


@dataclass
class _Preparation:
    """What cells have in common is found out once."""

    home: Home
    repository: Repository
    readings: Readings = field(default_factory=Readings)
    _snapshots: dict[str, Snapshot] = field(default_factory=dict)
    _images: dict[str, ResolvedImage] = field(default_factory=dict)
    _facts: dict[MachineSpec, MemoryFacts] = field(default_factory=dict)

    async def base_snapshot(self, source: Source) -> Snapshot | None:
        name = source.recipe.base.snapshot
        if name is None:
            return None
        if name not in self._snapshots:
            try:
                found = await asyncio.to_thread(Catalog(self.repository).resolve, name)
                self._snapshots[name] = await asyncio.to_thread(self.repository.snapshot, found.snapshot_id)
            except AenvError as error:
                raise _at_base(source, "snapshot", error) from error
        return self._snapshots[name]

    async def base_image(self, source: Source, architecture: Architecture) -> ResolvedImage | None:
        name = source.recipe.base.image
        if name is None:
            return None
        if name not in self._images:
            try:
                reference = parse_image(name).at(source.folder)
                kept = self.home.cache / "images"
                self._images[name] = await ImageSource(reference, kept).resolve(architecture)
            except AenvError as error:
                raise _at_base(source, "image", error) from error
        return self._images[name]

    async def facts(self, selected: Selected, machine: MachineSpec) -> HostFacts:
        if machine not in self._facts:
            self._facts[machine] = await selected.driver.facts(machine)
        memory = self._facts[machine]
        return HostFacts(this_architecture(), memory.envd_digest, memory)


def _at_base(source: Source, key: str, error: AenvError) -> AenvError:
    return type(error)(f"{source.document.mark(('base', key))}: {error.message}", fix=error.fix)
