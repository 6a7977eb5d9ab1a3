"""snapshot create."""

from __future__ import annotations

import click

from aenv_run.catalog import require_publishable
from aenv_run.cli.arguments import node_client, pairs, sandbox_argument
from aenv_run.cli.output import json_option, print_json, spinner
from aenv_run.cli.signals import run_async
from aenv_run.hooks import Hook
from aenv_run.node_wire import SnapshotRequest
from aenv_run.types import Name, Tag


@click.group()
def snapshot() -> None:
    """Commit a sandbox's state as a snapshot."""


@snapshot.command(
    epilog="\b\nExamples:\n  aenv snapshot create s4f\n  aenv snapshot create s4f --name my-env --tag latest"
)
@sandbox_argument
@click.option("--name", help="Publish it as the next version of this name.")
@click.option("--tag", "tags", multiple=True, help="Move this tag to it (needs --name).")
@click.option("--disk-only", is_flag=True, help="Without memory: it can only be booted.")
@click.option("--label", "labels", multiple=True, metavar="NAME=VALUE", help="Kept in the snapshot.")
@click.option(
    "--on-restore", multiple=True, metavar="COMMAND", help="Run in every guest restored from it. May be repeated."
)
@click.option("--on-fork", multiple=True, metavar="COMMAND", help="Run in every child of a fork of those.")
@click.option("--on-pause", multiple=True, metavar="COMMAND", help="Run in those before a pause or a snapshot.")
@click.option("--no-hooks", is_flag=True, help="Do not run the sandbox's own on_pause now.")
@json_option
def create(
    sandbox_id: str,
    name: str | None,
    tags: tuple[str, ...],
    disk_only: bool,
    labels: tuple[str, ...],
    on_restore: tuple[str, ...],
    on_fork: tuple[str, ...],
    on_pause: tuple[str, ...],
    no_hooks: bool,
    as_json: bool,
) -> None:
    """Commit the state of a running sandbox, which runs on. Prints name:version, or the snapshot's id.

    The hooks that the sandbox came with go along; --on-restore, --on-fork and --on-pause replace those of
    their kind.
    """
    request = SnapshotRequest(
        name=Name(name) if name is not None else None,
        tags=tuple(Tag(tag) for tag in tags),
        memory=not disk_only,
        labels=pairs(labels, "--label"),
        on_restore=tuple(map(Hook.of, on_restore)) or None,
        on_fork=tuple(map(Hook.of, on_fork)) or None,
        on_pause=tuple(map(Hook.of, on_pause)) or None,
        hooks=not no_hooks,
    )
    if request.name is not None:
        require_publishable(request.name)
    with spinner("committing"):
        reply = run_async(node_client().snapshot(sandbox_id, request))
    if as_json:
        print_json(reply)
        return
    click.echo(f"{reply.name}:{reply.version}" if reply.name else reply.snapshot_id)
    click.echo(f"snapshot {reply.snapshot_id}; the sandbox stood still for {reply.stopped_ms:.0f} ms", err=True)
