"""pool ls, set, rm."""

from __future__ import annotations

import click

from aenv_run.cli.arguments import complete_snapshot, node_client, require_signature_option
from aenv_run.cli.output import json_option, print_json, print_table
from aenv_run.cli.signals import run_async
from aenv_run.node_wire import MAX_POOL, PoolRequest
from aenv_run.printable import printable

count = click.IntRange(1, MAX_POOL)


@click.group()
def pool() -> None:
    """Machines that stand ready of a snapshot, so that `aenv start` and `reset` only give one its identity.

    Each takes the memory of a machine that has just been restored, and with the gvisor driver about 5 % of a
    core. A node with a pool does not end by itself.
    """


@pool.command("ls", epilog="\b\nExample:\n  aenv pool ls --json")
@json_option
def list_pools(as_json: bool) -> None:
    """Show each pool: how many stand ready, and how many launches found one (TAKEN) or none (MISSED)."""
    pools = run_async(node_client().pools())
    if as_json:
        print_json(pools)
        return
    rows = [
        [one.reference, f"{one.ready}", f"{one.low}", f"{one.high}", f"{one.taken}", f"{one.missed}", one.problem]
        for one in pools
    ]
    empty = "no pools (`aenv pool set SNAPSHOT --high 4` makes one)"
    columns = ["SNAPSHOT", "READY", "LOW", "HIGH", "TAKEN", "MISSED", "PROBLEM"]
    print_table(columns, [[printable(cell) for cell in row] for row in rows], empty=empty)


@pool.command(
    "set", epilog="\b\nExamples:\n  aenv pool set swe-task:1 --high 4\n  aenv pool set my-env --low 2 --high 8"
)
@click.argument("snapshot", shell_complete=complete_snapshot)
@click.option("--low", type=count, help="Filled up when there are fewer. Default: as --high.")
@click.option(
    "--high", type=click.IntRange(1, MAX_POOL), default=1, show_default=True, help="Filled up to so many."
)
@require_signature_option
@json_option
def set_pool(snapshot: str, low: int | None, high: int, as_json: bool) -> None:
    """Keep machines of SNAPSHOT ready, from now on; also after a restart of the node.

    The pool is of the snapshot that the name means now: set it again when the name moves.
    """
    request = PoolRequest(snapshot=snapshot, low=high if low is None else low, high=high)
    info = run_async(node_client().set_pool(request))
    if as_json:
        print_json(info)
    else:
        click.echo(f"{printable(info.reference)}: {info.ready} ready, filling up to {info.high}", err=True)


@pool.command("rm", epilog="\b\nExample:\n  aenv pool rm swe-task:1")
@click.argument("snapshot", shell_complete=complete_snapshot)
def remove(snapshot: str) -> None:
    """End a pool and the machines that stand ready in it. Sandboxes that came from it run on."""
    run_async(node_client().remove_pool(snapshot))
