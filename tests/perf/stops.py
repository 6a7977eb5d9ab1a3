"""``python -m tests.perf.stops``: for how long a machine stands still, what a capture adds, what a restore costs.

By what was written in memory (QEMU: a layer of it) and on disk; by the number of memory layers; and what the host
gets back when the guest frees memory. No node and no SDK: the driver alone.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from aenv_run.capture import Capture
from aenv_run.drivers.protocol import DriverName, Machine
from aenv_run.drivers.select import select
from aenv_run.paths import Home
from aenv_run.types import MachineSpec
from tests.contracts.machines import Bench, make_bench, prepare_capture, sh

MACHINE = MachineSpec(cpus=1, memory_mib=512, disk_mib=2048)
MIB = 1 << 20
DIRTY_MIB, WRITTEN_MIB, LAYERS = (0, 10, 50, 200), (0, 100, 1000), (0, 1, 4, 8)
FREED_MIB, FREE_WAIT_S = 100, 10.0


def resident_mib(machine: Machine, what: str) -> int:
    """A line of smaps_rollup (``Anonymous``, ``Pss``)."""
    text = Path(f"/proc/{machine.pid}/smaps_rollup").read_text()
    match = re.search(rf"^{what}:\s+(\d+) kB", text, re.MULTILINE)
    assert match
    return int(match[1]) >> 10


async def captured(bench: Bench, line: list[Capture], script: str, *, memory: bool) -> Capture:
    """A child of ``line`` runs ``script`` and is captured."""
    async with bench.child(*line) as machine:
        await sh(machine, script)
        if memory:
            await prepare_capture(machine)
        return await machine.capture(bench.capture_directory(), memory=memory)


def added_mib(paths: list[Path]) -> str:
    """The size of files."""
    return f"{sum(path.stat().st_size for path in paths) / MIB:.1f}"


async def stops(bench: Bench, rounds: int, table: Table) -> None:
    """How long it stood still, and what was added."""
    for mib in DIRTY_MIB:
        found = []
        for _ in range(rounds):
            script = f"dd if=/dev/urandom of=/dev/shm/x bs=1M count={mib} 2>/dev/null"
            capture = await captured(bench, [bench.seed], script, memory=True)
            found.append(capture.stopped_ms)
            added = added_mib(list(capture.memory.values()))
            capture.discard()
        table.add_row(f"{mib} MiB of memory written", *figures(found), f"{added} MiB added")
    for mib in WRITTEN_MIB:
        found = []
        for _ in range(rounds):
            script = f"dd if=/dev/zero of=/x bs=1M count={mib} 2>/dev/null"
            capture = await captured(bench, [bench.seed], script, memory=False)
            found.append(capture.stopped_ms)
            added = added_mib(list(capture.disk))
            capture.discard()
        table.add_row(f"{mib} MiB of disk written, sealed", *figures(found), f"{added} MiB added")


async def restores(bench: Bench, rounds: int, table: Table) -> None:
    """A restore by the number of layers, each of some MiB."""
    line = [bench.seed]
    for layers in range(max(LAYERS) + 1):
        if layers in LAYERS:
            found = [await timed(lambda: bench.driver.restore(bench.restored(*line))) for _ in range(rounds)]
            table.add_row(f"restore, {layers} memory layers", *figures(found), "")
        script = f"dd if=/dev/urandom of=/dev/shm/x{layers} bs=1M count=5 2>/dev/null"
        line.append(await captured(bench, line, script, memory=True))


async def timed(start: Callable[[], Awaitable[Machine]]) -> float:
    """Milliseconds until the virtual CPUs run."""
    began = time.perf_counter()
    machine = await start()
    elapsed = (time.perf_counter() - began) * 1000
    await machine.kill()
    return elapsed


async def freed(bench: Bench, table: Table) -> None:
    """What the host has back after the guest freed memory."""
    async with bench.child() as machine:
        await sh(machine, f"dd if=/dev/urandom of=/dev/shm/x bs=1M count={FREED_MIB} 2>/dev/null")
        full = resident_mib(machine, "Anonymous")
        await sh(machine, "rm /dev/shm/x")
        await asyncio.sleep(FREE_WAIT_S)
        left = resident_mib(machine, "Anonymous")
    table.add_row(f"{FREED_MIB} MiB freed by the guest", "", "", f"{full} -> {left} MiB anonymous")


def figures(samples: list[float]) -> tuple[str, str]:
    """Median and largest."""
    return f"{statistics.median(samples):.1f}", f"{max(samples):.1f}"


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="samples of each (default 5)")
    parser.add_argument("--driver", type=DriverName, default=DriverName.QEMU, help="qemu (default) or gvisor")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aenv-stops-", dir="/var/tmp") as scratch:
        home = Home(Path(scratch) / "home")
        selected = await select(options.driver, home)
        root = Path(scratch) / "machines"
        root.mkdir()
        bench = await make_bench(selected.driver, home, root, options.driver, MACHINE)
        table = Table(f"{options.driver}, {MACHINE.memory_mib} MiB", "p50 ms", "max ms", "")
        await stops(bench, options.rounds, table)
        await restores(bench, options.rounds, table)
        await freed(bench, table)
    Console(highlight=False).print(table)


if __name__ == "__main__":
    asyncio.run(main())
