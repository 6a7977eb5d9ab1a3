"""Snapshots over a store: the only door from a Capture to a Snapshot.

Keys and bytes are described in docs/snapshot-format.md. Nothing that a store returns is believed before it
was checked: manifests against their id, blobs against their digest, records against their form and size.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from pydantic import Field, ValidationError

from aenv_run.blobs import Blobs, VerifiedReader
from aenv_run.capture import Capture
from aenv_run.chunk_table import ChunkTable, table_bytes
from aenv_run.describe import Described, describe, require_unchanged
from aenv_run.digest import canonical_json
from aenv_run.errors import AenvError, Conflict, CorruptData, InvalidInput, NotFound
from aenv_run.garbage.lock import CollectorLock
from aenv_run.garbage.state import Gate, Watch
from aenv_run.hooks import Hooks
from aenv_run.signatures import Trust
from aenv_run.snapshot import MAX_MANIFEST_BYTES, Blob, MemoryPart, Provenance, Snapshot
from aenv_run.store import Store, StoreKey
from aenv_run.store.identity import FileIdentity
from aenv_run.stored_json import canonical, first_error, parse_record
from aenv_run.types import Architecture, Context, Digest, MachineSpec, Model, SnapshotId, StageKey

#: Refs and records are small; a store that offers more is lying.
MAX_RECORD_BYTES = 64 << 10
#: The kinds of records by stage key.
RECORD_KINDS = ("stages", "outputs")
#: Identities of files that this process digested; forgetting one costs a digest.
MAX_REMEMBERED = 10_000

#: How often a writer that meets batches of a collector looks again before it gives up.
RACE_TRIES = 20

M = TypeVar("M", bound=Model)


class Draft(Model):
    """All of a snapshot but what the capture brings.

    ``disk_below``: the chain that the machine ran on. ``memory_below``: the memory image that it was restored
    from, by role; the capture says which of its files stay.
    """

    parent: SnapshotId | None = None
    architecture: Architecture
    machine: MachineSpec
    context: Context = Field(default_factory=Context)
    hooks: Hooks | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    provenance: Provenance = Field(default_factory=Provenance)
    disk_below: tuple[Blob, ...] = ()
    memory_below: dict[str, Blob] = Field(default_factory=dict)


class Repository:
    """Blocking and thread-safe, as its store is. ``gate`` tells whether a collector deletes."""

    def __init__(self, store: Store, gate: Gate | None = None) -> None:
        self.store = store
        self.gate = gate or Gate(store)
        self.blobs = Blobs(store)
        #: One of these keys must have signed what is launched or built on; None: nobody need.
        self.trust: Trust | None = None
        #: Whether launches and builds go on where their lease can never be written.
        self.allow_unheld = False
        self.own: set[SnapshotId] = set()  # what this process committed
        self._digested: dict[Digest, FileIdentity] = {}

    # Snapshots

    def commit(self, capture: Capture, draft: Draft) -> Snapshot:
        """Make the captured state durable; nothing refers to it yet, so the caller writes a ref next.

        Blobs first, each checked, then the manifest. If it fails, nothing is visible, the capture is whole,
        and the same call may be repeated. On success the captured files belong to the repository and their
        names in the capture's directory are gone. What a garbage collector takes meanwhile is put back.
        """
        watch = self.gate.watch()
        if bool(capture.memory or capture.memory_below) != (capture.facts is not None):
            raise InvalidInput("a capture with memory needs the facts it is bound to, and one without has none")
        if missing := [role for role in capture.memory_below if role not in draft.memory_below]:
            raise InvalidInput(f"the capture's memory stands on files that the draft lacks: {', '.join(missing)}")
        if draft.parent is not None:
            self.snapshot(draft.parent)
        for below in (*draft.disk_below, *(draft.memory_below[role] for role in capture.memory_below)):
            for blob in below.with_table:
                self.require_blob(blob)
        roles = sorted(capture.memory)
        files = [*capture.disk, *(capture.memory[role] for role in roles)]
        described = describe(files)
        blobs = tuple(one.blob for one in described)
        memory = None
        if capture.facts is not None:
            own = dict(zip(roles, blobs[len(capture.disk) :], strict=True))
            memory = MemoryPart(files=capture.whole_memory(draft.memory_below, own), facts=capture.facts)
        snapshot = _compose(draft, draft.disk_below + blobs[: len(capture.disk)], memory)
        self._store_whole(
            snapshot, {one.blob.digest: path for path, one in zip(files, described, strict=True)}, described, watch
        )
        self._remember(described)
        self.own.add(snapshot.id)
        for path in files:
            path.unlink(missing_ok=True)
        with suppress(OSError):  # whatever else the owner keeps there stays
            capture.directory.rmdir()
        return snapshot

    def snapshot(self, id: SnapshotId) -> Snapshot:
        """The manifest, verified against its id."""
        key = manifest_key(id)
        try:
            data = self.store.read(key, limit_bytes=MAX_MANIFEST_BYTES)
        except NotFound:
            raise NotFound(f"snapshot {id} is not in this repository", fix="list them: aenv catalog ls") from None
        return parse_manifest(id, data, f"the manifest of snapshot {id} ({key})")

    def adopt(self, snapshot: Snapshot, files: Mapping[Digest, Path]) -> None:
        """Make a snapshot of another repository durable under the id that it has there; nothing refers to it yet.

        ``files`` are those of its blobs that are not here, sealed, in a directory of the caller's own; as in
        ``commit`` they are given away. ``CorruptData`` for one that is not its blob; then nothing was written.
        """
        watch = self.gate.watch()
        if snapshot.parent is not None:
            self.ancestor(snapshot.parent)
        described = describe(list(files.values()))
        tables = {blob.digest: blob.chunks for blob in snapshot.blobs()}
        for digest, one in zip(files, described, strict=True):
            if one.blob.digest != digest:
                raise CorruptData(
                    f"what is said to be blob {digest} has the digest {one.blob.digest}", fix="get it again"
                )
            if tables.get(digest) not in (None, one.blob.chunks):
                raise CorruptData(
                    f"the chunk table that snapshot {snapshot.id.short} names for blob {digest} is of another blob"
                )
        for blob in snapshot.files():  # here already, perhaps from before there were tables
            if blob.chunks is not None and blob.chunks in files and blob.digest not in files:
                self._require_table_of(blob, files[blob.chunks])
        self._store_whole(snapshot, files, described, watch)
        self._remember(described)
        for path in files.values():
            path.unlink(missing_ok=True)

    def _require_table_of(self, blob: Blob, path: Path) -> None:
        """``CorruptData`` unless the file is the table of the stored blob. Reads all of that."""
        what = f"{blob.chunks}, said to be of blob {blob.digest},"
        with path.open("rb") as file:
            table = ChunkTable.parse(file.read(table_bytes(blob.size_bytes) + 1), blob.size_bytes, what)
        self.blobs.verify_form(blob, self.blobs.require(blob), table)

    def ancestor(self, id: SnapshotId) -> Snapshot:
        """The manifest, also when the snapshot was collected and only the memory of it is kept."""
        try:
            return self.snapshot(id)
        except NotFound as error:
            try:
                return self.collected(id)
            except NotFound:
                raise error from None

    def collected(self, id: SnapshotId) -> Snapshot:
        """The manifest of a snapshot that was collected, and from which one that is kept grew."""
        key = collected_key(id)
        data = self.store.read(key, limit_bytes=MAX_MANIFEST_BYTES)
        return parse_manifest(id, data, f"the manifest of the collected snapshot {id} ({key})")

    def remember(self, snapshot: Snapshot) -> None:
        """Keep the manifest of a snapshot that was collected elsewhere: one that grew from it comes next."""
        self.store.put_new(collected_key(snapshot.id), canonical_json(snapshot))

    def require_whole(self, snapshot: Snapshot) -> None:
        """``NotFound`` or ``CorruptData`` unless its manifest and its blobs are there. Reads no blob."""
        self.snapshot(snapshot.id)
        for blob in dict.fromkeys(snapshot.blobs()):
            self.require_blob(blob)

    def find(self, prefix: str) -> SnapshotId:
        """The one snapshot whose id starts with ``prefix`` (4 hex digits or more)."""
        if not re.fullmatch(r"[0-9a-f]{4,64}", prefix):
            raise InvalidInput(f"{prefix[:80]!r} is not the start of a snapshot id: 4 to 64 digits 0-9, a-f")
        found: list[SnapshotId] = []
        for info in self.store.list(f"snapshots/{prefix[:2]}/{prefix}"):
            if (id := _manifest_id(info.key)) is not None:
                found.append(id)
            if len(found) > 10:
                break
        if not found:
            raise NotFound(f"no snapshot id starts with {prefix}", fix="list them: aenv catalog ls")
        if len(found) > 1:
            raise Conflict(f"{prefix} is the start of several ids: {', '.join(found)}", fix="give more digits")
        return found[0]

    def ids(self) -> Iterator[SnapshotId]:
        """Every committed snapshot, in order of id."""
        for info in self.store.list("snapshots/"):
            if (id := _manifest_id(info.key)) is not None:
                yield id

    # Records

    def record(self, kind: str, key: StageKey, value: M) -> M:
        """Keep ``value`` under ``key`` unless there is one already; returns the one that is kept."""
        data = canonical(value, f"the {kind} record of {key}")
        if len(data) > MAX_RECORD_BYTES:
            raise InvalidInput(f"the {kind} record of {key} has {len(data)} bytes, more than {MAX_RECORD_BYTES}")
        if self.store.put_new(record_key(kind, key), data):
            return value
        kept = self.recall(kind, key, type(value))
        return value if kept is None else kept

    def recall(self, kind: str, key: StageKey, model: type[M]) -> M | None:
        """The value kept under ``key``, or None."""
        return self.read_ref(record_key(kind, key), model)

    def touch(self, kind: str, key: StageKey, *, older_than_s: float) -> None:
        """Make the record young again if it is older: it is of use."""
        place = record_key(kind, key)
        found = self.store.stat(place)
        if found is not None and time.time() - found.modified_s > older_than_s:
            data = self.store.read(place, limit_bytes=MAX_RECORD_BYTES)
            self.store.swap(place, data, expected=data)

    def forget(self, kind: str, key: StageKey) -> None:
        """Drop the record, so that it can be kept anew. No error when absent."""
        self.store.delete(record_key(kind, key))

    def read_ref(self, key: StoreKey, model: type[M], *, limit_bytes: int = MAX_RECORD_BYTES) -> M | None:
        """A small JSON object of the store, bounded and validated; None when absent."""
        try:
            data = self.store.read(key, limit_bytes=limit_bytes)
        except NotFound:
            return None
        return parse_record(model, data, str(key))

    # Blobs

    def blob_key(self, digest: Digest) -> StoreKey:
        """Where the blob is, unless it is packed."""
        return self.blobs.raw_key(digest)

    @contextmanager
    def open_blob(self, blob: Blob | Digest) -> Iterator[VerifiedReader]:
        """A reader of the blob from its start that raises ``CorruptData`` at the end if the digest differs.

        Of a ``Blob`` it also does so as soon as more comes than the blob has.
        """
        with self.blobs.open(blob) as reader:
            yield reader

    def require_blob(self, blob: Blob) -> None:
        """``CorruptData`` unless the blob is there, in any form, with the right size. Reads no content."""
        self.blobs.require(blob)

    def verify_blob(self, blob: Blob) -> None:
        """``CorruptData`` unless the stored bytes have the blob's size, digest and chunks. Reads all of it."""
        self.blobs.verify(blob)

    def has_digested(self, blob: Blob, identity: FileIdentity) -> bool:
        """Whether this process committed exactly that file as this blob, so that it need not be read again."""
        return identity.size_bytes == blob.size_bytes and self._digested.get(blob.digest) == identity

    def _remember(self, described: Sequence[Described]) -> None:
        if len(self._digested) > MAX_REMEMBERED:
            self._digested = {}
        self._digested.update({one.blob.digest: one.identity for one in described if one.identity})

    def _store_whole(
        self, snapshot: Snapshot, files: Mapping[Digest, Path], described: Sequence[Described], watch: Watch
    ) -> None:
        """Its blobs, then its manifest. ``watch`` began before anybody looked at what is there."""
        given = {one.blob.digest: one.table for one in described}
        tables = {one.blob.chunks: one for one in described if one.blob.chunks is not None}
        for attempt in range(RACE_TRIES):
            try:
                if attempt and snapshot.parent is not None:
                    self.ancestor(snapshot.parent)
                for needed in dict.fromkeys(snapshot.blobs()):
                    if needed.digest in files:
                        self.blobs.put(files[needed.digest], needed, given[needed.digest])
                    elif (one := tables.get(needed.digest)) is not None and one.table is not None:
                        self.blobs.put_table(one.blob, one.table)
                    else:
                        self.require_blob(needed)
            except (CorruptData, NotFound) as error:
                if not watch.quiet():
                    watch.wait()
                    continue
                if attempt == 0:
                    raise
                self._take_back(snapshot)
                raise Conflict(f"{error.message}: it was collected as garbage just now", fix="try again") from None
            require_unchanged(files, described)
            if watch.quiet():
                self._put_manifest(snapshot)
                if watch.quiet():
                    return
            watch.wait()
        self._take_back(snapshot)
        raise Conflict(f"snapshot {snapshot.id} met too many batches of a garbage collector", fix="try again")

    def _take_back(self, snapshot: Snapshot) -> None:
        """Leave no manifest of what is not whole. Under the lock: whoever commits the same now looks again."""
        lock = CollectorLock(self.gate, "undo")
        with suppress(AenvError):  # then it is left to the next collection: nothing refers to it
            lock.acquire()
            try:
                if self.store.stat(manifest_key(snapshot.id)) is not None and not self._stands(snapshot):
                    lock.require()
                    self.store.delete(manifest_key(snapshot.id))
            finally:
                lock.release()

    def _stands(self, snapshot: Snapshot) -> bool:
        try:
            if snapshot.parent is not None:
                self.ancestor(snapshot.parent)
            self.require_whole(snapshot)
        except (CorruptData, NotFound):
            return False
        return True

    def _put_manifest(self, snapshot: Snapshot) -> None:
        """One that is there already is written again: its age counts from its last use."""
        key, data = manifest_key(snapshot.id), canonical_json(snapshot)
        while not (self.store.put_new(key, data) or self.store.swap(key, data, expected=data)):
            with suppress(NotFound):
                self.snapshot(snapshot.id)  # raises when it is damaged


