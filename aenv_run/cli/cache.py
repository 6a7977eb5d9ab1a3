"""cache show, prefetch, prune."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from aenv_run.amounts import size
from aenv_run.blocks.budget import Counters, read_counters
from aenv_run.cache import BlobCache
from aenv_run.cache_limit import CacheUsage, Trimmed, trim, usage
from aenv_run.cli.arguments import open_catalog, server
from aenv_run.cli.host import flags, run_there
from aenv_run.cli.output import json_option, print_json, spinner
from aenv_run.config import cache_limit_bytes
from aenv_run.paths import Home
from aenv_run.types import Model

#: Blobs that are fetched at a time.
AT_ONCE = 4


class Shown(CacheUsage):
    """What `aenv cache show` prints."""

    limit_bytes: int
    on_demand: Counters


class Prefetched(Model):
    """What `aenv cache prefetch` prints."""

    blobs: int
    fetched: int
    fetched_bytes: int


@click.group()
def cache() -> None:
    """Blobs, and memory images of booted machines, that are local to this machine. They can be had again."""


@cache.command(epilog="\b\nExample:\n  aenv cache show --json")
@json_option
def show(as_json: bool) -> None:
    """Say what the cache takes, and its bound ($AENV_CACHE_MIB).

    Blobs that a sandbox or the repository itself holds too take no space of the cache's own. Partial ones are
    layers that are read on demand; hits and misses count their chunks.
    """
    there = server()
    found = run_there(there, ("cache", "show"), Shown)[0] if there else _look(Home.default().cache)
    if as_json:
        print_json(found)
        return
    counters = found.on_demand
    click.echo(f"blobs      {found.blobs}")
    click.echo(f"partial    {found.partial_blobs}, {size(found.partial_bytes)}")
    click.echo(f"warm       {found.warm_images} images of machines that have booted")
    click.echo(f"own        {size(found.own_bytes)} of at most {size(found.limit_bytes)}")
    click.echo(f"shared     {size(found.shared_bytes)}")
    click.echo(
        f"on demand  {counters.hits} hits, {counters.misses} misses, "
        f"{counters.shared} joined a fetch under way, "
        f"{counters.read_ahead} read ahead; {size(counters.fetched_bytes)} in {counters.fetches} fetches, "
        f"{size(counters.dropped_bytes)} dropped, {counters.failures} failed"
    )


def _look(root: Path) -> Shown:
    return Shown(**usage(root).model_dump(), limit_bytes=cache_limit_bytes(), on_demand=read_counters(root))


@cache.command(epilog="\b\nExample:\n  aenv cache prefetch swe-task:3")
@click.argument("reference")
@json_option
def prefetch(reference: str, as_json: bool) -> None:
    """Fetch all of a snapshot ahead, so that its launches open files and read nothing over a network."""
    there = server()
    if there is not None:
        done, _ = run_there(there, ("cache", "prefetch"), Prefetched, arguments=(reference,))
    else:
        done = _prefetch(reference)
    if as_json:
        print_json(done)
        return
    click.echo(f"{done.blobs} blobs, {done.fetched} of them fetched now ({size(done.fetched_bytes)})")


def _prefetch(reference: str) -> Prefetched:
    names, home = open_catalog(), Home.default()
    snapshot = names.repository.snapshot(names.resolve(reference).snapshot_id)
    blobs = list(dict.fromkeys(snapshot.blobs()))
    local = BlobCache(home.cache, names.repository)
    missing = [blob for blob in blobs if not local.holds(blob)]
    with spinner(f"fetching {len(missing)} blobs"), ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in pool.map(local.path, missing):
            pass
    fetched_bytes = sum(blob.size_bytes for blob in missing)
    return Prefetched(blobs=len(blobs), fetched=len(missing), fetched_bytes=fetched_bytes)


@cache.command(epilog="\b\nExamples:\n  aenv cache prune\n  aenv cache prune --all")
@click.option("--all", "everything", is_flag=True, help="All that nothing else holds, however small the cache is.")
@json_option
def prune(everything: bool, as_json: bool) -> None:
    """Remove the least recently used blobs now. What a sandbox uses, or asked for just now, stays."""
    there = server()
    if there is not None:
        done, _ = run_there(there, ("cache", "prune"), Trimmed, flags(all=everything))
    else:
        done = trim(Home.default().cache, 0 if everything else cache_limit_bytes())
    if as_json:
        print_json(done)
        return
    click.echo(f"removed {done.removed}, {size(done.freed_bytes)}; {size(done.left.own_bytes)} left")
