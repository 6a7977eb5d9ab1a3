"""Snapshots of sandboxes: made, listed, looked at, removed. The catalog keeps them; they outlive their sandbox."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query, Response

from aenv_run.api.errors import documented, refuse
from aenv_run.api.paging import MAX_PAGE, NEXT_TOKEN, page
from aenv_run.api.references import catalog_reference
from aenv_run.api.sandboxes.lookup import Found, gone
from aenv_run.api.server import Server, Serving
from aenv_run.api.strict import StrictRoute
from aenv_run.api.wire.model import moment
from aenv_run.api.wire.snapshots import SANDBOX_LABEL, SnapshotAsked, SnapshotTold
from aenv_run.catalog import Catalog, Entry
from aenv_run.catalog.versions import UNNAMED
from aenv_run.errors import Conflict, CorruptData, InvalidInput, NotFound
from aenv_run.lifecycle import State
from aenv_run.node_wire import SnapshotRequest
from aenv_run.types import MachineSpec, Name, SnapshotId, Tag

router = APIRouter(tags=["snapshots"], route_class=StrictRoute)


@dataclass(frozen=True)
class Row:
    """One snapshot with all versions that are it."""

    id: SnapshotId
    machine: MachineSpec
    created_at: datetime
    versions: tuple[Entry, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Those that somebody gave."""
        return tuple(entry.reference for entry in self.versions if not entry.name.startswith(UNNAMED))


def _rows(catalog: Catalog) -> list[Row]:
    """Blocking: all that were made of sandboxes."""
    found: dict[SnapshotId, list[Entry]] = {}
    for entry in catalog.all.fixed():
        if entry.snapshot_id is not None and SANDBOX_LABEL in entry.labels:
            found.setdefault(entry.snapshot_id, []).append(entry)
    return [
        Row(id, entries[0].machine or MachineSpec(), moment(entries[0].created_at), tuple(entries))
        for id, entries in found.items()
    ]


def _told(row: Row) -> SnapshotTold:
    machine = row.machine
    return SnapshotTold(
        snapshot_id=row.id,
        names=row.names,
        cpu_count=machine.cpus,
        memory_mb=machine.memory_mib,
        disk_size_mb=machine.disk_mib,
        created_at=row.created_at,
        updated_at=max(moment(entry.created_at) for entry in row.versions),
    )


@router.post(
    "/sandboxes/{sandbox_id}/snapshots", status_code=201, responses=documented(404, 409, 422, 502, 504, 507)
)
async def create(info: Found, serving: Serving, body: SnapshotAsked | None = None) -> SnapshotTold:
    """Commit its present state; it runs on. A name that exists gets another version."""
    asked = body or SnapshotAsked()
    if info.state in (State.PAUSED, State.PAUSING):
        raise Conflict(f"sandbox {info.sandbox_id} is paused: nothing runs to be kept", fix="connect to it first")
    name, tags = _publication(asked.name)
    request = SnapshotRequest(
        name=name, tags=tags, memory=asked.memory is not False, labels={SANDBOX_LABEL: info.sandbox_id}
    )
    try:
        with serving.metrics.operation("snapshot"):
            made = await serving.node.snapshot(info.sandbox_id, request)
    except NotFound:
        raise gone(info.sandbox_id) from None
    catalog = await serving.catalog()
    return _told(await asyncio.to_thread(_row, catalog, made.snapshot_id))


def _publication(written: str | None) -> tuple[Name, tuple[Tag, ...]]:
    if written is None:
        return Name(UNNAMED + secrets.token_hex(8)), ()
    try:
        reference = catalog_reference(written)
    except NotFound as error:
        raise InvalidInput(f"name: {written[:80]!r} cannot be one", fix="use letters, digits, - and _") from error
    if reference.alias is None:
        raise InvalidInput(f"name: {written[:80]!r} reads like a snapshot's id", fix="add a letter g-z")
    tag = reference.text.partition(":")[2]
    if tag.isdigit():
        raise InvalidInput(f"name: {written[:80]!r} has a version; it is given the next one", fix="leave it out")
    return Name(reference.alias), (Tag(tag),) if tag else ()


def _row(catalog: Catalog, id: SnapshotId) -> Row:
    """Blocking: one; ``NotFound`` when it was made of no sandbox, or removed."""
    row = next((row for row in _rows(catalog) if row.id == id), None)
    if row is None:
        raise NotFound(f"snapshot {id.short} was not found")
    return row


@router.get("/snapshots", responses=documented())
async def list_snapshots(
    serving: Serving,
    response: Response,
    sandbox_id: Annotated[str | None, Query(alias="sandboxID", max_length=256)] = None,
    name: Annotated[str | None, Query(max_length=256)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    next_token: Annotated[str | None, Query(alias="nextToken", max_length=1024)] = None,
) -> list[SnapshotTold]:
    """Those made of sandboxes, newest first; also of sandboxes that are gone."""
    catalog = await serving.catalog()
    rows = await asyncio.to_thread(_rows, catalog)
    if sandbox_id is not None:
        rows = [row for row in rows if any(e.labels[SANDBOX_LABEL] == sandbox_id for e in row.versions)]
    if name is not None:
        wanted = _alias(name)
        rows = [row for row in rows if any(wanted in (e.name, e.reference) for e in row.versions)]
    shown, following = page(
        rows, lambda row: (row.created_at.timestamp(), row.id), token=next_token, limit=limit, oldest_first=False
    )
    if following is not None:
        response.headers[NEXT_TOKEN] = following
    return list(map(_told, shown))


def _alias(name: str) -> str:
    try:
        return catalog_reference(name).text
    except NotFound:
        return ""


@router.get("/snapshots/{snapshot_id:path}", responses=documented(404))
async def get(snapshot_id: str, serving: Serving) -> SnapshotTold:
    """One, by id, name, ``name:tag`` or ``name:version``."""
    catalog = await serving.catalog()

    def read() -> Row:
        text = catalog_reference(snapshot_id).text
        return _row(catalog, catalog.resolve(text).snapshot_id)

    try:
        return _told(await asyncio.to_thread(read))
    except NotFound as error:
        raise refuse(404, f"snapshot {snapshot_id[:80]!r} was not found", error_code="not_found") from error


async def was_removed(server: Server, id: SnapshotId) -> bool:
    """Whether it was made of a sandbox and then taken back, though its bytes may still be there."""
    catalog = await server.catalog()

    def look() -> bool:
        try:
            labels = catalog.repository.snapshot(id).labels
        except (NotFound, CorruptData):
            return False  # whoever launches it says what it is
        return SANDBOX_LABEL in labels and not catalog.all.is_live(id)

    return await asyncio.to_thread(look)


async def delete_snapshot(server: Server, written: str) -> bool:
    """Take back every version that is this snapshot, or all that a bare name has; False where there is none.

    Only what was made of a sandbox: a name that has something else is a template. Sandboxes that were started from
    it, and what grew from it, stay whole.
    """
    catalog = await server.catalog()
    try:
        reference = catalog_reference(written)
    except NotFound:
        return False

    def going() -> tuple[Entry, ...]:
        if reference.text == reference.alias:
            entries = tuple(catalog.entries(Name(reference.alias)))
            return entries if all(SANDBOX_LABEL in entry.labels for entry in entries) else ()
        return _row(catalog, catalog.resolve(reference.text).snapshot_id).versions

    def remove() -> bool:
        try:
            found = going()
        except NotFound:
            return False
        for entry in found:
            try:
                catalog.remove(entry.name, entry.version)
            except NotFound:
                continue  # somebody else was faster
        return bool(found)

    return await asyncio.to_thread(remove)
