"""node status, node stop."""

from __future__ import annotations

import click

from aenv_run.cli.arguments import node_client
from aenv_run.cli.output import json_option, print_json
from aenv_run.cli.signals import run_async
from aenv_run.node_wire import Health


@click.group()
def node() -> None:
    """The process that keeps sandboxes and their times to live. It starts and ends by itself."""


@node.command(epilog="\b\nExample:\n  aenv node status --json")
@json_option
def status(as_json: bool) -> int:
    """Say whether it runs (exit code 0) or not (3), and which driver it uses. Starts nothing."""

    async def ask() -> tuple[Health | None, str]:
        client = node_client()
        health = await client.health()
        return health, (await client.driver()).why if health is not None and health.ready else ""

    health, why = run_async(ask())
    if as_json:
        print_json({"running": health is not None, "driver": why, **(health.model_dump() if health else {})})
    elif health is None:
        click.echo("not running (it starts when it is needed)")
    else:
        click.echo(
            f"running as process {health.pid}: {health.live} live, {health.paused} paused, {health.dead} dead"
        )
        click.echo(f"home    {health.home}")
        click.echo(f"driver  {why or 'being chosen'}")
    return 0 if health is not None else 3


@node.command(epilog="\b\nExamples:\n  aenv node stop\n  aenv node stop --kill")
@click.option("--kill", is_flag=True, help="Kill every live sandbox first. Paused ones stay.")
def stop(kill: bool) -> None:
    """End it. Sandboxes run on (unless --kill) and the next command takes them over."""
    stopped = run_async(node_client().shutdown(kill=kill))
    click.echo("stopped" if stopped else "it was not running", err=True)
