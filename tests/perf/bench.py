"""``make bench``: what a user waits for, beside the bare engine in the same run. A table, and JSON in a file.

Each figure of ours goes the whole way: SDK, node process, driver, guest daemon, identity, first command answered.
The bare figure is the same step by hand (tests/perf/bare.py), with the same command, ``/bin/true``. Pause and
fork have no bare twin that does the same (QEMU alone writes all RAM and must stop for it); notes below the table
say what it is there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from aenv_run import disk
from aenv_run.cache import BlobCache
from aenv_run.capture import Capture
from aenv_run.catalog import Catalog
from aenv_run.config import open_repository
from aenv_run.drivers import guest_image, qemu_command, qemu_host
from aenv_run.drivers.protocol import BootSpec
from aenv_run.drivers.qemu import zero_ram
from aenv_run.errors import AenvError
from aenv_run.node_client import NodeClient
from aenv_run.node_wire import ForkEntry, ForkRequest, ForkStart
from aenv_run.paths import Home
from aenv_run.repository import Draft
from aenv_run.sdk_async import AsyncSandbox
from aenv_run.types import MachineSpec, Name
from tests.contracts.machines import make_tree
from tests.perf import bare

MACHINE = MachineSpec(cpus=1, memory_mib=512, disk_mib=1024)
TRUE = ["/bin/true"]
BUSY_LOAD = 1.0
#: What the bare figure of a step is, where it is not the same by hand.
NOTES = {
    "a": "bare: stop the machine and write all of its RAM, which is what QEMU alone offers",
    "b": "bare: as (a), then as many restores by hand, two at a time per CPU",
}


@dataclass(frozen=True)
class Row:
    """One step: samples in milliseconds, ours and bare."""

    step: str
    ours_ms: list[float]
    bare_ms: list[float]
    note: str = ""


def percentile(samples: list[float], share: float) -> float:
    """The nearest-rank percentile."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]


