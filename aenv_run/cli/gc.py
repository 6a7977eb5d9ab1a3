"""gc."""

from __future__ import annotations

import click

from aenv_run.amounts import duration, size
from aenv_run.cli.arguments import parse_age, server
from aenv_run.cli.host import flags, run_there
from aenv_run.cli.output import json_option, print_json, print_table, spinner
from aenv_run.config import open_repository
from aenv_run.garbage.collect import Collected, Rules, collect
from aenv_run.garbage.holders import Dropped, Holding
from aenv_run.garbage.holders import drop_holder as forget_holder
from aenv_run.paths import Home
from aenv_run.printable import printable
from aenv_run.used_snapshots import used_snapshots

EPILOG = """\b
Examples:
  aenv gc --dry-run
  aenv gc
  aenv gc --build-cache-older-than 30d
  aenv gc --drop-holder 3f2a

What names, the build cache, running builds, sandboxes and pools of any machine hold stays, and what is younger
than the grace period. It may run beside builds and launches. Ctrl-C ends it between two deletions."""


@click.command(epilog=EPILOG)
@click.option("--dry-run", is_flag=True, help="Say what would go and who holds the rest; change nothing.")
@click.option(
    "--grace", default="24h", show_default=True, metavar="AGE", help="What is younger stays, such as 2h or 0s."
)
@click.option(
    "--build-cache-older-than",
    metavar="AGE",
    help="Also forget results of build steps that were of no use for so long, such as 30d.",
)
@click.option(
    "--quarantine-older-than", metavar="AGE", help="Also delete what `aenv check --repair` put away before that."
)
@click.option(
    "--drop-holder", metavar="ID", help="Only forget what a node or a build held that will never come back."
)
@click.option(
    "--force", is_flag=True, help="With --drop-holder: also one that runs, or was renewed within 15 minutes."
)
@click.option("--allow-no-refs", is_flag=True, help="Collect also where the repository shows no name at all.")
@json_option
def gc(
    dry_run: bool,
    grace: str,
    build_cache_older_than: str | None,
    quarantine_older_than: str | None,
    drop_holder: str | None,
    force: bool,
    allow_no_refs: bool,
    as_json: bool,
) -> None:
    """Delete snapshots and blobs that nothing needs."""
    there = server()
    if drop_holder is not None:
        given = flags(drop_holder=drop_holder, force=force, dry_run=dry_run)
        dropped = run_there(there, ("gc",), Dropped, given)[0] if there else _drop(drop_holder, force, dry_run)
        if as_json:
            print_json(dropped)
        else:
            verb = "would drop" if dry_run else "dropped"
            click.echo(f"{verb} {dropped.id[:8]}: {printable(dropped.who)}; the next gc frees what only that held")
        return
    rules = Rules(
        grace_s=parse_age(grace),
        records_older_s=parse_age(build_cache_older_than) if build_cache_older_than else None,
        quarantine_older_s=parse_age(quarantine_older_than) if quarantine_older_than else None,
        require_refs=not allow_no_refs,
        dry_run=dry_run,
    )
    if there is not None:
        given = flags(
            dry_run=dry_run,
            grace=grace,
            build_cache_older_than=build_cache_older_than,
            quarantine_older_than=quarantine_older_than,
            allow_no_refs=allow_no_refs,
        )
        done, _ = run_there(there, ("gc",), Collected, given)
    else:
        done = _collect(rules)
    if as_json:
        print_json(done)
    else:
        _say(done)


def _drop(id: str, force: bool, dry_run: bool) -> Dropped:
    return forget_holder(open_repository(None, Home.default()), id, force=force, dry_run=dry_run)


def _collect(rules: Rules) -> Collected:
    home = Home.default()
    repository = open_repository(None, home)
    so_far: list[Collected] = []
    try:
        with spinner("collecting garbage"):
            return collect(
                repository,
                rules,
                lambda: used_snapshots(home),
                tell=lambda line: click.echo(line, err=True),
                partly=so_far.append,
            )
    except KeyboardInterrupt:
        if so_far:
            _say(so_far[-1])
        raise


def _say(done: Collected) -> None:
    verb = "would free" if done.dry_run else "freed"
    parts = [f"{done.snapshots} snapshots", f"{done.blobs} blobs"]
    parts += [f"{done.records} records of the build cache"] if done.records else []
    parts += [f"{done.temporaries} unfinished writes"] if done.temporaries else []
    parts += [f"{done.quarantined} objects in quarantine"] if done.quarantined else []
    parts += [f"{done.leases} leases of builds that ended"] if done.leases else []
    click.echo(f"{verb} {size(done.freed_bytes)}: {', '.join(parts)}")
    if done.remembered:
        click.echo(f"of {done.remembered} of the snapshots the manifest stays: others grew from them")
    click.echo(f"{done.referenced} snapshots have a name or are in the build cache")
    if done.kept:
        click.echo("kept without a name:")
        print_table(["SNAPSHOT", "HELD BY"], [[one.snapshot_id.short, _who(one.held_by)] for one in done.kept])
    if done.holders:
        click.echo("holders:")
        print_table(["ID", "SNAPSHOTS", "RENEWED", "WHO"], [_row(one) for one in done.holders])


def _who(users: tuple[str, ...]) -> str:
    shown = ", ".join(users[:3])
    return f"{shown} and {len(users) - 3} more" if len(users) > 3 else shown


def _row(one: Holding) -> list[str]:
    return [one.id[:8], str(one.snapshots), f"{duration(one.renewed_s_ago)} ago", one.who]
