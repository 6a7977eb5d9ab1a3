"""``aenv-build RECIPE``, which is ``aenv-build build RECIPE``."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import click

from aenv_build.cache.cache_mounts import mount_limit_bytes
from aenv_build.cache.elsewhere import Elsewhere
from aenv_build.cache.known import Freshness, look_up, parse_since
from aenv_build.cache.ledger import Ledger
from aenv_build.commands.arguments import about_a_recipe, at_a_place, parse_variables
from aenv_build.commands.cells import build_cells, require_all
from aenv_build.commands.command import other_commands
from aenv_build.commands.prepare import prepare, this_architecture
from aenv_build.language.load import load_cells
from aenv_build.planning.lent import Lent
from aenv_build.planning.lock import read_lock, require_same
from aenv_build.planning.pins import pins_today
from aenv_build.reports.ending import Telling
from aenv_build.reports.events import Sink
from aenv_build.reports.github import GithubLines
from aenv_build.reports.junit_report import JunitReport
from aenv_build.reports.outcome import print_plans, print_result
from aenv_build.reports.progress import JsonLines, PlainLines
from aenv_build.reports.workflow_commands import on_github
from aenv_build.running.holding import holding
from aenv_build.running.secret_values import Secrets
from aenv_build.running.workshop import Workshop
from aenv_run.blocks.layers import Layers
from aenv_run.cache import BlobCache
from aenv_run.cli.arguments import require_signature_option
from aenv_run.cli.signals import run_async
from aenv_run.config import cache_limit_bytes, loads_on_demand, open_repository, repository_name
from aenv_run.garbage.unheld import refusal
from aenv_run.paths import Home
from aenv_run.printable import printable
from aenv_run.repository import Repository
from aenv_run.stopping import STOP

EPILOG = """\b
Examples:
  aenv-build recipes/swe-task.yaml
  aenv-build recipe.yaml --var suite=trixie     set a var
  aenv-build recipe.yaml --plan --explain       what would run, and why
  aenv-build recipe.yaml --keep                 enter the state of a step that fails
\b
Exit codes: 0 built; 1 a step or verify failed; 64 the recipe is wrong; 68 no base;
69 no driver; 71, 72 a machine died; 73 disk full; 130 interrupted (docs/errors.md)."""


@dataclass(frozen=True)
class Options:
    """The command line."""

    recipe: Path
    variables: dict[str, str]
    plan_only: bool
    no_cache: bool
    explain: bool
    keep: bool
    as_json: bool
    events: str
    junit: Path | None
    driver: str
    repository: str | None
    home: Home
    jobs: int | None
    cells: tuple[str, ...]
    include_roots: tuple[Path, ...]
    secrets: tuple[str, ...]
    retries: int
    since: datetime | None
    cache_from: tuple[str, ...]
    locked: bool


class _Plain(click.Command):
    """Its help is that of aenv-build, so it names the other commands too."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Then the rest of the commands."""
        super().format_options(ctx, formatter)
        other_commands(formatter)


