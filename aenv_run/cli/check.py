"""check."""

from __future__ import annotations

import click

from aenv_run.check import check as examine
from aenv_run.cli.output import json_option, print_json, print_table, size, spinner
from aenv_run.config import open_repository
from aenv_run.errors import CorruptData
from aenv_run.paths import Home


@click.command(epilog="\b\nExamples:\n  aenv check\n  aenv check --deep --json")
@click.option("--deep", is_flag=True, help="Also digest every blob that a snapshot needs (reads all of them).")
@json_option
def check(deep: bool, as_json: bool) -> int:
    """Say whether the repository is whole. Reads only. Exit code 74 when something is damaged or missing."""
    with spinner("reading the repository"):
        report = examine(open_repository(None, Home.default()), deep=deep)
    if as_json:
        print_json(report)
        return 0 if report.ok else CorruptData.exit_code
    counts = report.counts
    click.echo(
        f"{counts['snapshots']} snapshots, {counts['versions']} versions, {counts['tags']} tags, "
        f"{counts['blobs']} blobs of {size(counts['blob_bytes'])}"
        + (f", {counts['blobs_digested']} of them read and digested" if deep else "")
    )
    if counts["orphan_blobs"]:
        click.echo(f"{counts['orphan_blobs']} blobs ({size(counts['orphan_blob_bytes'])}) belong to no snapshot")
    if report.ok:
        click.echo(click.style("whole", fg="green", bold=True))
        return 0
    rows = [[problem.kind.replace("_", " "), problem.key, problem.detail] for problem in report.problems]
    print_table(["PROBLEM", "OBJECT", "DETAIL"], rows)
    return CorruptData.exit_code
