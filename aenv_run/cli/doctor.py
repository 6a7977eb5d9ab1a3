"""doctor."""

from __future__ import annotations

import os

import click

from aenv_run.cli.arguments import server
from aenv_run.cli.host import run_there
from aenv_run.cli.output import json_option, print_json, print_table, spinner
from aenv_run.cli.signals import run_async
from aenv_run.doctor_report import Check, Report
from aenv_run.paths import Home
from aenv_run.printable import printable, printable_lines


@click.command(epilog="\b\nExample:\n  aenv doctor --json")
@json_option
def doctor(as_json: bool) -> int:
    """Say what works on this machine, what is missing and how to get it. Exit code 69 when nothing can run."""
    there = server()
    if there is not None:
        report, _ = run_there(there, ("doctor",), Report)
    else:
        from aenv_run.doctor import examine  # it looks at drivers, which are of Linux

        with spinner("looking"):
            report = run_async(examine(Home.default(), os.environ.get("AENV_DRIVER", "auto")))
    if as_json:
        print_json(report)
        return 0 if report.healthy else 69
    for driver in report.drivers:
        verdict = f"works ({driver.mode})" if driver.usable else "does not work here"
        click.echo(click.style(f"{driver.driver.value}: {verdict}", bold=True) + f" - {printable(driver.why)}")
        print_table(["", "NEEDS", "FOUND", "FIX"], [_row(check) for check in driver.requirements])
        click.echo()
    own = all(check.present for check in report.network)
    says = "each sandbox has its own" if own else "sandboxes have no way out, and only their daemon is reachable"
    click.echo(click.style("network", bold=True) + f" - {says}")
    print_table(["", "NEEDS", "FOUND", "FIX"], [_row(check) for check in report.network])
    click.echo()
    click.echo(click.style("this node" if there is None else there.url, bold=True))
    print_table(["", "NEEDS", "FOUND", "FIX"], [_row(check) for check in report.checks])
    click.echo()
    click.echo(click.style("programs", bold=True) + " - that some recipes and pictures need")
    print_table(["", "NEEDS", "FOUND", "FIX"], [_row(check) for check in report.programs])
    click.echo()
    if report.chosen is None:
        click.echo(click.style(printable_lines(report.why), fg="red", bold=True))
        return 69
    click.echo(f"{click.style('auto picks', bold=True)} {report.why}")
    return 0 if report.healthy else 69


def _row(check: Check) -> list[str]:
    return ["ok" if check.present else "--", check.name, check.detail, "" if check.present else check.fix]