@click.command(cls=_Plain, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@about_a_recipe
@click.option(
    "--secret", "secrets", multiple=True, metavar="NAME=FILE|env:VARIABLE", help="Where a secret's value is."
)
@click.option("--plan", "plan_only", is_flag=True, help="Print what would run; start nothing.")
@click.option("--no-cache", is_flag=True, help="Run every step, and replace what the cache holds.")
@click.option(
    "--cache-from", multiple=True, metavar="URL", help="Another repository to copy results from; read only."
)
@click.option("--locked", is_flag=True, help="Refuse to build when recipe.lock is not what names mean today.")
@click.option("--explain", is_flag=True, help="Say for each step why it is a hit or a miss.")
@click.option(
    "--retry", "retries", type=click.IntRange(0, 10), default=0, help="Try a step that fails so often again."
)
@click.option(
    "--since",
    metavar="DATE",
    callback=lambda context, option, text: parse_since(text),
    help="What was made before counts as missing: 2026-11-30, with a time (UTC), or an age such as 7d.",
)
@click.option("--keep", is_flag=True, help="Keep the state of a step that fails, and print how to enter it.")
@click.option("--json", "as_json", is_flag=True, help="Print the result (or the plan) as JSON on stdout.")
@click.option(
    "--events",
    type=click.Choice(["auto", "plain", "json", "github"]),
    default="auto",
    help="How progress is shown (stderr). github: groups, annotations and a summary; auto in GitHub Actions.",
)
@click.option("--junit", type=click.Path(path_type=Path), metavar="FILE", help="Write a JUnit XML report.")
@at_a_place
@require_signature_option
@click.option("-j", "--jobs", type=click.IntRange(1, 64), help="Machines at once. Default: one per CPU.")
def build_recipe(
    recipe: Path,
    variables: tuple[str, ...],
    secrets: tuple[str, ...],
    plan_only: bool,
    no_cache: bool,
    explain: bool,
    keep: bool,
    as_json: bool,
    events: str,
    junit: Path | None,
    driver: str,
    repository: str | None,
    home_path: Path | None,
    jobs: int | None,
    cells: tuple[str, ...],
    include_roots: tuple[Path, ...],
    retries: int,
    since: datetime | None,
    cache_from: tuple[str, ...],
    locked: bool,
) -> None:
    """Build RECIPE: run its steps in staging machines and commit named snapshots."""
    home = Home(home_path.absolute()) if home_path else Home.default()
    options = Options(
        recipe, parse_variables(variables), plan_only, no_cache, explain, keep, as_json, events, junit, driver,
        repository, home, jobs, cells, include_roots, secrets, retries, since, cache_from, locked,
    )  # fmt: skip
    run_async(_main(options))


async def _main(options: Options) -> None:
    with ExitStack() as stack:
        telling = _telling(options, stack)
        STOP.at_stake = telling.at_stake
        with telling.to_the_end():
            await _build(options, telling)


async def _build(options: Options, telling: Telling) -> None:
    sources = load_cells(options.recipe, options.variables, wanted=options.cells, roots=options.include_roots)
    names = {name for source in sources for name in source.recipe.secrets}
    lent, secrets = Lent.read(), Secrets.read(options.secrets, names)
    repository = open_repository(options.repository, options.home)
    lock = read_lock(options.recipe)
    if options.locked:
        today = await pins_today(sources, options.home, repository)
        require_same(options.recipe, lock, today, whole=not options.cells)
    selected, plans = await prepare(sources, options.driver, options.home, repository, lent, lock)
    if options.plan_only:
        elsewhere = Elsewhere.opened(() if options.no_cache else options.cache_from, options.home)
        ledger = Ledger(repository, elsewhere=elsewhere)
        fresh = Freshness(datetime.now(UTC), options.since, options.no_cache)
        known = [await asyncio.to_thread(look_up, plan, ledger, repository, fresh) for plan in plans]
        for warning in elsewhere.warnings:
            click.echo(f"warning: {printable(warning)}", err=True)
        print_plans(plans, known, options.home, explain=options.explain, as_json=options.as_json)
        return
    async with holding(repository, options.home) as holder:
        if holder.unheld is not None:
            click.echo(f"warning: {printable(refusal(holder.unheld, 'what this build uses').message)}", err=True)
        workshop = Workshop(
            home=options.home,
            repository=repository,
            driver=selected.driver,
            architecture=this_architecture(),
            sink=telling,
            why_driver=selected.why,
            fresh=options.no_cache,
            keep=options.keep,
            cache_limit_bytes=cache_limit_bytes(),
            parallel=options.jobs or os.cpu_count() or 1,
            retries=options.retries,
            since=options.since,
            cache_from=options.cache_from,
            mount_limit_bytes=mount_limit_bytes(),
            lent=lent,
            secrets=secrets,
            hold=holder.hold,
            layers=_layers(options, repository),
        )
        built = await build_cells(plans, workshop)
    print_result(built, selected, as_json=options.as_json)
    require_all(built)


def _layers(options: Options, repository: Repository) -> Layers:
    cache = BlobCache(options.home.cache, repository)
    name = repository_name(options.repository, options.home)
    return Layers.of(options.home, cache, name, on_demand=loads_on_demand())


def _telling(options: Options, stack: ExitStack) -> Telling:
    """Progress as asked for, or as it suits where we run, and the reports."""
    sinks = [_progress(options, stack)]
    if options.junit is not None:
        report = JunitReport(options.junit)
        report.check()
        sinks.append(report)
    return Telling(*sinks)


def _progress(options: Options, stack: ExitStack) -> Sink:
    if options.events == "json":
        return JsonLines(sys.stderr)
    if options.events == "github" or (options.events == "auto" and on_github(os.environ)):
        return GithubLines(sys.stderr, os.environ, explain=options.explain)
    if options.events == "auto" and sys.stderr.isatty() and not options.plan_only:
        from rich.console import Console

        from aenv_build.reports.live_tree import LiveTree

        return stack.enter_context(LiveTree(Console(stderr=True), explain=options.explain))
    return PlainLines(sys.stderr, explain=options.explain)
