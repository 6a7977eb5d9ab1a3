"""catalog export, import."""

from __future__ import annotations

from pathlib import Path

import click

from aenv_run.amounts import size
from aenv_run.catalog.export import export
from aenv_run.catalog.intake import DEFAULT_LIMIT_BYTES, take_in
from aenv_run.cli.arguments import (
    complete_name,
    complete_reference,
    open_catalog,
    parse_size,
    require_signature_option,
)
from aenv_run.cli.output import ProgressLine, json_option, print_json
from aenv_run.paths import Home
from aenv_run.scratch import scratch
from aenv_run.types import Name, Tag


@click.command(
    "export",
    epilog="\b\nExamples:\n  aenv catalog export swe-task:3 ./swe-task-3\n"
    "  aenv catalog export swe-task:stable /mnt/share/swe-task --json",
)
@click.argument("reference", metavar="SNAPSHOT", shell_complete=complete_reference)
@click.argument("directory", type=click.Path(path_type=Path))
@json_option
def export_snapshot(reference: str, directory: Path, as_json: bool) -> None:
    """Write a snapshot, with all that it stands on, to the new DIRECTORY: one OCI artifact, for any OCI tool.

    It holds the snapshot's memory, and so whatever secrets that held.
    """
    with ProgressLine(f"exporting {reference}:") as progress:
        done = export(open_catalog(), reference, directory.absolute(), progress)
    if as_json:
        print_json(done)
        return
    click.echo(f"{done.reference or done.snapshot_id} -> {directory}")
    click.echo(
        f"{done.blobs} blobs of {size(done.size_bytes)}, {done.snapshots} snapshots; {done.manifest_digest}",
        err=True,
    )


@click.command(
    "import",
    epilog="\b\nExamples:\n  aenv catalog import ./swe-task-3\n"
    "  aenv catalog import ./swe-task-3 --name swe-task-copy --tag latest --json",
)
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--name", shell_complete=complete_name, help="Publish it under this name instead of its own.")
@click.option("--tag", "tags", multiple=True, help="Move this tag to it. May be repeated.")
@click.option("--max-size", help="Refuse what would take more, such as 64GiB.  [default: 256GiB]")
@require_signature_option
@json_option
def import_snapshot(
    directory: Path, name: str | None, tags: tuple[str, ...], max_size: str | None, as_json: bool
) -> None:
    """Take in a snapshot that `aenv catalog export` wrote. Prints name:version, or the id of one without a name.

    It keeps its id. Every byte is verified; what is here already is not copied.
    """
    limit_bytes = parse_size(max_size) if max_size else DEFAULT_LIMIT_BYTES
    with ProgressLine(f"importing {directory}:") as progress, scratch(Home.default().staging) as place:
        done = take_in(
            open_catalog(), directory, place, name=Name(name) if name else None, tags=tuple(map(Tag, tags)),
            limit_bytes=limit_bytes, progress=progress,
        )  # fmt: skip
    if as_json:
        print_json(done)
        return
    click.echo(f"{done.name}:{done.version}" if done.name else done.snapshot_id)
    click.echo(f"snapshot {done.snapshot_id}; {size(done.copied_bytes)} were copied", err=True)
