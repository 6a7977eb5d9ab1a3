"""``make recipes``: every ready recipe is built from nothing, built again, launched, and its verifies run there.

``python -m tests.perf.recipes [NAME...] [--driver …]``. Resumable: what was measured stays in build/recipes.json,
and a recipe that has not changed since is not built again (``--again``: it is). Each has a home of its own, which
is removed, so that the disk holds one at a time. Exit code 1 where a recipe failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pydantic import Field, ValidationError
from rich import box
from rich.console import Console
from rich.table import Column, Table

from aenv_build.language.load import load
from aenv_build.language.verbs import Verify
from aenv_build.reports.wording import size
from aenv_run import Sandbox
from aenv_run.catalog import Catalog
from aenv_run.config import open_repository
from aenv_run.errors import AenvError, CommandFailed
from aenv_run.paths import Home
from aenv_run.types import Model
from tests.perf.own_host import end_node

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "recipes.json"
VERIFY_TIMEOUT_S = 600.0
MAX_SHOWN = 3000
#: Of the table, where the output is no terminal too.
WIDTH = 100


class Measured(Model):
    """One recipe. ``digest`` is that of its file; sizes are of the output's blobs, uncompressed."""

    recipe: str
    digest: str
    driver: str
    cold_s: float
    cached_s: float
    launch_ms: float
    disk_bytes: int
    memory_bytes: int
    verifies: int


class Kept(Model):
    """build/recipes.json."""

    recipes: dict[str, Measured] = Field(default_factory=dict)
    failed: dict[str, str] = Field(default_factory=dict)


def measure(recipe: Path, driver: str, home: Home) -> Measured:
    """Build it twice, launch it, and let its verifies hold in the sandbox too."""
    source = load(recipe)
    cold_s, result = _build(recipe, driver, home)
    cached_s, again = _build(recipe, driver, home)
    if again["misses"] != 0:
        raise CommandFailed(f"{recipe.name}: built again, {again['misses']} stages were not in the cache")
    repository = open_repository(None, home)
    name = str(source.recipe.outputs[0].name or source.recipe.name)
    snapshot = repository.snapshot(Catalog(repository).resolve(name).snapshot_id)
    verifies = [step.verify for step in source.recipe.steps if step.verify is not None]
    began = time.monotonic()
    with Sandbox.create(name, home=home) as sandbox:
        launch_ms = (time.monotonic() - began) * 1000
        for verify in verifies:
            _hold(sandbox, verify)
    return Measured(
        recipe=source.recipe.name,
        digest=source.digest,
        driver=str(result["driver"]),
        cold_s=round(cold_s, 1),
        cached_s=round(cached_s, 1),
        launch_ms=round(launch_ms),
        disk_bytes=sum(blob.size_bytes for blob in snapshot.disk),
        memory_bytes=sum(blob.size_bytes for blob in snapshot.memory.files.values()) if snapshot.memory else 0,
        verifies=len(verifies),
    )


def _build(recipe: Path, driver: str, home: Home) -> tuple[float, dict[str, object]]:
    """Seconds of the whole command, and its result."""
    argv = [sys.executable, "-m", "aenv_build.cli", str(recipe), "--home", str(home.root), "--driver", driver]
    began = time.monotonic()
    done = subprocess.run([*argv, "--json"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CommandFailed(f"{recipe.name}: exit code {done.returncode}\n{done.stderr[-MAX_SHOWN:]}")
    result: dict[str, object] = json.loads(done.stdout)
    return time.monotonic() - began, result


def _hold(sandbox: Sandbox, verify: Verify) -> None:
    words = [verify.shell, "-ec", verify.run] if isinstance(verify.run, str) else list(verify.run)
    done = sandbox.commands.run(
        words, envs=dict(verify.env), user=verify.user, cwd=verify.workdir, timeout=VERIFY_TIMEOUT_S
    )
    if done.exit_code != verify.exit_code:
        raise CommandFailed(
            f"launched, its verify exited with {done.exit_code}, not {verify.exit_code}:\n"
            f"{(done.stdout + done.stderr)[-MAX_SHOWN:]}"
        )


def read_kept() -> Kept:
    """What was measured before; nothing where the file is of another form."""
    try:
        return Kept.model_validate_json(KEPT.read_bytes())
    except (OSError, ValidationError):
        return Kept()


def write_kept(kept: Kept) -> None:
    """A run that is killed loses no more than the recipe that it was at."""
    KEPT.parent.mkdir(exist_ok=True)
    temporary = KEPT.with_suffix(".tmp")
    temporary.write_text(kept.model_dump_json(indent=2) + "\n")
    temporary.replace(KEPT)


def table(kept: Kept) -> Table:
    """For people."""
    titles = ("recipe", "driver", "cold", "cached", "launch", "disk", "memory", "verifies")
    shown = Table(*(Column(title, justify="left" if title in titles[:2] else "right") for title in titles))
    shown.box = box.SIMPLE
    for one in sorted(kept.recipes.values(), key=lambda one: one.recipe):
        shown.add_row(
            one.recipe,
            one.driver,
            f"{one.cold_s:.1f} s",
            f"{one.cached_s:.1f} s",
            f"{one.launch_ms:.0f} ms",
            size(one.disk_bytes),
            size(one.memory_bytes) if one.memory_bytes else "-",
            str(one.verifies),
        )
    return shown


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of recipes/NAME.yaml; default: all")
    parser.add_argument("--driver", default="auto")
    parser.add_argument("--again", action="store_true", help="also what has been measured as it is now")
    options = parser.parse_args()
    known = {path.stem: path for path in sorted((ROOT / "recipes").glob("*.yaml"))}
    if unknown := set(options.names) - set(known):
        parser.error(f"no such recipe: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    kept = read_kept()
    for name in options.names or known:
        before = kept.recipes.get(name)
        if before is not None and before.digest == load(known[name]).digest and not options.again:
            continue
        kept.failed.pop(name, None)
        sys.stderr.write(f"{name} …\n")
        try:
            kept.recipes[name] = _alone(known[name], options.driver)
        except AenvError as error:
            kept.recipes.pop(name, None)
            kept.failed[name] = str(error)
            sys.stderr.write(f"{name}: {error}\n")
        write_kept(kept)
    Console(width=WIDTH).print(table(kept))
    sys.stderr.write(f"{KEPT.relative_to(ROOT)} has all of it; failed: {', '.join(kept.failed) or 'none'}\n")
    return 1 if kept.failed else 0


def _alone(recipe: Path, driver: str) -> Measured:
    """In a home of its own, short enough for its sockets, of which nothing stays."""
    with tempfile.TemporaryDirectory(prefix="aenv-", dir="/var/tmp") as scratch:
        home = Home(Path(scratch) / "h")
        os.environ["AENV_HOME"] = str(home.root)
        try:
            return measure(recipe, driver, home)
        finally:
            asyncio.run(end_node(home))


if __name__ == "__main__":
    sys.exit(main())
