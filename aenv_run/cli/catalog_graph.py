"""catalog graph."""

from __future__ import annotations

from pathlib import Path

import click

from aenv_run.catalog.graph import FORMATS, as_dot, graph
from aenv_run.cli.arguments import complete_reference, open_catalog
from aenv_run.cli.output import json_option, picture_option, print_json, put_picture
from aenv_run.cli.signals import run_async
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
@picture_option
@json_option
def draw(reference: str, form: str, output: Path | None, as_json: bool) -> None:
    """Draw how the versions of a name grew from each other and from their bases."""
    found = graph(open_catalog(), reference)
    if as_json:
        print_json(found)
        return
    drawn = run_async(svg(as_dot(found))) if form == "svg" else FORMATS[form](found).encode()
    put_picture(drawn, output)
