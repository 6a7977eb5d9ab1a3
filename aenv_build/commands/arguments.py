"""Arguments that the commands about a recipe have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from aenv_build.language.document import is_text
from aenv_run.errors import InvalidInput

Command = TypeVar("Command", bound=Callable[..., None])

_RECIPE = (
    click.argument("recipe", type=click.Path(path_type=Path)),
    click.option("--var", "variables", multiple=True, metavar="NAME=VALUE", help="Set a var of the recipe."),
    click.option(
        "--cell", "cells", multiple=True, metavar="NAME=VALUE", help="Only the matrix's cells with that value."
    ),
    click.option(
        "--include-root",
        "include_roots",
        multiple=True,
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        help="A folder beside the recipe's that fragments may lie in.",
    ),
)
_PLACE = (
    click.option(
        "--driver",
        default="auto",
        envvar="AENV_DRIVER",
        show_default=True,
        show_envvar=True,
        help="auto, qemu, gvisor or firecracker.",
    ),
    click.option("--repository", metavar="URL", help="Where snapshots are committed. Default: the home's."),
    click.option("--home", "home_path", type=click.Path(path_type=Path), help="Default: $AENV_HOME."),
)


def about_a_recipe(command: Command) -> Command:
    """RECIPE, and what chooses its cells and fills its vars."""
    for option in reversed(_RECIPE):
        command = option(command)
    return command


def at_a_place(command: Command) -> Command:
    """With which driver, and where snapshots are."""
    for option in reversed(_PLACE):
        command = option(command)
    return command


def parse_variables(pairs: tuple[str, ...]) -> dict[str, str]:
    """What ``--var`` says."""
    result = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise InvalidInput(f"--var {pair}: write NAME=VALUE")
        if not is_text(value):
            raise InvalidInput(f"--var {name}: the value is not UTF-8 text")
        result[name] = value
    return result