class Bench:
    """One home with one snapshot, measured through the SDK and by hand."""

    def __init__(self, home: Home, rounds: int, scratch: Path) -> None:
        self.home, self.rounds, self.scratch = home, rounds, scratch
        self.rows: list[Row] = []
        self.serial = 0

    def fresh(self) -> Path:
        """A directory that does not exist yet."""
        self.serial += 1
        return self.scratch / f"bare-{self.serial}"

    async def prepare(self) -> None:
        """Make a small image, commit it, boot it once and commit it with memory."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        repository = open_repository(None, self.home)
        directory = self.scratch / "base"
        directory.mkdir()
        image = directory / "base.qcow2"
        await disk.make_image(make_tree(self.scratch / "tree"), MACHINE.disk_mib, image)
        draft = Draft(architecture=qemu_host.architecture(), machine=MACHINE, disk_below=())
        base = repository.commit(Capture(directory, (image,)), draft)
        Catalog(repository).publish(Name("bench-disk"), base.id)
        async with await AsyncSandbox.create("bench-disk", home=self.home) as sandbox:
            await sandbox.commands.run(TRUE)
            await sandbox.snapshot("bench")
        snapshot = repository.snapshot(Catalog(repository).resolve("bench").snapshot_id)
        cache = BlobCache(self.home.cache, repository)
        assert snapshot.memory is not None
        self.ram = cache.path(snapshot.memory.files["ram"])
        self.device_state = cache.path(snapshot.memory.files["device_state"])
        mode, _ = await qemu_host.mode(self.home)
        cpu = qemu_command.Cpu(mode, await qemu_host.tsc_khz(self.home) if mode == "tcg" else 0)
        layers = tuple(cache.path(blob) for blob in snapshot.disk)
        self.engine = bare.Engine(
            qemu_host.qemu_path(),
            cpu,
            guest_image.prepare(self.home, qemu_host.architecture()),
            BootSpec(MACHINE, layers, self.scratch),
            zero_ram(self.home, MACHINE.memory_mib << 20),
        )

    async def measure(self, step: str, ours: Callable[[], Awaitable[float]], by_hand: Callable[[], float]) -> Row:
        """Ours and bare in turn, so that both see the same machine; the first of each is not counted."""
        mine: list[float] = []
        theirs: list[float] = []
        for number in range(self.rounds + 1):
            own = await ours()
            other = await asyncio.to_thread(by_hand)
            if number:
                mine.append(own)
                theirs.append(other)
        return Row(step, mine, theirs)

    # -- steps ---------------------------------------------------------------------------------------------

    async def launch(self, snapshot: str = "bench") -> float:
        """Create and the first command."""
        start = time.perf_counter()
        sandbox = await AsyncSandbox.create(snapshot, home=self.home)
        await sandbox.commands.run(TRUE)
        elapsed = (time.perf_counter() - start) * 1000
        await sandbox.kill()
        return elapsed

    def launch_bare(self) -> float:
        """Spawn, load, first command."""
        start = time.perf_counter()
        machine = bare.restore(self.engine, self.fresh(), self.ram, self.device_state)
        machine.run_true()
        elapsed = (time.perf_counter() - start) * 1000
        machine.kill()
        return elapsed

    def boot_bare(self) -> float:
        """Spawn, boot, first command."""
        start = time.perf_counter()
        machine = bare.boot(self.engine, self.fresh())
        machine.run_true()
        elapsed = (time.perf_counter() - start) * 1000
        machine.kill()
        return elapsed

    def save_bare(self) -> float:
        """Stop and write all RAM, as QEMU alone does."""
        machine = bare.restore(self.engine, self.fresh(), self.ram, self.device_state)
        machine.run_true()
        target = self.scratch / "whole"
        elapsed = bare.save_whole(machine, target)
        machine.kill()
        target.unlink()
        return elapsed

    async def pause_and_resume(self) -> None:
        """Both of one sandbox, again and again."""
        pauses: list[float] = []
        resumes: list[float] = []
        whole: list[float] = []
        launches: list[float] = []
        async with await AsyncSandbox.create("bench", home=self.home) as sandbox:
            await sandbox.commands.run(TRUE)
            for _ in range(self.rounds):
                start = time.perf_counter()
                await sandbox.pause()
                pauses.append((time.perf_counter() - start) * 1000)
                start = time.perf_counter()
                await sandbox.resume()
                await sandbox.commands.run(TRUE)
                resumes.append((time.perf_counter() - start) * 1000)
                whole.append(await asyncio.to_thread(self.save_bare))
                launches.append(await asyncio.to_thread(self.launch_bare))
        self.rows.append(Row("pause", pauses, whole, "a"))
        self.rows.append(Row("resume", resumes, launches))

    async def fork(self, count: int, rounds: int) -> None:
        """Fork into ``count``: the parent's stop, the first child's command, all children's commands."""
        stopped: list[float] = []
        first: list[float] = []
        every: list[float] = []
        bare_stopped: list[float] = []
        bare_first: list[float] = []
        bare_every: list[float] = []
        async with await AsyncSandbox.create("bench", home=self.home, timeout=3600) as parent:
            await parent.commands.run(TRUE)
            for _ in range(rounds):
                stop_ms, times = await self.fork_once(parent, count)
                stopped.append(stop_ms)
                first.append(min(times))
                every.append(max(times))
                saved = await asyncio.to_thread(self.save_bare)
                folders = [self.fresh() for _ in range(count)]
                machines, by_hand = await asyncio.to_thread(
                    bare.restore_many, self.engine, folders, self.ram, self.device_state
                )
                for machine in machines:
                    machine.kill()
                bare_stopped.append(saved)
                bare_first.append(saved + min(by_hand))
                bare_every.append(saved + max(by_hand))
        self.rows.append(Row(f"fork {count}, stop", stopped, bare_stopped, "a"))
        self.rows.append(Row(f"fork {count}, first", first, bare_first, "b"))
        self.rows.append(Row(f"fork {count}, all", every, bare_every, "b"))

    async def fork_once(self, parent: AsyncSandbox, count: int) -> tuple[float, list[float]]:
        """How long the parent stood still, and when each child had answered its first command (ms)."""
        client = NodeClient(self.home)
        start = time.perf_counter()
        stopped = 0.0

        async def answered(child: AsyncSandbox) -> float:
            await child.commands.run(TRUE)
            return (time.perf_counter() - start) * 1000

        children: list[AsyncSandbox] = []
        async with asyncio.TaskGroup() as group:
            answers: list[asyncio.Task[float]] = []
            request = ForkRequest(count=count, timeout_s=600)
            async for line in client.fork_each(parent.sandbox_id, request):
                if isinstance(line, ForkStart):
                    stopped = line.stopped_ms
                elif isinstance(line, ForkEntry):
                    assert line.sandbox is not None, line
                    children.append(AsyncSandbox(line.sandbox, client))
                    answers.append(group.create_task(answered(children[-1])))
        await asyncio.gather(*(child.kill() for child in children))
        return stopped, [answer.result() for answer in answers]

    async def run(self) -> None:
        """Every step, with a progress bar."""
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("preparing a snapshot", total=7)
            await self.prepare()
            progress.update(task, advance=1, description="launch from memory")
            self.rows.append(await self.measure("launch", self.launch, self.launch_bare))
            progress.update(task, advance=1, description="pause and resume")
            await self.pause_and_resume()
            for count in (1, 4, 16):
                progress.update(task, advance=1, description=f"fork to {count}")
                await self.fork(count, max(3, self.rounds // (1 if count < 16 else 3)))
            progress.update(task, advance=1, description="cold boot")
            cold, self.rounds = self.rounds, max(2, self.rounds // 3)
            self.rows.append(await self.measure("cold boot", lambda: self.launch("bench-disk"), self.boot_bare))
            self.rounds = cold


def show(rows: list[Row], facts: dict[str, str]) -> None:
    """The table for people: at most 100 columns, what needs words in notes below it."""
    console = Console(highlight=False)
    for key, value in facts.items():
        console.print(f"{key}: {value}", soft_wrap=True)
    table = Table("step", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("n", "p50 ms", "p95 ms", "bare p50", "bare p95", "ratio p50"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        ours, theirs = statistics.median(row.ours_ms), statistics.median(row.bare_ms)
        cells = [ours, percentile(row.ours_ms, 0.95), theirs, percentile(row.bare_ms, 0.95)]
        step = f"{row.step} ({row.note})" if row.note else row.step
        table.add_row(step, str(len(row.ours_ms)), *(f"{ms:.0f}" for ms in cells), f"{ours / theirs:.2f}")
    console.print(table)
    console.print("launch, resume, cold boot, first, all: until a first command (/bin/true) has been answered")
    for mark, text in NOTES.items():
        console.print(f"({mark}) {text}")
    if float(facts["load at start"].split()[0]) > BUSY_LOAD:
        console.print(f"WARNING: the host was busy (load above {BUSY_LOAD:g}): these figures are not comparable")


async def facts(home: Home, load: tuple[float, float, float]) -> dict[str, str]:
    """Machine, driver and versions, and how busy the host was before anything was measured."""
    mode, why = await qemu_host.mode(home)
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "machine": f"{len(models)} x {models[0].partition(': ')[2] if models else platform.processor()}",
        "host kernel": platform.release(),
        "driver": f"qemu {await qemu_host.qemu_version(home)}",
        "mode": f"{mode} ({why})",
        "guest": f"{MACHINE.memory_mib} MiB, {MACHINE.cpus} cpu",
        "load at start": " ".join(f"{minutes:.2f}" for minutes in load),
    }


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="samples of each step (default 10)")
    parser.add_argument("--json", type=Path, help="also write every sample to this file")
    options = parser.parse_args()
    load = os.getloadavg()
    if load[0] > BUSY_LOAD:
        print(f"WARNING: load average {load[0]:.2f}: the figures will not be comparable", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="aenv-bench-", dir="/var/tmp") as scratch:
        home = Home(Path(scratch) / "home")
        os.environ["AENV_DRIVER"] = "qemu"  # the engine that is measured by hand beside it
        home.network.mkdir(parents=True)
        (home.network / "config.json").write_text('{"mode": "none"}')  # nothing of the host's network is touched
        bench = Bench(home, options.rounds, Path(scratch) / "scratch")
        try:
            await bench.run()
            found = await facts(home, load)
        finally:
            with suppress(AenvError):  # a node that cannot begin has said why already
                await NodeClient(home).shutdown(kill=True)
    show(bench.rows, found)
    if options.json:
        options.json.write_text(
            json.dumps({"facts": found, "notes": NOTES, "rows": [asdict(row) for row in bench.rows]}, indent=1)
        )


if __name__ == "__main__":
    asyncio.run(main())
