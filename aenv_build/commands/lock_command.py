"""``aenv-build lock``: write down what the moving names of a recipe mean today."""

from __future__ import annotations

import json
from pathlib import Path

import click

from aenv_build.commands.arguments import about_a_recipe, at_a_place, parse_variables
from aenv_build.language.load import load_cells
from aenv_build.planning.lock import write_lock
from aenv_build.planning.pins import pins_today
from aenv_run.cli.signals import run_async
from aenv_run.config import open_repository
from aenv_run.errors import InvalidInput
from aenv_run.paths import Home
from aenv_run.printable import printable


@click.command(
    "lock",
    epilog="\b\nExamples:\n  aenv-build lock recipe.yaml       writes recipe.lock\n"
    "  aenv-build recipe.yaml --locked   refuses to build when a name means something else by now",
)
@about_a_recipe
@at_a_place
@click.option("--json", "as_json", is_flag=True, help="Print the lock instead of a line for each pin.")
def lock_recipe(
    recipe: Path,
    variables: tuple[str, ...],
    cells: tuple[str, ...],
    include_roots: tuple[Path, ...],
    driver: str,
    repository: str | None,
    home_path: Path | None,
    as_json: bool,
) -> None:
    """Write RECIPE's lock: the digests of images and archives, ids of snapshots, commits of git. Builds use it."""
    if cells:
        raise InvalidInput("a lock is of all cells", fix="leave out --cell")
    home = Home(home_path.absolute()) if home_path else Home.default()
    sources = load_cells(recipe, parse_variables(variables), roots=include_roots)
    lock = run_async(pins_today(sources, home, open_repository(repository, home)))
    path = write_lock(recipe, lock)
    if as_json:
        click.echo(json.dumps(lock.model_dump()))
        return
    for pin in lock.pins:
        click.echo(f"{pin.kind} {printable(pin.name)} = {pin.pin}")
    click.echo(f"{path}: {len(lock.pins)} locked")
