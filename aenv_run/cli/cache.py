"""cache show, prune."""

from __future__ import annotations

import click

from aenv_run.cache_limit import trim, usage
from aenv_run.cli.output import json_option, print_json, size
from aenv_run.config import cache_limit_bytes
from aenv_run.paths import Home


@click.group()
def cache() -> None:
    """Blobs, and memory images of booted machines, that are local to this machine. They can be had again."""


@cache.command(epilog="\b\nExample:\n  aenv cache show --json")
@json_option
def show(as_json: bool) -> None:
    """Say what the cache takes, and its bound ($AENV_CACHE_MIB).

    Blobs that a sandbox or the repository itself holds too take no space of the cache's own.
    """
    found, limit_bytes = usage(Home.default().cache), cache_limit_bytes()
    if as_json:
        print_json({**found.model_dump(), "limit_bytes": limit_bytes})
        return
    click.echo(f"blobs   {found.blobs}")
    click.echo(f"warm    {found.warm_images} images of machines that have booted")
    click.echo(f"own     {size(found.own_bytes)} of at most {size(limit_bytes)}")
    click.echo(f"shared  {size(found.shared_bytes)}")


@cache.command(epilog="\b\nExamples:\n  aenv cache prune\n  aenv cache prune --all")
@click.option("--all", "everything", is_flag=True, help="All that nothing else holds, however small the cache is.")
@json_option
def prune(everything: bool, as_json: bool) -> None:
    """Remove the least recently used blobs now. What a sandbox uses, or asked for just now, stays."""
    done = trim(Home.default().cache, 0 if everything else cache_limit_bytes())
    if as_json:
        print_json(done)
        return
    click.echo(f"removed {done.removed}, {size(done.freed_bytes)}; {size(done.left.own_bytes)} left")
