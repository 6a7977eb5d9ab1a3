"""du."""

from __future__ import annotations

import click

from aenv_run.amounts import size
from aenv_run.catalog.usage import Usage, Used, usage
from aenv_run.cli.arguments import complete_snapshot, open_catalog, server
from aenv_run.cli.host import run_there
from aenv_run.cli.output import json_option, print_json, print_table, spinner

EPILOG = """\b
Examples:
  aenv du
  aenv du swe-task
  aenv du swe-task:3 swe-task:latest --json

LOGICAL is what machines see; STORED what that takes in the repository: packed, without holes, equal layers once.
Of that UNIQUE is needed by nothing else: `aenv catalog rm` and then `aenv gc` free it. SHARED is needed by other
snapshots too, such as the steps of a build. `aenv gc --dry-run` says what nothing holds at all."""


@click.command(epilog=EPILOG)
@click.argument("references", nargs=-1, metavar="[SNAPSHOT]...", shell_complete=complete_snapshot)
@json_option
def du(references: tuple[str, ...], as_json: bool) -> None:
    """Say what names, or the versions of one, take in the repository."""
    if (there := server()) is not None:  # what files take on its disk is known there
        found, _ = run_there(there, ("du",), Usage, arguments=references)
    else:
        with spinner("reading the repository"):
            found = usage(open_catalog(), references)
    if as_json:
        print_json(found)
        return
    rows = [_row(used) for used in (*found.rows, found.total)]
    print_table(["OF", "SNAPSHOTS", "LOGICAL", "STORED", "UNIQUE", "SHARED"], rows)
    orphans = size(found.orphan_bytes)
    click.echo(f"{found.blobs} blobs, {found.packed_blobs} of them packed; {orphans} belong to no snapshot")
    if found.unreadable:
        click.echo(f"{len(found.unreadable)} snapshots cannot be read; `aenv check` tells more", err=True)


def _row(used: Used) -> list[str]:
    numbers = (used.logical_bytes, used.stored_bytes, used.unique_bytes, used.shared_bytes)
    return [used.of, str(used.snapshots), *(size(number) for number in numbers)]
