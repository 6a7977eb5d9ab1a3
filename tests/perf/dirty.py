"""What it costs to save memory that was written: a snapshot of a running sandbox, a pause, a resume."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field

from aenv_run.sdk_async import AsyncSandbox
from tests.perf.report import Row
from tests.perf.steps import LIFE_S, Steps
from tests.perf.twin import TRUE

SIZES_MB = (10, 50, 200)
NAME = "dirty memory"


def writing(mb: int) -> tuple[str, ...]:
    """A command that leaves so much in the guest's memory, no page of it zero."""
    script = (
        "dd if=/dev/urandom of=/dev/shm/seed bs=1M count=1 2>/dev/null; "
        f"i=0; while [ $i -lt {mb} ]; do cat /dev/shm/seed; i=$((i+1)); done >/dev/shm/dirt"
    )
    return ("/bin/sh", "-c", script)


@dataclass
class Times:
    """Milliseconds of one size, ours or bare."""

    stopped: list[float] = field(default_factory=list)
    committed: list[float] = field(default_factory=list)
    paused: list[float] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)


async def measure(steps: Steps) -> None:
    """Rows for each size; a fresh sandbox and a fresh machine by hand each time, the first not counted."""
    rounds = max(3, steps.rounds // 3)
    for mb in SIZES_MB:
        ours, bare = Times(), Times()
        for number in range(rounds + 1):
            mine, theirs = (ours, bare) if number else (Times(), Times())
            async with await steps.start() as sandbox:
                await _ours(sandbox, mb, mine)
            await steps.by_hand(functools.partial(_bare, steps, mb, theirs))
        steps.rows += [
            Row(f"snapshot, {mb} MB: stop", ours.stopped, bare.stopped, "b"),
            Row(f"snapshot, {mb} MB: done", ours.committed, bare.stopped, "g"),
            Row(f"pause, {mb} MB", ours.paused, bare.paused, "a"),
            Row(f"resume, {mb} MB", ours.resumed, bare.resumed, "h"),
        ]


async def _ours(sandbox: AsyncSandbox, mb: int, times: Times) -> None:
    await sandbox.commands.run(list(writing(mb)), check=True, timeout=300)
    start = time.perf_counter()
    reply = await sandbox.snapshot()
    times.committed.append((time.perf_counter() - start) * 1000)
    times.stopped.append(reply.stopped_ms)
    start = time.perf_counter()
    await sandbox.pause()
    times.paused.append((time.perf_counter() - start) * 1000)
    start = time.perf_counter()
    await sandbox.resume(timeout=LIFE_S)
    await sandbox.commands.run(list(TRUE))
    times.resumed.append((time.perf_counter() - start) * 1000)


def _bare(steps: Steps, mb: int, times: Times) -> None:
    steps.twin.make_ready(1)
    machine, resumed = steps.start_bare(steps.twin.restore)
    machine.run(writing(mb))
    times.stopped.append(steps.twin.save(machine))
    times.paused.append(steps.twin.pause(machine))
    times.resumed.append(resumed)
    machine.tidy()
