"""``make bench-density``: how many sandboxes of one snapshot fit, what each holds, and how long the n-th takes.

Starts one after the other until ``--most`` or until less than ``--keep-mib`` of the host's memory is available.
Idle first, then after a small workload in each. Ended by Ctrl-C or SIGTERM it leaves nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from aenv_run.drivers import gvisor_cgroup
from aenv_run.drivers.protocol import DriverName
from aenv_run.sdk_async import AsyncSandbox
from tests.perf import own_host
from tests.perf.bench import MACHINE, Bench, host_facts, to_the_end, usable
from tests.perf.footprint import MIB, engines_in, memory_of
from tests.perf.steps import LIFE_S, WITH_MEMORY, WORK
from tests.perf.twin import TRUE


@dataclass(frozen=True)
class Row:
    """When ``count`` ran. Bytes: medians of all of them; ``taken_bytes``: what the host has less, by sandbox."""

    state: str
    count: int
    launch_ms: float
    pss_bytes: int
    held_bytes: int
    taken_bytes: int


def available_bytes() -> int:
    """What the kernel says that programs could still have."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/meminfo has no MemAvailable")


class Density(Bench):
    """The bench's home and snapshot, filled with sandboxes."""

    async def fill(self, most: int, keep_bytes: int) -> list[Row]:
        """A row at every power of two, at the end, and after the work."""
        selected = await self._begin()
        await self._prepare(selected.driver)
        rows: list[Row] = []
        before = available_bytes()
        task = self._progress.add_task(f"{self.name}: starting", total=most)
        async with AsyncExitStack() as ends:
            children: list[AsyncSandbox] = []
            times: list[float] = []
            while len(children) < most and available_bytes() > keep_bytes:
                started = time.perf_counter()
                child = await AsyncSandbox.create(WITH_MEMORY, home=self._home, timeout=LIFE_S)
                await ends.enter_async_context(child)
                await child.commands.run(list(TRUE))
                times.append((time.perf_counter() - started) * 1000)
                children.append(child)
                self._progress.update(task, advance=1)
                if len(children) & (len(children) - 1) == 0:
                    rows.append(await self._row("idle", children, times, before))
                    times = []
            if times:
                rows.append(await self._row("idle", children, times, before))
            for child in children:
                await child.commands.run(list(WORK), check=True)
            rows.append(await self._row("after work", children, [], before))
        return rows

    async def _row(self, state: str, children: list[AsyncSandbox], times: list[float], before: int) -> Row:
        def look() -> Row:
            found = []
            for child in children:
                directory = (self._home.sandboxes / child.sandbox_id / "machine").absolute()
                groups = gvisor_cgroup.directories(gvisor_cgroup.name_of(directory))
                found.append(memory_of(engines_in(directory), [group for group in groups if group.exists()]))
            return Row(
                state=state,
                count=len(children),
                launch_ms=statistics.median(times) if times else 0.0,
                pss_bytes=int(statistics.median(one.pss for one in found)),
                held_bytes=int(statistics.median(one.held for one in found)),
                taken_bytes=(before - available_bytes()) // len(children),
            )

        return await asyncio.to_thread(look)


def show(name: DriverName, rows: list[Row]) -> None:
    """The table for people."""
    console = Console(highlight=False, width=100)
    for key, value in host_facts().items():
        console.print(f"{key}: {value}", soft_wrap=True)
    console.print(f"driver: {name}, guest: {MACHINE.memory_mib} MiB, {MACHINE.cpus} cpu")
    table = Table(Column("state", no_wrap=True), box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("sandboxes", "launch ms", "Pss MiB", "held MiB", "host MiB each"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = [f"{size / MIB:.1f}" for size in (row.pss_bytes, row.held_bytes, row.taken_bytes)]
        table.add_row(row.state, str(row.count), f"{row.launch_ms:.0f}" if row.launch_ms else "-", *cells)
    console.print(table)
    console.print("launch: median since the row above, until a first command; Pss, held: median of all sandboxes;")
    console.print(
        "host: what the host has available less than before, by sandbox (with its page cache and node)\n"
    )


async def main(options: argparse.Namespace) -> None:
    """Measure and print."""
    found: dict[str, list[dict[str, object]]] = {}
    for name in await usable(options.driver):
        with (
            tempfile.TemporaryDirectory(prefix="aenv-bench-", dir="/var/tmp") as scratch,
            Progress(console=Console(stderr=True), transient=True) as progress,
        ):
            density = Density(name, 0, Path(scratch), progress)
            try:
                rows = await density.fill(options.most, options.keep_mib << 20)
            finally:
                await to_the_end(density.close())
        show(name, rows)
        found[name] = [asdict(row) for row in rows]
    if options.json:
        options.json.write_text(json.dumps({**host_facts(), "drivers": found}, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--driver", choices=("both", "qemu", "gvisor"), default="both")
    parser.add_argument("--most", type=int, default=64, help="sandboxes at most (default 64)")
    parser.add_argument("--keep-mib", type=int, default=4096, help="stop when less is available (default 4096)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    own_host.run_there(main(parser.parse_args()))