def parse_manifest(id: SnapshotId, data: bytes, what: str) -> Snapshot:
    """The snapshot whose manifest ``data`` is: it has that id, is strictly read, and in canonical form."""
    found = hashlib.sha256(data).hexdigest()
    if found != id:
        raise CorruptData(
            f"{what} is damaged: its sha256 is {found} ({len(data)} bytes)",
            fix="restore the file from a copy or build the snapshot again",
        )
    snapshot = parse_record(Snapshot, data, what)
    if snapshot.id != id:
        raise CorruptData(f"{what} is not in canonical form")
    return snapshot


def manifest_key(id: SnapshotId) -> StoreKey:
    """Where the manifest is."""
    return StoreKey(f"snapshots/{id[:2]}/{id}")


def collected_key(id: SnapshotId) -> StoreKey:
    """Where the manifest of a collected snapshot is, as long as a kept one grew from it."""
    return StoreKey(f"collected/{id[:2]}/{id}")


def record_key(kind: str, key: StageKey) -> StoreKey:
    """Where a record is."""
    if kind not in RECORD_KINDS:
        raise InvalidInput(f"{kind!r} is not a kind of record: {', '.join(RECORD_KINDS)}")
    return StoreKey(f"refs/{kind}/{key}")


def _manifest_id(key: StoreKey) -> SnapshotId | None:
    match = re.fullmatch(r"snapshots/([0-9a-f]{2})/(\1[0-9a-f]{62})", key)
    return SnapshotId(match[2]) if match else None


def _compose(draft: Draft, disk: tuple[Blob, ...], memory: MemoryPart | None) -> Snapshot:
    fields = {name: getattr(draft, name) for name in Draft.model_fields if not name.endswith("_below")}
    try:
        snapshot = Snapshot(disk=disk, memory=memory, **fields)
        Snapshot.model_validate(snapshot.model_dump())  # parts that were copied with changes were not looked at
    except ValidationError as error:
        raise InvalidInput(f"these parts make no snapshot: {first_error(error)}") from None
    if len(canonical(snapshot, "the manifest")) > MAX_MANIFEST_BYTES:
        raise InvalidInput(
            f"the manifest would be larger than {MAX_MANIFEST_BYTES} bytes",
            fix="shorten its labels and its environment",
        )
    return snapshot
