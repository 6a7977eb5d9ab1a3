"""``aenv-build from-dockerfile``: a Dockerfile as a recipe."""

from __future__ import annotations

import re
from pathlib import Path

import click

from aenv_build.commands.arguments import parse_variables
from aenv_build.dockerfile.copies import BuildContext
from aenv_build.dockerfile.recipe_text import recipe_text
from aenv_build.dockerfile.source import MAX_BYTES, read
from aenv_build.dockerfile.translate import DEFAULT_READY, Options, translate
from aenv_run import durable
from aenv_run.errors import InvalidInput, from_os
from aenv_run.printable import printable

EPILOG = f"""\b
Examples:
  aenv-build from-dockerfile Dockerfile -o recipe.yaml
  aenv-build from-dockerfile . --target test --build-arg VERSION=3
\b
What ENTRYPOINT and CMD name is started, and is in the snapshot's memory once it is ready: --ready or --probe
says when (default: {DEFAULT_READY!r}). docs/dockerfile.md says what becomes of each instruction."""


@click.command(epilog=EPILOG)
@click.argument("dockerfile", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where the recipe goes. Default: stdout.")
@click.option(
    "--context", type=click.Path(path_type=Path), help="The folder that is copied from. Default: its own."
)
@click.option("--name", help="The recipe's name. Default: the folder's.")
@click.option("--target", default="", metavar="STAGE", help="Up to that stage. Default: the last.")
@click.option("--build-arg", "arguments", multiple=True, metavar="NAME=VALUE", help="The value of an ARG.")
@click.option(
    "--image",
    "images",
    multiple=True,
    metavar="NAME=REFERENCE",
    help="What FROM NAME means: docker://…, oci:…, docker-archive:…, snapshot:NAME or archive:FILE.",
)
@click.option("--network/--no-network", default=True, help="Whether RUN reaches the internet. Default: it does.")
@click.option("--start/--no-start", default=True, help="Whether ENTRYPOINT and CMD are started.")
@click.option("--ready", metavar="COMMAND", help="What is started is up when this exits with 0.")
@click.option("--probe", type=click.IntRange(1, 65535), metavar="PORT", help="… when this port listens.")
@click.option("--memory/--disk-only", default=None, help="With RAM or not. Default: where something is started.")
@click.option("--cpus", type=click.IntRange(1, 64), help="Of the machine.")
@click.option("--machine-memory", metavar="SIZE", help="Of the machine, such as 1GiB.")
@click.option("--disk", metavar="SIZE", help="Of the machine, such as 8GiB.")
def from_dockerfile(
    dockerfile: Path,
    output: Path | None,
    context: Path | None,
    name: str | None,
    target: str,
    arguments: tuple[str, ...],
    images: tuple[str, ...],
    network: bool,
    start: bool,
    ready: str | None,
    probe: int | None,
    memory: bool | None,
    cpus: int | None,
    machine_memory: str | None,
    disk: str | None,
) -> None:
    """Translate DOCKERFILE (or the one in that folder) into a recipe."""
    path = dockerfile / "Dockerfile" if dockerfile.is_dir() else dockerfile
    if ready is not None and probe is not None:
        raise InvalidInput("give --ready or --probe, not both")
    folder = (context or path.parent).absolute()
    machine = {"cpus": cpus, "memory": machine_memory, "disk": disk}
    options = Options(
        name=name or _name(folder.resolve().name),
        target=target,
        arguments=parse_variables(arguments),
        images=parse_variables(images),
        internet=network,
        start=start,
        ready={"command": ready} if ready is not None else {"port": probe} if probe is not None else None,
        machine={key: value for key, value in machine.items() if value is not None},
        memory=memory,
    )
    file = read(_content(path), str(path))
    place = output.absolute().parent if output is not None else Path.cwd()
    found = translate(file, BuildContext.of(folder, path.absolute(), place, file), options)
    for warning in found.warnings:
        click.echo(f"warning: {printable(warning)}", err=True)
    text = recipe_text(found.recipe, f"Made of {path.name} by aenv-build from-dockerfile.")
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        durable.replace(output, text.encode())
    except OSError as error:
        raise from_os(error, f"cannot write {output}") from error


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise from_os(error, f"cannot read {path}") from error


def _name(folder: str) -> str:
    """A name of the catalog that is like the folder's."""
    return re.sub(r"[^a-z0-9._-]+", "-", folder.lower()).strip("-._")[:64] or "dockerfile"
