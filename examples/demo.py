#!/usr/bin/env python3
"""The main job, end to end: a recipe becomes a snapshot, the snapshot a sandbox, the sandbox four attempts.

    make demo        (or, once set up: .venv/bin/python examples/demo.py)

1. `aenv-build recipes/swe-task.yaml` builds and commits a snapshot: a repository with a bug, and its tests.
2. A sandbox is launched from it by snapshot id and forked into one child per candidate patch. Each child applies
   its patch, runs the tests and prints a reward. No child sees another's files.
3. The first sandbox is paused and resumed: memory and disk come back. The catalog shows where it all came from.

The second run takes seconds: every build step is a cache hit.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from aenv_run import Sandbox
from aenv_run.errors import AenvError, Interrupted

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "recipes/swe-task.yaml"
PATCHES = sorted((ROOT / "examples" / "swe-task" / "patches").glob("*.patch"))
#: Counts in memory only: /dev/shm is no disk.
COUNTER = "n=0; while :; do n=$((n+1)); echo $n >/dev/shm/count; sleep 0.2; done"

console = Console(highlight=False)
timings: list[tuple[str, float]] = []


@dataclass(frozen=True)
class Attempt:
    """What one child made of its patch."""

    child: str
    patch: str
    exit_code: int
    reward: float
    milliseconds: float
    files: list[str]


def main() -> int:
    """Run the job; the exit code says whether it did what it promises."""
    title("Which driver")
    aenv("doctor")

    title(f"Build: {RECIPE} -> a committed snapshot")
    with timed("build (cached steps take no time)"):
        command("aenv-build", RECIPE)
    snapshot = json.loads(aenv("catalog", "show", "swe-task", "--json", quiet=True))
    snapshot_id, name = snapshot["snapshot_id"], snapshot["names"][-1]
    say(f"{name} is snapshot {snapshot_id}")

    title(f"Launch {name} by its snapshot id")
    with timed("launch, to the first command's answer"):
        sandbox = Sandbox.create(snapshot_id, timeout=900)
        result = sandbox.commands.run("git log --oneline | head -3", cwd="/srv/repo", check=True)
    with sandbox:  # kills it at the end, whatever happens
        say(f"sandbox {sandbox.sandbox_id}: the repository's last commits\n{result.stdout.rstrip()}")
        counter = sandbox.commands.run(COUNTER, background=True, timeout=None)
        good = fork_and_score(sandbox)
        good &= pause_and_resume(sandbox, counter.pid)

    title("Catalog")
    aenv("catalog", "ls")
    aenv("catalog", "show", name)

    title("Summary")
    ours = sandbox.sandbox_id
    left = [info.sandbox_id for info in Sandbox.list() if ours in (info.sandbox_id, info.parent)]
    say("every sandbox of this run is removed" if not left else f"still there: {', '.join(left)}")
    summary = Table(box=None, pad_edge=False)
    summary.add_column("step")
    summary.add_column("ms", justify="right")
    for step, milliseconds in timings:
        summary.add_row(step, f"{milliseconds:.0f}")
    console.print(summary)
    return 0 if good and not left else 1


def fork_and_score(sandbox: Sandbox) -> bool:
    """Fork the running sandbox into one child per patch; each tries its own."""
    title(f"Fork the running sandbox into {len(PATCHES)} children, one candidate patch each")
    with ExitStack() as children:
        with timed(f"fork into {len(PATCHES)}, all children answering"):
            forked = sandbox.fork(len(PATCHES), timeout=600)
        for child in forked:
            if isinstance(child, AenvError):
                raise child
            children.enter_context(child)
        with timed("all attempts"), ThreadPoolExecutor(len(PATCHES)) as pool:
            jobs = [pool.submit(attempt, c, p) for c, p in zip(forked, PATCHES, strict=True)]
            attempts = [job.result() for job in jobs]

    table = Table(box=None, pad_edge=False)
    for column in ("child", "patch", "exit code", "reward", "ms"):
        table.add_column(column)
    for one in attempts:
        row = (one.child, one.patch, str(one.exit_code), f"{one.reward:.2f}", f"{one.milliseconds:.0f}")
        table.add_row(*row)
    console.print(table)

    alone = all(one.files == [f"{one.patch}.attempt"] for one in attempts)
    untouched = sandbox.commands.run("ls /srv/attempts 2>/dev/null | wc -l").stdout.strip() == "0"
    say("each child saw its own file only, the parent none" if alone and untouched else "FILES WERE SHARED")
    return alone and untouched and max(one.reward for one in attempts) == 1.0


def attempt(child: Sandbox | AenvError, patch: Path) -> Attempt:
    """Apply the patch, run the tests, read the reward. An exit code is a result; a dead sandbox would raise."""
    assert isinstance(child, Sandbox)
    began = time.perf_counter()
    child.files.write("/tmp/candidate.patch", patch)
    child.files.write(f"/srv/attempts/{patch.stem}.attempt", patch.name)
    child.commands.run("git apply /tmp/candidate.patch", cwd="/srv/repo", check=True)
    scored = child.commands.run("python3 /srv/task/score.py", timeout=300)
    if not scored.stdout.startswith("{"):
        raise AenvError(f"score.py printed no reward for {patch.name}: {scored.stderr[-500:]}")
    return Attempt(
        child=child.sandbox_id,
        patch=patch.stem,
        exit_code=scored.exit_code,
        reward=json.loads(scored.stdout)["reward"],
        milliseconds=(time.perf_counter() - began) * 1000,
        files=[entry.name for entry in child.files.list("/srv/attempts")],
    )


def pause_and_resume(sandbox: Sandbox, pid: int) -> bool:
    """What was in memory and on disk is there again, and the process that counted goes on counting."""
    title("Pause and resume")
    sandbox.files.write("/srv/on-disk", "written before the pause")
    before = int(sandbox.files.read("/dev/shm/count"))
    with timed("pause"):
        sandbox.pause()
    say(f"paused at count {before}; state: {sandbox.get_info().state}; no process of it is left")
    with timed("resume"):
        sandbox.resume(timeout=900)
    time.sleep(1)
    after = int(sandbox.files.read("/dev/shm/count"))
    alive = pid in [process.pid for process in sandbox.commands.list()]
    on_disk = sandbox.files.read("/srv/on-disk")
    say(f"resumed: process {pid} {'goes on' if alive else 'IS GONE'}, count {after}; on disk: {on_disk!r}")
    return alive and after > before and on_disk == "written before the pause"


# -- telling what happens ------------------------------------------------------------------------------------


def title(text: str) -> None:
    """A heading."""
    console.print(f"\n[bold]== {text}[/bold]")


def say(text: str) -> None:
    """A line."""
    console.print(text, markup=False, soft_wrap=True)


@contextmanager
def timed(step: str) -> Iterator[None]:
    """Note how long it takes for the summary."""
    began = time.perf_counter()
    yield
    timings.append((step, (time.perf_counter() - began) * 1000))


def command(program: str, *arguments: str, quiet: bool = False) -> str:
    """Run one of our commands as a user would; its output is shown as it comes, or returned if ``quiet``."""
    if not quiet:
        console.print(f"[dim]$ {program} {' '.join(arguments)}[/dim]")
    argv = [str(Path(sys.executable).with_name(program)), *arguments]
    sys.stdout.flush()
    done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE if quiet else None, text=True, check=False)
    if done.returncode == 130:
        raise Interrupted("interrupted")
    if done.returncode != 0:
        raise AenvError(f"`{program} {' '.join(arguments)}` failed with exit code {done.returncode}, see above")
    return done.stdout or ""


def aenv(*arguments: str, quiet: bool = False) -> str:
    """``command`` for aenv."""
    return command("aenv", *arguments, quiet=quiet)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AenvError as error:
        say(f"error: {error.message}")
        if error.fix:
            say(f"  fix: {error.fix}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        say("interrupted: what this run had started is removed")
        sys.exit(130)
