"""build: a Dockerfile, by the programs of the builder."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import click

from aenv_run.cli.arguments import server as chosen_server
from aenv_run.errors import Unsupported

BUILDER = (sys.executable, "-m", "aenv_build.cli")
#: Options of ``aenv-build from-dockerfile`` with a value; the rest is of ``aenv-build``.
_TRANSLATING = {
    "name": "--name", "context": "--context", "target": "--target", "ready": "--ready", "probe": "--probe",
    "cpus": "--cpus", "memory": "--machine-memory", "disk": "--disk",
}  # fmt: skip


@click.command(
    epilog="\b\nExamples:\n  aenv build Dockerfile --name my-env\n  aenv build . -o recipe.yaml\n"
    "  aenv build . --name app --probe 8080 --secret NPM_TOKEN=env:NPM_TOKEN\n\n"
    "docs/dockerfile.md says what becomes of each instruction."
)
@click.argument("dockerfile", type=click.Path(path_type=Path, exists=True))
@click.option("--name", help="Of the template. Default: the folder's.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Keep the recipe there; it is not built.")
@click.option("--context", type=click.Path(path_type=Path), help="The folder that is copied from.")
@click.option("--target", metavar="STAGE", help="Up to that stage.")
@click.option("--build-arg", "arguments", multiple=True, metavar="NAME=VALUE", help="The value of an ARG.")
@click.option("--image", "images", multiple=True, metavar="NAME=REFERENCE", help="What FROM NAME means.")
@click.option("--no-network", is_flag=True, help="RUN reaches nothing.")
@click.option("--no-start", is_flag=True, help="Do not start ENTRYPOINT and CMD.")
@click.option("--ready", metavar="COMMAND", help="What is started is up when this exits with 0.")
@click.option("--probe", type=click.IntRange(1, 65535), metavar="PORT", help="… when this port listens.")
@click.option("--disk-only", is_flag=True, help="Without memory, where nothing is started.")
@click.option("--cpu", "--cpu-count", "cpus", type=click.IntRange(1, 64), help="Of the machine.")
@click.option("--mem", "--memory", "memory", metavar="SIZE", help="Of the machine: 1GiB, or a number of MiB.")
@click.option("--disk", metavar="SIZE", help="Of the machine, such as 8GiB.")
@click.option("--secret", "secrets", multiple=True, metavar="NAME=FILE|env:VARIABLE", help="A secret's value.")
@click.option("--no-cache", is_flag=True, help="Run every step.")
def build(
    dockerfile: Path,
    output: Path | None,
    arguments: tuple[str, ...],
    images: tuple[str, ...],
    no_network: bool,
    no_start: bool,
    disk_only: bool,
    secrets: tuple[str, ...],
    no_cache: bool,
    memory: str | None,
    **values: object,
) -> int:
    """Make a template of a Dockerfile: it is translated into a recipe, and the recipe is built."""
    if output is None and chosen_server() is not None:
        raise Unsupported(
            "a Dockerfile is built on the machine that keeps the repository",
            fix="run it there, or use Template().from_dockerfile of an E2B SDK; -o writes the recipe here",
        )
    size = f"{memory}MiB" if memory is not None and memory.isdigit() else memory
    given = {**values, "memory": size}
    translate = [*BUILDER, "from-dockerfile", str(dockerfile)]
    for name, option in _TRANSLATING.items():
        translate += [option, str(given[name])] if given.get(name) is not None else []
    for option, several in (("--build-arg", arguments), ("--image", images)):
        for one in several:
            translate += [option, one]
    translate += ["--no-network"] if no_network else []
    translate += ["--no-start"] if no_start else []
    translate += ["--disk-only"] if disk_only else ["--memory"]
    if output is not None:
        return _run([*translate, "-o", str(output)])
    with tempfile.TemporaryDirectory(prefix="aenv-dockerfile-") as folder:
        recipe = Path(folder) / "recipe.yaml"
        if (code := _run([*translate, "-o", str(recipe)])) != 0:
            return code
        options = ["--no-cache"] if no_cache else []
        for secret in secrets:
            options += ["--secret", secret]
        return _run([*BUILDER, "build", str(recipe), *options])


def _run(argv: list[str]) -> int:
    """Its exit code; a signal of the terminal reaches it too, and it ends in an orderly way."""
    with subprocess.Popen(["setpriv", "--pdeathsig", "TERM", "--", *argv]) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue
