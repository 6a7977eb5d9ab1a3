"""check."""

from __future__ import annotations

from typing import Self

import click

from aenv_run.amounts import size
from aenv_run.check import Report
from aenv_run.check import check as examine
from aenv_run.cli.arguments import server, the_repository
from aenv_run.cli.host import flags, run_there
from aenv_run.cli.output import json_option, print_json, print_table, spinner
from aenv_run.errors import CorruptData
from aenv_run.garbage.repair import Moved, Repaired, repair
from aenv_run.printable import printable
from aenv_run.types import Model


class Mended(Model):
    """What `aenv check --repair` prints: ``Repaired``, and what people do next."""

    moved: tuple[Moved, ...]
    lost: tuple[str, ...]
    report: Report
    next_steps: tuple[str, ...]

    @classmethod
    def of(cls, done: Repaired) -> Self:
        """The same, said."""
        return cls(moved=done.moved, lost=done.lost, report=done.report, next_steps=done.next_steps)


@click.command(epilog="\b\nExamples:\n  aenv check\n  aenv check --deep --json\n  aenv check --deep --repair")
@click.option("--deep", is_flag=True, help="Also digest every blob that a snapshot needs (reads all of them).")
@click.option(
    "--repair", "repairing", is_flag=True, help="Move what is damaged, and what needs it, to quarantine/."
)
@json_option
def check(deep: bool, repairing: bool, as_json: bool) -> int:
    """Say whether the repository is whole. Exit code 74 when something is damaged or missing.

    Reads only, but with --repair: then nothing is deleted, and what is left is whole.
    """
    if repairing:
        return _repair(deep, as_json)
    if (there := server()) is not None:
        report, _ = run_there(there, ("check",), Report, flags(deep=deep))
    else:
        with spinner("reading the repository"):
            report = examine(the_repository(), deep=deep)
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
    _warn(report)
    if report.ok:
        click.echo(click.style("whole", fg="green", bold=True))
        return 0
    _table(report)
    click.echo("aenv check --repair moves it away, and says what to do next", err=True)
    return CorruptData.exit_code


def _repair(deep: bool, as_json: bool) -> int:
    if (there := server()) is not None:
        done, _ = run_there(there, ("check",), Mended, flags(deep=deep, repair=True))
    else:
        with spinner("repairing the repository"):
            done = Mended.of(repair(the_repository(), deep=deep, tell=_tell))
    code = 0 if done.report.ok else CorruptData.exit_code
    if as_json:
        print_json(done)
        return code
    if done.moved:
        print_table(["MOVED", "TO", "WHY"], [[one.key, one.to, one.why] for one in done.moved])
    for step in done.next_steps:
        click.echo(f"next: {printable(step)}")
    if done.report.ok:
        click.echo(click.style("whole", fg="green", bold=True))
    else:
        click.echo("left, to be removed with the store's own tools:")
        _table(done.report)
    return code


def _warn(report: Report) -> None:
    for one in report.warnings:
        click.echo(
            f"warning: {printable(one.about)}: {printable(one.detail)}\n  fix: {printable(one.fix)}", err=True
        )


def _tell(line: str) -> None:
    click.echo(printable(line), err=True)


def _table(report: Report) -> None:
    rows = [[problem.kind.replace("_", " "), problem.key, problem.detail] for problem in report.problems]
    print_table(["PROBLEM", "OBJECT", "DETAIL"], rows)
