"""pack."""

from __future__ import annotations

import click

from aenv_run.amounts import size
from aenv_run.cli.arguments import parse_age, server
from aenv_run.cli.host import flags, run_there
from aenv_run.cli.output import ProgressLine, json_option, print_json
from aenv_run.config import DEFAULT_PACK_AFTER_H, open_repository, pack_after_s
from aenv_run.errors import CorruptData
from aenv_run.packing import Packer, Packing
from aenv_run.paths import Home

EPILOG = """\b
Examples:
  aenv pack
  aenv pack --older-than 7d --dry-run
  aenv pack --older-than 0s --json

The node does the same by itself at idle priority, of what was not used for $AENV_PACK_AFTER_H hours (48; `off`: it
does not). What a sandbox uses, or the cache of another home, stays as it is. May be interrupted at any time."""


@click.command(epilog=EPILOG)
@click.option("--older-than", metavar="AGE", help="Only what has not been used for so long, such as 12h. [48h]")
@click.option("--dry-run", is_flag=True, help="Say what would be packed; change nothing.")
@json_option
def pack(older_than: str | None, dry_run: bool, as_json: bool) -> int:
    """Compress what has not been used for a while. It is used as before, after a moment of unpacking."""
    if (there := server()) is not None:
        done, code = run_there(there, ("pack",), Packing, flags(older_than=older_than, dry_run=dry_run))
    else:
        done = _pack(older_than, dry_run)
        code = CorruptData.exit_code if done.damaged else 0
    if as_json:
        print_json(done)
        return code
    if dry_run:
        click.echo(f"would pack {done.packed} blobs of {size(done.raw_bytes)}")
    else:
        click.echo(f"packed {done.packed} blobs, {size(done.raw_bytes)} into {size(done.packed_bytes)}")
    if done.used or done.unpackable:
        click.echo(f"left {done.used} that are used, {done.unpackable} that do not shrink")
    for digest in done.damaged:
        click.echo(f"damaged: {digest}; `aenv check --deep` says more", err=True)
    return code


def _pack(older_than: str | None, dry_run: bool) -> Packing:
    home = Home.default()
    older_than_s = parse_age(older_than) if older_than is not None else pack_after_s()
    if older_than_s is None:
        older_than_s = DEFAULT_PACK_AFTER_H * 3600.0
    packer = Packer(open_repository(None, home), home.cache, home.staging, older_than_s=older_than_s)
    with ProgressLine("packing") as told:
        return packer.pack(dry_run=dry_run, told=told)
