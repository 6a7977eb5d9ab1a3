"""What happened to a name, read from the records that made it so: there is no second account to disagree."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from pydantic import Field

from aenv_run.catalog.names import Catalog
from aenv_run.catalog.records import Act, Move, Version, named
from aenv_run.catalog.reference import Reference
from aenv_run.errors import CorruptData, InvalidInput, Unsupported
from aenv_run.types import Model, Name, SnapshotId, Tag

MAX_EVENTS = 10_000


class Event(Model):
    """A version was published or removed (``tag`` is null), or a tag moved. ``by`` is a claim.

    ``problem`` says why a record of it could not be read; then the rest may be missing.
    """

    at: str = Field(description="RFC 3339, UTC, seconds")
    by: str
    act: Act
    name: Name
    tag: Tag | None = None
    number: int | None = Field(None, description="counts the moves of the tag")
    from_version: Version | None = None
    to_version: Version | None = None
    snapshot_id: SnapshotId | None = None
    problem: str | None = None


def history(catalog: Catalog, reference: str, *, limit: int = 100) -> list[Event]:
    """The newest ``limit`` events of a name, of one of its tags or of one of its versions, oldest first.

    Also of a name whose versions are all removed. ``NotFound`` when nothing ever happened to it.
    """
    wanted = Reference.parse(reference)
    if wanted.name is None:
        raise InvalidInput(f"{reference} is a snapshot id, which has no history", fix="write NAME or NAME:TAG")
    if not 1 <= limit <= MAX_EVENTS:
        raise InvalidInput(f"a limit of {limit} is not possible", fix=f"give 1 to {MAX_EVENTS}")
    name = wanted.name
    events: list[Event] = []
    if wanted.tag is None:
        events += islice(_publications(catalog, name, wanted.version), limit)
        events += islice(_removals(catalog, name, wanted.version), 2 * limit)
    for tag in [wanted.tag] if wanted.tag else catalog.tag_log.known(name):
        events += islice(_moves(catalog, name, tag, wanted.version), limit)
    if not events:
        raise catalog.missing(name, reference)
    return sorted(events, key=_order)[-limit:]


def _publications(catalog: Catalog, name: Name, only: Version | None) -> Iterator[Event]:
    """Newest first."""
    for version in reversed(catalog.versions(name)):
        if only not in (None, version):
            continue
        try:
            record = catalog.version_log.read(name, version)
        except (CorruptData, Unsupported) as error:
            yield Event(at="", by="", act="publish", name=name, to_version=version, problem=error.message)
            continue
        if record is not None:
            yield Event(
                at=record.created_at, by=record.by, act="publish", name=name, to_version=version,
                snapshot_id=record.snapshot_id,
            )  # fmt: skip


def _removals(catalog: Catalog, name: Name, only: Version | None) -> Iterator[Event]:
    """The last first, each followed by the publication that its record has kept."""
    prefix = f"refs/removed/{name}/"
    infos = sorted(catalog.repository.store.list(prefix), key=lambda info: -info.modified_s)
    for part in (named(info.key, "refs/removed/") for info in infos):
        if part is None or only not in (None, part[1]):
            continue
        version = part[1]
        try:
            record = catalog.version_log.read_removed(name, version)
        except (CorruptData, Unsupported) as error:
            yield Event(at="", by="", act="remove", name=name, from_version=version, problem=error.message)
            continue
        if record is None:
            continue
        was = record.version
        yield Event(
            at=record.removed_at, by=record.by, act="remove", name=name, from_version=version,
            snapshot_id=was.snapshot_id if was else None,
        )  # fmt: skip
        if was is not None:
            yield Event(
                at=was.created_at, by=was.by, act="publish", name=name, to_version=version,
                snapshot_id=was.snapshot_id,
            )  # fmt: skip


def _moves(catalog: Catalog, name: Name, tag: Tag, only: Version | None) -> Iterator[Event]:
    """Newest first; what cannot be read ends it."""
    moves = catalog.tag_log.moves(name, tag)
    while True:
        try:
            move: Move | None = next(moves, None)
        except (CorruptData, Unsupported) as error:
            yield Event(at="", by="", act="tag", name=name, tag=tag, problem=error.message)
            return
        if move is None:
            return
        if only is None or only in (move.from_version, move.to_version):
            yield Event(
                at=move.at, by=move.by, act=move.act, name=name, tag=tag, number=move.number,
                from_version=move.from_version, to_version=move.to_version,
            )  # fmt: skip


def _order(event: Event) -> tuple[str, int, str, int]:
    """Of one second: publications, then moves in the order of their numbers, then removals."""
    if event.tag is not None:
        return event.at, 1, event.tag, event.number or 0
    return event.at, 2 if event.act == "remove" else 0, "", event.from_version or event.to_version or 0
