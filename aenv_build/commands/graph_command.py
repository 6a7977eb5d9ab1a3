"""``aenv-build graph``: the steps of a recipe as a picture."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from aenv_build.cache.known import Known, look_up
from aenv_build.cache.ledger import BASE, Ledger
from aenv_build.commands.arguments import about_a_recipe, at_a_place, parse_variables
from aenv_build.commands.prepare import prepare
from aenv_build.language.load import load_cells
from aenv_build.planning.lent import Lent
from aenv_build.planning.lock import read_lock
from aenv_build.planning.plan import Plan
from aenv_build.reports.picture import State, dot, drawing_of, mermaid, output_key
from aenv_run.cli.output import picture_option, put_picture
from aenv_run.cli.signals import run_async
from aenv_run.config import open_repository
from aenv_run.graphviz import svg
from aenv_run.paths import Home


@click.command(
    "graph",
    epilog="\b\nExamples:\n  aenv-build graph recipe.yaml\n"
    "  aenv-build graph recipe.yaml --format svg --output recipe.svg",
)
@about_a_recipe
@click.option(
    "--format",
    "form",
    type=click.Choice(["mermaid", "dot", "svg"]),
    default="mermaid",
    show_default=True,
    help="svg needs Graphviz.",
)
@picture_option
@at_a_place
def draw(
    recipe: Path,
    variables: tuple[str, ...],
    cells: tuple[str, ...],
    include_roots: tuple[Path, ...],
    driver: str,
    repository: str | None,
    home_path: Path | None,
    form: str,
    output: Path | None,
) -> None:
    """Draw the steps of RECIPE, its verifies and outputs: green is cached, yellow would run. Starts nothing."""
    home = Home(home_path.absolute()) if home_path else Home.default()
    given = parse_variables(variables)
    drawn = run_async(_draw(recipe, given, cells, include_roots, driver, repository, home, form))
    put_picture(drawn, output)


async def _draw(
    recipe: Path,
    variables: dict[str, str],
    cells: tuple[str, ...],
    roots: tuple[Path, ...],
    driver: str,
    url: str | None,
    home: Home,
    form: str,
) -> bytes:
    sources = load_cells(recipe, variables, wanted=cells, roots=roots)
    repository = open_repository(url, home)
    _, plans = await prepare(sources, driver, home, repository, Lent.read(), read_lock(recipe))
    ledger = Ledger(repository)
    known = [await asyncio.to_thread(look_up, plan, ledger, repository) for plan in plans]
    pictures = [(drawing_of(plan), states_of(plan, found)) for plan, found in zip(plans, known, strict=True)]
    if form == "mermaid":
        return mermaid(*pictures).encode()
    return await svg(dot(*pictures)) if form == "svg" else dot(*pictures).encode()


def states_of(plan: Plan, known: Known) -> dict[str, State]:
    """What the cache has of the plan's steps, and of its outputs by ``output_key``."""
    states: dict[str, State] = {BASE: "hit" if known.base is not None else "miss"}
    for stage in plan.stages.values():
        if stage.makes_state or stage.step.verb == "verify":
            states[stage.id] = "hit" if stage.id in known.stages else "miss"
    states |= {output_key(n): "hit" if n in known.outputs else "miss" for n in range(len(plan.outputs))}
    return states
