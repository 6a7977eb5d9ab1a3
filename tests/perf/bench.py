"""``make bench``: what a user waits for, beside the bare engine in the same run. Tables, and JSON in a file.

Each figure of ours goes the whole way: SDK, node process, driver, guest daemon, identity, first command answered.
The bare figure is the same step by hand (``bare_qemu.py``, ``bare_runsc.py``), with the same command.
Ended by Ctrl-C or SIGTERM it leaves no node, no engine and no file.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from aenv_run import disk
from aenv_run.cache import BlobCache
from aenv_run.capture import Capture
from aenv_run.catalog import Catalog
from aenv_run.config import REPOSITORY_VARIABLE, WARM_VARIABLE, open_repository
from aenv_run.drivers import guest_image, gvisor_host, gvisor_spec, qemu_command, qemu_host
from aenv_run.drivers.gvisor_level import Level
from aenv_run.drivers.protocol import BootSpec, Driver, DriverName
from aenv_run.drivers.qemu import zero_ram
from aenv_run.drivers.select import Selected, all_drivers, select
from aenv_run.errors import DriverUnavailable
from aenv_run.paths import Home
from aenv_run.repository import Draft
from aenv_run.sandbox_tools import starts_at_once
from aenv_run.sdk_async import AsyncSandbox
from aenv_run.snapshot import Snapshot
from aenv_run.types import MachineSpec, Name
from tests.contracts.machines import make_tree
from tests.perf import bare_qemu, bare_runsc, dirty, own_host
from tests.perf.footprint import processor_s
from tests.perf.report import Report, show, write_json
from tests.perf.steps import DISK_ONLY, LIFE_S, WITH_MEMORY, Steps
from tests.perf.twin import TRUE, Twin

MACHINE = MachineSpec(cpus=1, memory_mib=512, disk_mib=1024)
DRIVERS = (DriverName.QEMU, DriverName.GVISOR)
LISTEN_S = 2.0
STEPS = 12
UNTIL = "launch, resume, reset, cold boot, first, all: until a first command (/bin/true) has been answered"


class Bench:
    """One driver: its home, its snapshot, its twin; ``close`` leaves nothing of them."""

    def __init__(self, name: DriverName, rounds: int, scratch: Path, progress: Progress) -> None:
        self.name, self._rounds, self._scratch = name, rounds, scratch
        self._home = Home(scratch / "home")
        self._twin: Twin | None = None
        self._progress = progress
        self._task = progress.add_task(f"{name}: preparing a snapshot", total=STEPS)

    def _began(self, step: str) -> None:
        self._progress.update(self._task, advance=1, description=f"{self.name}: {step}")

    async def run(self, only: str) -> Report:
        """Measure everything, or the steps with a word in their name."""
        busy = [await busy_share()]
        selected = await self._begin()
        tree, snapshot = await self._prepare(selected.driver)
        if self.name is DriverName.QEMU:
            self._twin = await self._qemu_twin(snapshot)
        else:
            self._twin = await self._runsc_twin(tree)
        await asyncio.get_running_loop().run_in_executor(self._twin.pool, self._twin.prepare)
        steps = Steps(self._home, selected.driver, self._twin, self._rounds, self._began)
        await steps.run(only)
        self._began(dirty.NAME)
        if only in dirty.NAME:
            await dirty.measure(steps)
        busy.append(await busy_share())
        facts = {"driver": selected.why, "guest": f"{MACHINE.memory_mib} MiB, {MACHINE.cpus} cpu", **host_facts()}
        return Report(facts, notes_of(self._twin), steps.rows, steps.memory, busy)

    async def close(self) -> None:
        """End the node with all that runs, and the twin."""
        if self._twin is not None:
            await asyncio.to_thread(self._twin.close)
        await own_host.end_node(self._home)
        driver = all_drivers(self._home)[self.name]
        for directory in self._home.sandboxes.glob("*/machine"):
            await driver.sweep(directory)

    async def _begin(self) -> Selected:
        os.environ["AENV_DRIVER"] = self.name
        os.environ["AENV_FIRST_BOOT_WARMS"] = "off"  # every cold boot is one
        os.environ[WARM_VARIABLE] = "off"  # nothing happens in the background
        os.environ[REPOSITORY_VARIABLE] = str(self._home.repository)
        self._home.network.mkdir(parents=True)
        # QEMU's user networking is measured, with a forwarded port, as it is by hand; runsc needs a slot.
        mode = "none" if self.name is DriverName.QEMU else "auto"
        settings = f'{{"mode": "{mode}", "run_directory": "{self._scratch}/run"}}'
        (self._home.network / "config.json").write_text(settings)
        return await select(self.name, self._home)

    async def _prepare(self, driver: Driver) -> tuple[Path, Snapshot]:
        """Make a small image, commit it, boot it once and commit it with memory."""
        repository = open_repository(None, self._home)
        directory = self._scratch / "base"
        directory.mkdir(parents=True)
        image = directory / "base.qcow2"
        tree = make_tree(self._scratch / "tree")
        await disk.make_image(tree, MACHINE.disk_mib, image)
        draft = Draft(architecture=qemu_host.architecture(), machine=MACHINE, disk_below=())
        base = repository.commit(Capture(directory, (image,)), draft)
        Catalog(repository).publish(Name(DISK_ONLY), base.id)
        async with await AsyncSandbox.create(DISK_ONLY, home=self._home, timeout=LIFE_S) as sandbox:
            await sandbox.commands.run(list(TRUE))
            await sandbox.snapshot(WITH_MEMORY)
        return tree, repository.snapshot(Catalog(repository).resolve(WITH_MEMORY).snapshot_id)

    async def _qemu_twin(self, snapshot: Snapshot) -> Twin:
        cache = BlobCache(self._home.cache, open_repository(None, self._home))
        assert snapshot.memory is not None
        mode, _ = await qemu_host.mode(self._home)
        layers = tuple(cache.path(blob) for blob in snapshot.disk)
        engine = bare_qemu.Engine(
            program=qemu_host.qemu_path(),
            cpu=qemu_command.Cpu(mode, await qemu_host.tsc_khz(self._home) if mode == "tcg" else 0),
            image=guest_image.prepare(self._home, qemu_host.architecture()),
            spec=BootSpec(MACHINE, layers, self._scratch),
            zero_ram=zero_ram(self._home, MACHINE.memory_mib << 20),
            ram=cache.path(snapshot.memory.files["ram"]),
            device_state=cache.path(snapshot.memory.files["device_state"]),
            preload=qemu_host.ram_library(self._home),
        )
        return bare_qemu.QemuTwin(engine, self._scratch)

    async def _runsc_twin(self, tree: Path) -> Twin:
        found = await gvisor_host.verdict(self._home, Level.ROOT)
        runsc = gvisor_host.runsc_path()
        engine = bare_runsc.Engine(
            argv=tuple(gvisor_spec.flags(runsc, found.platform, network=True, cgroups=found.cgroups)),
            envd=gvisor_host.envd_path(self._home),
            machine=MACHINE,
            tree=tree,
            hide_net_sysctl=found.hide_net_sysctl,
            cgroups=found.cgroups,
        )
        return bare_runsc.RunscTwin(engine, self._scratch)


def notes_of(twin: Twin) -> dict[str, str]:
    """What needs words, by mark."""
    return {
        "until": UNTIL,
        "bare": twin.notes["machine"],
        "a": f"bare: {twin.notes['pause']}",
        "b": f"bare: {twin.notes['save']}",
        "c": f"bare: as (b), then as many restores by hand, {starts_at_once()} at a time",
        "d": "the next episode: kill, create from the snapshot; or `reset` while a pool has one machine ready. "
        "bare: kill, restore. gvx states about 100 ms",
        "e": "nothing left: no process, directory, control group or namespace; gvx states about 10 ms for a close",
        "g": "until its name is known and all of it is durable; bare: as (b), which nobody has named or checked",
        "h": "bare: of an image without what was written",
        "f": "8 MiB written to a file, 8 MiB of memory used and given back. Pss: of all processes of a machine; "
        "held: with all pages of its memory file; group: what its control group is charged",
    }


def host_facts() -> dict[str, str]:
    """The machine that it ran on."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "machine": f"{len(models)} x {models[0].partition(': ')[2] if models else platform.processor()}",
        "host kernel": platform.release(),
    }


