"""``python -m tests.perf.cached_build``: how long a recipe of 50 steps takes of which all is cached.

The whole command is measured, a process of its own: imports, recipe, driver, keys, look-ups, publishing. The cache
is filled on a pretended engine, so that it takes a second and any machine can measure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from aenv_build.commands.cells import build_cells, require_all
from aenv_build.commands.prepare import prepare
from aenv_build.language.load import load_cells
from aenv_build.planning.lent import Lent
from tests.perf.bench import busy_share
from tests.unit.node_site import make_site
from tests.unit.pretend_build import workshop

STEPS = 50


def recipe(steps: int) -> str:
    """Every third step a copy, every tenth a verify: as recipes are."""
    lines = ["version: 1", "name: cached", "base: {snapshot: tiny}", "vars: {word: x}", "steps:"]
    for number in range(steps):
        if number % 10 == 9:
            lines.append(f"  - {{id: s{number}, verify: 'check {number} {{{{ vars.word }}}}'}}")
        elif number % 3 == 2:
            lines.append(f"  - {{id: s{number}, copy: {{from: files/f{number}, to: /srv/}}}}")
        else:
            lines.append(f"  - {{id: s{number}, run: 'make {number} {{{{ vars.word }}}}'}}")
    return "\n".join(lines) + "\n"


async def fill(folder: Path, steps: int) -> Path:
    """A home whose repository has all of the recipe's results, and the recipe."""
    site = make_site(folder / "home", folder / "seed")
    path = folder / "recipe.yaml"
    path.write_text(recipe(steps))
    (folder / "files").mkdir()
    for number in range(steps):
        (folder / "files" / f"f{number}").write_bytes(os.urandom(64 * 1024))
    _, plans = await prepare(load_cells(path), "auto", site.home, site.tools.repository, Lent())
    require_all(await build_cells(plans, replace(workshop(site), parallel=1)))
    return path


def processor_s() -> float:
    """What ended children have used so far: on a busy host the only figure that can be compared."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--imports", action="store_true", help="also the time of the slowest imports")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aenv-") as scratch:
        folder = Path(scratch)
        path = asyncio.run(fill(folder, options.steps))
        words = [sys.executable, "-m", "aenv_build.cli", str(path), "--home", str(folder / "home"), "--json"]
        print(f"busy before: {asyncio.run(busy_share()):.0%}")
        spent_s, worked_s = [], []
        for _ in range(options.rounds):
            began, before = time.monotonic(), processor_s()
            done = subprocess.run(words, capture_output=True, check=True, text=True)
            spent_s.append(time.monotonic() - began)
            worked_s.append(processor_s() - before)
            assert json.loads(done.stdout)["misses"] == 0, done.stdout
        print(f"{options.steps} steps, all cached, {options.rounds} rounds, seconds:")
        for name, values in (("waited", spent_s), ("processor", worked_s)):
            middle = statistics.median(values)
            print(f"  {name:10} first {values[0]:.2f}  median {middle:.2f}  best {min(values):.2f}")
        if options.imports:
            _imports(words)


def _imports(words: list[str]) -> None:
    timed = subprocess.run([words[0], "-X", "importtime", *words[1:]], capture_output=True, text=True)
    rows = [line.split("|") for line in timed.stderr.splitlines() if line.startswith("import time:")]
    known = [(int(row[1]), row[2].rstrip()) for row in rows if row[1].strip().isdigit()]
    for spent_us, name in sorted(known, reverse=True)[:40]:
        print(f"  {spent_us / 1000:7.1f} ms {name}")


if __name__ == "__main__":
    main()
