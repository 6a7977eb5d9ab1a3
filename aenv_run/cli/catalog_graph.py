"""catalog graph."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from aenv_run.catalog.graph import FORMATS, as_dot, graph
from aenv_run.cli.arguments import complete_reference, open_catalog, run_async
from aenv_run.cli.output import json_option, print_json
from aenv_run.errors import InvalidInput
from aenv_run.graphviz import svg


@click.command(
    "graph",
    epilog="\b\nExamples:\n  aenv catalog graph swe-task\n  aenv catalog graph swe-task:3 --format mermaid\n"
    "  aenv catalog graph swe-task --format svg --output lineage.svg\n  aenv catalog graph swe-task --json",
)
@click.argument("reference", metavar="NAME[:VERSION|:TAG]", shell_complete=complete_reference)
@click.option(
    "--format", "form", type=click.Choice([*FORMATS, "svg"]), default="text", show_default=True,
    help="svg needs Graphviz.",
)  # fmt: skip
@click.option(
    "--output", type=click.Path(path_type=Path), help="Write it to this new file instead of printing it."
)
@json_option
def draw(reference: str, form: str, output: Path | None, as_json: bool) -> None:
    """Draw how the versions of a name grew from each other and from their bases."""
    found = graph(open_catalog(), reference)
    if as_json:
        print_json(found)
        return
    drawn = run_async(svg(as_dot(found))) if form == "svg" else FORMATS[form](found).encode()
    if output is None:
        sys.stdout.buffer.write(drawn)
        sys.stdout.buffer.flush()
        return
    try:
        with output.open("xb") as file:
            file.write(drawn)
    except FileExistsError:
        raise InvalidInput(f"{output} exists already", fix="give the name of a new file, or remove it") from None
