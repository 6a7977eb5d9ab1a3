"""catalog, with its ls, show and rm. They read and write the repository directly; no node is needed."""

from __future__ import annotations

import click

from aenv_run.amounts import moment_age, size
from aenv_run.catalog import Built, Entry, Reference, Resolved, with_labels
from aenv_run.cli.arguments import complete_name, complete_snapshot, open_catalog, server
from aenv_run.cli.catalog_diff import diff
from aenv_run.cli.catalog_exchange import export_snapshot, import_snapshot
from aenv_run.cli.catalog_graph import draw
from aenv_run.cli.catalog_labels import label, search_entries
from aenv_run.cli.catalog_retain import retain_versions
from aenv_run.cli.catalog_sign import keygen, sign_snapshot, verify
from aenv_run.cli.catalog_tags import promote, rollback, show_history, tag
from aenv_run.cli.output import json_option, print_json, print_table
from aenv_run.config import repository_directory, repository_name
from aenv_run.errors import InvalidInput
from aenv_run.paths import Home
from aenv_run.printable import printable
from aenv_run.snapshot import Snapshot
from aenv_run.types import Name

reference_argument = click.argument("reference", metavar="SNAPSHOT", shell_complete=complete_snapshot)


@click.group()
def catalog() -> None:
    """Named snapshots. A version never changes; a tag moves."""


@catalog.command(
    "ls",
    epilog="\b\nExamples:\n  aenv catalog ls\n  aenv catalog ls swe-task --json\n"
    "  aenv catalog ls --label suite=nightly --label owner",
)
@click.argument("name", required=False, shell_complete=complete_name)
@click.option("--label", "labels", multiple=True, metavar="KEY[=VALUE]", help="Only those with all of these.")
@json_option
def list_entries(name: str | None, labels: tuple[str, ...], as_json: bool) -> None:
    """List the versions of all names, or of one."""
    entries = with_labels(open_catalog().entries(Name(name) if name else None), labels)
    if as_json:
        print_json(entries)
        return
    rows = [
        [
            entry.reference,
            ", ".join(entry.tags),
            entry.snapshot_id.short if entry.snapshot_id else "-",
            moment_age(entry.created_at),
            size(entry.size_bytes),
            entry.problem or ("yes" if entry.has_memory else "no"),
        ]
        for entry in entries
    ]
    there = server()
    where = printable(there.url if there else repository_name(None, Home.default()))
    directory = None if there else repository_directory(None, Home.default())
    if directory is not None and not directory.exists():
        where += ", which does not exist yet"
    empty = (
        "none has these labels" if labels else f"no snapshots yet in {where} (`aenv-build RECIPE.yaml` makes one)"
    )
    print_table(["SNAPSHOT", "TAGS", "ID", "AGE", "SIZE", "MEMORY"], rows, empty=empty)
    if any(entry.problem for entry in entries):
        click.echo("something cannot be read; `aenv check` tells more", err=True)


@catalog.command(epilog="\b\nExample:\n  aenv catalog show swe-task:1")
@reference_argument
@json_option
def show(reference: str, as_json: bool) -> None:
    """Show one snapshot: lineage, layers, what its memory is bound to, where it came from."""
    names = open_catalog()
    resolved = names.resolve(reference)
    lineage = names.lineage(resolved.snapshot_id)
    entries = names.entries()
    entry = _entry_of(resolved, entries)
    if as_json:
        print_json(
            {
                "snapshot_id": str(resolved.snapshot_id),
                "names": [e.reference for e in entries if e.snapshot_id == resolved.snapshot_id],
                "version": _plain(entry),
                "lineage": [str(snapshot.id) for snapshot in lineage],
                "snapshot": lineage[0].model_dump(mode="json"),
            }
        )
        return
    _print_facts(lineage[0], entries, entry)
    click.echo(click.style("\nlineage, newest first", bold=True))
    rows = [[s.id.short, _names_of(s, entries), s.provenance.step or "", _what(s)] for s in lineage]
    print_table(["ID", "NAMES", "STEP", "ADDS"], rows)
    _print_hooks(lineage[0])
    click.echo(click.style("\ndisk layers, base first", bold=True))
    print_table(["BLOB", "SIZE"], [[blob.digest[:19], size(blob.size_bytes)] for blob in lineage[0].disk])
    _print_memory(lineage[0])


def _entry_of(resolved: Resolved, entries: list[Entry]) -> Entry | None:
    """The version that was asked for; of an id, one that is this snapshot."""
    for entry in entries:
        if resolved.name is None and entry.snapshot_id == resolved.snapshot_id:
            return entry
        if resolved.name is not None and (entry.name, entry.version) == (resolved.name, resolved.version):
            return entry
    return None


