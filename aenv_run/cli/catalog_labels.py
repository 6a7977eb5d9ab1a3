"""catalog label, search."""

from __future__ import annotations

import click

from aenv_run.amounts import moment_age
from aenv_run.catalog import search
from aenv_run.cli.arguments import complete_reference, open_catalog, pairs
from aenv_run.cli.output import json_option, print_json, print_table
from aenv_run.errors import InvalidInput


@click.command(
    epilog="\b\nExamples:\n  aenv catalog label swe-task:3 suite=nightly owner=ada\n"
    "  aenv catalog label swe-task:3 --delete owner"
)
@click.argument("reference", metavar="SNAPSHOT", shell_complete=complete_reference)
@click.argument("labels", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--delete", "without", multiple=True, metavar="KEY", help="Remove this label. May be repeated.")
@json_option
def label(reference: str, labels: tuple[str, ...], without: tuple[str, ...], as_json: bool) -> None:
    """Set labels of a version, or show its own.

    They are notes beside the version: neither it nor its snapshot changes. Labels of a recipe are in the snapshot
    itself and stay; where both have a key, `ls` and `search` go by this one.
    """
    names = open_catalog()
    resolved = names.resolve(reference)
    if resolved.name is None or resolved.version is None:
        raise InvalidInput("labels are of a version", fix="write NAME:VERSION or NAME:TAG, not a snapshot id")
    if labels or without:
        found = names.label(resolved.name, resolved.version, pairs(labels, "the label"), without)
    else:
        found = names.labels.of(resolved.name, resolved.version)
    if as_json:
        print_json(
            {"name": str(resolved.name), "version": resolved.version, "labels": dict(sorted(found.items()))}
        )
        return
    print_table(["LABEL", "VALUE"], [[key, value] for key, value in sorted(found.items())], empty="no labels")


@click.command(
    "search",
    epilog="\b\nExamples:\n  aenv catalog search python\n  aenv catalog search nightly debootstrap --json",
)
@click.argument("text", nargs=-1, required=True)
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="At most so many.")
@json_option
def search_entries(text: tuple[str, ...], limit: int, as_json: bool) -> None:
    """Find versions by words in their names, tags, labels, recipes and bases; all words must be there."""
    hits = search(open_catalog(), " ".join(text))
    if as_json:
        print_json(hits[:limit])
    else:
        rows = [
            [h.entry.reference, ", ".join(h.entry.tags), moment_age(h.entry.created_at), ", ".join(h.found_in)]
            for h in hits[:limit]
        ]
        print_table(["SNAPSHOT", "TAGS", "AGE", "FOUND IN"], rows, empty="nothing has all of these words")
    if len(hits) > limit:
        click.echo(f"{len(hits) - limit} more; --limit shows them", err=True)