async def busy_share() -> float:
    """What share of the host's processors is used while we wait."""
    before = processor_s()
    await asyncio.sleep(LISTEN_S)
    after = processor_s()
    return (after[0] - before[0]) / max(0.01, after[1] - before[1])


async def usable(wanted: str) -> list[DriverName]:
    """The drivers to measure; of both, those that work here."""
    names = DRIVERS if wanted == "both" else (DriverName(wanted),)
    found = []
    with tempfile.TemporaryDirectory(prefix="aenv-bench-", dir="/var/tmp") as scratch:
        for name in names:
            try:
                await select(name, Home(Path(scratch)))
                found.append(name)
            except DriverUnavailable as error:
                if wanted != "both":
                    raise
                sys.stderr.write(f"{name} is not measured: {error.message}\n")
    return found


async def measure(names: list[DriverName], rounds: int, only: str) -> list[Report]:
    """One driver after the other. A cancel ends what runs first."""
    reports = []
    for name in names:
        with (
            tempfile.TemporaryDirectory(prefix="aenv-bench-", dir="/var/tmp") as scratch,
            Progress(console=Console(stderr=True), transient=True) as progress,
        ):
            bench = Bench(name, rounds, Path(scratch), progress)
            try:
                reports.append(await bench.run(only))
            finally:
                await to_the_end(bench.close())
        show(reports[-1])
    return reports


async def to_the_end(work: object) -> None:
    """Signals no longer count: what ends the bench is under way."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: None)
    assert asyncio.iscoroutine(work)
    task = asyncio.ensure_future(work)
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([task])
    task.result()


async def main(options: argparse.Namespace) -> None:
    """Measure and print."""
    reports = await measure(await usable(options.driver), options.rounds, options.only)
    if options.json:
        write_json(options.json, reports)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--driver", choices=("both", *DRIVERS), default="both", help="default: both that work here"
    )
    parser.add_argument("--rounds", type=int, default=10, help="samples of each step (default 10)")
    parser.add_argument("--only", default="", metavar="WORD", help="the steps with this word in their name")
    parser.add_argument("--json", type=Path, help="also write every sample to this file")
    own_host.run_there(main(parser.parse_args()))