def _plain(entry: Entry | None) -> object:
    return entry.model_dump(mode="json") if entry else None


def _print_facts(snapshot: Snapshot, entries: list[Entry], entry: Entry | None) -> None:
    machine, context, origin = snapshot.machine, snapshot.context, snapshot.provenance
    rows = [
        ("snapshot", snapshot.id),
        ("names", _names_of(snapshot, entries) or "-"),
        (
            "machine",
            f"{machine.cpus} cpu, {machine.memory_mib} MiB memory, {machine.disk_mib} MiB disk, "
            f"{snapshot.architecture}",
        ),
        ("runs as", f"{context.user} in {context.workdir}"),
        ("recipe", " ".join(x for x in (origin.recipe_name, (origin.recipe_digest or "")[:19]) if x) or "-"),
        ("step", origin.step or "-"),
        *_built_rows(snapshot, entry),
        *(("label", f"{key}={value}") for key, value in sorted((entry or snapshot).labels.items())),
    ]
    for key, value in rows:
        click.echo(f"{click.style(f'{key:<10}', bold=True)}{printable(str(value))}")


def _built_rows(snapshot: Snapshot, entry: Entry | None) -> list[tuple[str, str]]:
    """Where it came from: what the snapshot itself says, and the note of the version."""
    origin = snapshot.provenance
    built = entry.built if entry and entry.built else Built()
    dirty = {True: " with changes", False: "", None: " (changes unknown)"}[built.source_dirty]
    commit = built.source_commit + dirty if built.source_commit else origin.source_commit
    made_at = built.at or origin.created_at or "-"
    rows = [
        ("base", " ".join(part for part in (built.base, (built.base_digest or "")[:19]) if part)),
        ("commit", commit or "-"),
        ("built by", f"{built.builder or origin.builder or '-'} at {made_at}"),
        ("built on", " with ".join(part for part in (built.host, built.driver) if part)),
        ("verified", ", ".join(built.verified)),
        ("published", f"by {entry.by or '-'} at {entry.created_at}" if entry else ""),
    ]
    return [row for row in rows if row[1]]


def _print_hooks(snapshot: Snapshot) -> None:
    if snapshot.hooks is None:
        return
    click.echo(click.style("\nhooks, in the order in which they run", bold=True))
    rows = [[kind, hook.user or snapshot.context.user, hook.words] for kind, hook in snapshot.hooks.listed()]
    print_table(["WHEN", "USER", "COMMAND"], rows)


def _print_memory(snapshot: Snapshot) -> None:
    click.echo(click.style("\nmemory", bold=True))
    if snapshot.memory is None:
        click.echo("none: it boots from its disk")
        return
    for role, blob in snapshot.memory.files.items():
        click.echo(f"{role:<14}{blob.digest[:19]}  {size(blob.size_bytes)}")
    for key, value in snapshot.memory.facts.model_dump(mode="json").items():
        click.echo(f"{key:<14}{printable(str(value))}")


def _names_of(snapshot: Snapshot, entries: list[Entry]) -> str:
    return ", ".join(e.reference for e in entries if e.snapshot_id == snapshot.id)


def _what(snapshot: Snapshot) -> str:
    return f"{len(snapshot.disk)} layers" + (" and memory" if snapshot.memory else "")


@catalog.command("rm", epilog="\b\nExamples:\n  aenv catalog rm swe-task:1\n  aenv catalog rm swe-task --all")
@reference_argument
@click.option("--all", "everything", is_flag=True, help="Every version of the name.")
@json_option
def remove(reference: str, everything: bool, as_json: bool) -> None:
    """Take a version (or with --all a name) out of the catalog. Running sandboxes are not touched."""
    parsed = Reference.parse(reference)
    if parsed.name is None or (parsed.version is None) != everything:
        raise InvalidInput("say which version to remove", fix="write NAME:VERSION, or NAME --all")
    removed = [f"{parsed.name}:{version}" for version in open_catalog().remove(parsed.name, parsed.version)]
    if as_json:
        print_json({"removed": removed})
        return
    for reference in removed:
        click.echo(reference)


for command in (
    diff,
    draw,
    export_snapshot,
    import_snapshot,
    label,
    retain_versions,
    keygen,
    sign_snapshot,
    verify,
    search_entries,
    tag,
    promote,
    rollback,
    show_history,
):
    catalog.add_command(command)
