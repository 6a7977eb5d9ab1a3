"""catalog retain."""

from __future__ import annotations

import click

from aenv_run.catalog.retention import Rules, decide, retain
from aenv_run.cli.arguments import complete_name, open_catalog, parse_age, server
from aenv_run.cli.output import json_option, print_json, print_table
from aenv_run.garbage.leases import held_snapshots
from aenv_run.paths import Home
from aenv_run.types import Name
from aenv_run.used_snapshots import used_snapshots


@click.command(
    "retain",
    epilog="\b\nExamples:\n  aenv catalog retain swe-task --keep 5 --dry-run\n"
    "  aenv catalog retain swe-task --keep 5 --older-than 30d\n"
    "  aenv catalog retain swe-task --older-than 90d --also-tagged --json",
)
@click.argument("name", shell_complete=complete_name)
@click.option("--keep", type=click.IntRange(0), metavar="N", help="The newest N always stay.")
@click.option(
    "--older-than", metavar="AGE", help="Only those go that were published longer ago, such as 12h or 30d."
)
@click.option(
    "--keep-tagged/--also-tagged", default=True, show_default=True, help="Whether versions with a tag stay."
)
@click.option("--dry-run", is_flag=True, help="Say what would go and what stays, and why; change nothing.")
@json_option
def retain_versions(
    name: str, keep: int | None, older_than: str | None, keep_tagged: bool, dry_run: bool, as_json: bool
) -> None:
    """Remove old versions of a name by rules.

    What living or paused sandboxes, pools and running builds use stays, of any home on the same repository, and
    what another version grew from. Bytes are freed by `aenv gc`.
    """
    names = open_catalog()
    rules = Rules(newest=keep, older_than_s=parse_age(older_than) if older_than else None, keep_tagged=keep_tagged)
    # A server's own sandboxes are among those that the repository says are held.
    ours = used_snapshots(Home.default()) if server() is None else {}
    used = {**held_snapshots(names.repository), **ours}
    decisions = (decide if dry_run else retain)(names, Name(name), rules, used)
    if as_json:
        print_json({"dry_run": dry_run, "versions": [one.model_dump(mode="json") for one in decisions]})
        return
    goes = "would go" if dry_run else "removed"
    rows = [
        [f"{one.name}:{one.version}", goes if one.kept_because is None else "stays", one.kept_because or ""]
        for one in decisions
    ]
    print_table(["SNAPSHOT", "", "WHY"], rows)
