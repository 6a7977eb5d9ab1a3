"""catalog diff."""

from __future__ import annotations

import click

from aenv_run.amounts import size
from aenv_run.cache import BlobCache
from aenv_run.cache_limit import trim
from aenv_run.cli.arguments import complete_reference, open_catalog
from aenv_run.cli.output import json_option, print_json, print_table, spinner
from aenv_run.cli.signals import run_async
from aenv_run.config import cache_limit_bytes
from aenv_run.paths import Home
from aenv_run.printable import printable
from aenv_run.scratch import scratch
from aenv_run.snapshot_diff import Difference, FileChange, compare


@click.command(
    "diff",
    epilog="\b\nExamples:\n  aenv catalog diff swe-task:2 swe-task:3\n"
    "  aenv catalog diff swe-task:stable swe-task:latest --json\n"
    "  aenv catalog diff swe-task:2 python-dev --no-files",
)
@click.argument("before", metavar="A", shell_complete=complete_reference)
@click.argument("after", metavar="B", shell_complete=complete_reference)
@click.option("--no-files", is_flag=True, help="Compare what the manifests say only; no disk is read.")
@click.option(
    "--limit", type=click.IntRange(1, 100_000), default=200, show_default=True, help="Files shown of each kind."
)
@json_option
def diff(before: str, after: str, no_files: bool, limit: int, as_json: bool) -> None:
    """Say what differs from snapshot A to snapshot B: machine, environment, labels, packages, files.

    The disks are read without a machine and without a mount. Of a file its kind, mode, owner and content count,
    not its times. Memory is not compared.
    """
    names, home = open_catalog(), Home.default()
    a, b = (names.repository.snapshot(names.resolve(text).snapshot_id) for text in (before, after))
    with spinner("reading the disks"), scratch(home.staging) as place:
        cache = BlobCache(home.cache, names.repository)
        found = run_async(compare(a, b, cache, place, limit=limit, with_files=not no_files))
        trim(home.cache, cache_limit_bytes())
    if as_json:
        print_json(found)
        return
    _print(found)


def _print(found: Difference) -> None:
    rows = [[change.fact, change.before or "-", change.after or "-"] for change in found.facts]
    _section("facts", ["FACT", "BEFORE", "AFTER"], rows)
    rows = [[f"{p.manager} {p.name}", p.before or "-", p.after or "-"] for p in found.packages or ()]
    _section("packages", ["PACKAGE", "BEFORE", "AFTER"], rows)
    files = found.files
    if files is not None:
        for title, count, changes in (
            ("added", files.added_count, files.added),
            ("removed", files.removed_count, files.removed),
            ("changed", files.changed_count, files.changed),
        ):
            _section(f"files {title}: {count}", ["PATH", "SIZE", "WHAT"], [_row(change) for change in changes])
            if count > len(changes):
                click.echo(f"and {count - len(changes)} more; --limit shows them")
    if not found.facts and not found.packages and not (files and _any(found)):
        click.echo("no difference" if files is not None else "no difference, files left aside")


def _any(found: Difference) -> bool:
    files = found.files
    return files is not None and bool(files.added_count or files.removed_count or files.changed_count)


def _section(title: str, columns: list[str], rows: list[list[str]]) -> None:
    if rows:
        click.echo(click.style(title, bold=True))
        print_table(columns, rows)


def _row(change: FileChange) -> list[str]:
    sizes = [s for s in (change.size_bytes_before, change.size_bytes_after) if s is not None]
    return [printable(change.path), " -> ".join(dict.fromkeys(size(one) for one in sizes)), ", ".join(change.what)]
