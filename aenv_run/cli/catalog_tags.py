"""catalog tag, promote, rollback, history."""

from __future__ import annotations

import click

from aenv_run.amounts import moment_age
from aenv_run.catalog import MAX_EVENTS, Event, history
from aenv_run.cli.arguments import complete_name, complete_reference, complete_tag, open_catalog
from aenv_run.cli.output import json_option, print_json, print_table
from aenv_run.errors import InvalidInput
from aenv_run.types import Name, Tag

DEFAULT_EVENTS = 100


@click.command(
    epilog="\b\nExamples:\n  aenv catalog tag swe-task:2 stable\n  aenv catalog tag swe-task:2 old --delete"
)
@click.argument("reference", metavar="SNAPSHOT", shell_complete=complete_reference)
@click.argument("tag")
@click.option("--delete", is_flag=True, help="Remove the tag instead.")
@json_option
def tag(reference: str, tag: str, delete: bool, as_json: bool) -> None:
    """Move TAG to a version of a name, forward or back."""
    names = open_catalog()
    resolved = names.resolve(reference)
    if resolved.name is None or resolved.version is None:
        raise InvalidInput("a tag belongs to a name", fix="write NAME:VERSION, not a snapshot id")
    if delete:
        names.untag(resolved.name, Tag(tag))
    else:
        names.tag(resolved.name, Tag(tag), resolved.version)
    if as_json:
        version = None if delete else resolved.version
        print_json({"name": str(resolved.name), "tag": tag, "version": version})
    elif not delete:
        click.echo(f"{resolved.name}:{tag} -> {resolved.name}:{resolved.version}")


@click.command(
    epilog="\b\nExamples:\n  aenv catalog promote swe-task:7 --to stable\n"
    "  aenv catalog promote swe-task:latest --to stable --verified --json"
)
@click.argument("reference", metavar="SNAPSHOT", shell_complete=complete_reference)
@click.option("--to", "tag", required=True, metavar="TAG", help="The tag to move forward.")
@click.option("--verified", is_flag=True, help="Only if verify steps of its recipe held when it was built.")
@json_option
def promote(reference: str, tag: str, verified: bool, as_json: bool) -> None:
    """Move a tag forward to a version, and record who did it, when, and from where.

    A tag that is at a later version is refused: `aenv catalog rollback` goes back. $AENV_ACTOR says who it is,
    else the user and the host.
    """
    names = open_catalog()
    resolved = names.resolve(reference)
    if resolved.name is None or resolved.version is None:
        raise InvalidInput("a tag belongs to a name", fix="write NAME:VERSION or NAME:TAG, not a snapshot id")
    moved = names.promote(resolved.name, Tag(tag), resolved.version, verified=verified)
    if as_json:
        print_json({"name": str(resolved.name), "tag": tag, "version": resolved.version, "moved": moved})
        return
    already = "" if moved else " (it was there already)"
    click.echo(f"{resolved.name}:{tag} -> {resolved.name}:{resolved.version}{already}")


@click.command(
    epilog="\b\nExamples:\n  aenv catalog rollback swe-task stable\n  aenv catalog rollback swe-task stable --to 5"
)
@click.argument("name", shell_complete=complete_name)
@click.argument("tag", shell_complete=complete_tag)
@click.option("--to", "version", type=int, help="This version, instead of where the tag was before.")
@json_option
def rollback(name: str, tag: str, version: int | None, as_json: bool) -> None:
    """Move a tag back to where it was before; a second rollback goes further back. The history keeps it all."""
    move = open_catalog().rollback(Name(name), Tag(tag), version)
    if as_json:
        print_json(move)
        return
    click.echo(f"{name}:{tag} -> {name}:{move.to_version} (was at {move.from_version})")


@click.command(
    "history",
    epilog="\b\nExamples:\n  aenv catalog history swe-task\n  aenv catalog history swe-task:stable --limit 20\n"
    "  aenv catalog history swe-task:3 --json",
)
@click.argument("reference", metavar="NAME[:TAG|:VERSION]", shell_complete=complete_reference)
@click.option(
    "--limit",
    type=click.IntRange(1, MAX_EVENTS),
    default=DEFAULT_EVENTS,
    show_default=True,
    help="The newest so many.",
)
@json_option
def show_history(reference: str, limit: int, as_json: bool) -> None:
    """Say what happened to a name, a tag or a version: publications, moves of tags, removals, oldest first."""
    events = history(open_catalog(), reference, limit=limit)
    if as_json:
        print_json(events)
        return
    rows = [[_when(event), event.act, _subject(event), _change(event), event.by or "-"] for event in events]
    print_table(["WHEN", "WHAT", "OF", "CHANGE", "BY"], rows)
    if len(events) == limit:
        click.echo(f"the newest {limit}; --limit shows more", err=True)


def _when(event: Event) -> str:
    return f"{event.at or '-'} ({moment_age(event.at)})" if event.at else "-"


def _subject(event: Event) -> str:
    part = event.tag or event.to_version or event.from_version
    return f"{event.name}:{part}"


def _change(event: Event) -> str:
    if event.problem:
        return event.problem
    if event.tag is not None:
        return f"{event.from_version or 'nowhere'} -> {event.to_version or 'nowhere'}"
    return event.snapshot_id.short if event.snapshot_id else "-"
