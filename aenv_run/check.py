"""Is the repository whole? Reads only; may run beside builds and launches."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Literal

from aenv_run.blobs import Stored
from aenv_run.catalog import LabelsRecord, MovesPage, RemovedRecord, TagRecord, VersionRecord
from aenv_run.chunk_table import ChunkTable
from aenv_run.errors import AenvError, CorruptData, InvalidInput, NotFound, Unsupported
from aenv_run.garbage.leases import MARKS, NodeMark, read_lease
from aenv_run.garbage.lost import lost_holds
from aenv_run.garbage.state import MAX_STATE_BYTES, STATE_KEY, GcState
from aenv_run.minisign import MAX_TEXT_BYTES, Signature
from aenv_run.repository import MAX_RECORD_BYTES, RECORD_KINDS, Repository
from aenv_run.snapshot import Blob, Snapshot
from aenv_run.store import KeyInfo, StoreKey
from aenv_run.store.posix_rights import concerns
from aenv_run.types import Digest, Model, Name, SnapshotId, StageKey, Tag

Kind = Literal[
    "unreadable_ref",
    "unreadable_lease",
    "unreadable_manifest",
    "unreadable_signature",
    "missing_manifest",
    "missing_blob",
    "wrong_size",
    "damaged_blob",
    "unknown_file",
    "unavailable",
    "unknown_format",
]


#: How often one that met a garbage collector begins again.
CHECK_TRIES = 3
COUNTS = (
    "snapshots",
    "unreferenced_snapshots",
    "blobs",
    "packed_blobs",
    "blob_bytes",
    "blobs_digested",
    "orphan_blobs",
    "orphan_blob_bytes",
    "versions",
    "tags",
    "dangling_tags",
    "records",
    "temporaries",
    "leases",
    "signatures",
    "collected",
    "quarantined",
)


class Problem(Model):
    """Something that is not as it must be."""

    kind: Kind
    key: str
    detail: str


class Warned(Model):
    """Something that is whole and may yet cost data."""

    about: str
    detail: str
    fix: str


class Report(Model):
    """``problems`` is empty when the repository is whole; ``counts`` is what was seen, for information."""

    problems: tuple[Problem, ...]
    warnings: tuple[Warned, ...] = ()
    counts: dict[str, int]

    @property
    def ok(self) -> bool:
        """No problems."""
        return not self.problems


def check(repository: Repository, *, deep: bool = False) -> Report:
    """Look at every ref, manifest and blob; with ``deep`` also digest every blob that a snapshot needs.

    Not problems, only counted: blobs and snapshots that nothing refers to, temporaries of writers, and tags
    whose version was removed.
    """
    for _ in range(CHECK_TRIES):
        watch = repository.gate.watch()
        report = look(repository, deep=deep)
        if report.ok or watch.quiet():
            break
        with suppress(AenvError):  # a collector at work: what went while we looked looks as if it were missing
            repository.gate.wait_until_free(heal=False)
    return report


def look(repository: Repository, *, deep: bool = False) -> Report:
    """As ``check``, once, whoever collects garbage meanwhile: for one who holds the lock."""
    return _Check(repository, deep=deep).run()


class _Check:
    def __init__(self, repository: Repository, *, deep: bool) -> None:
        self._repository = repository
        self._deep = deep
        self._problems: list[Problem] = []
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self._users: dict[SnapshotId, set[str]] = {}  # snapshot -> refs and children that need it
        self._needed: dict[Blob, set[str]] = {}  # blob -> snapshots
        self._versions: set[tuple[str, str]] = set()
        self._removed: set[tuple[str, str]] = set()
        self._tags: dict[tuple[str, str], int] = {}
        self._gone: set[SnapshotId] = set()  # collected, or moved away by a repair: their children stay

    def run(self) -> Report:
        # Writers go blob, manifest, ref. Read the other way round, all that is needed was there before.
        for info in self._repository.store.list("refs/"):
            self._ref(info.key)
        snapshots = self._snapshots()
        blobs: dict[Digest, list[Stored]] = {}
        for info in self._repository.store.list(""):
            if (stored := self._classify(info)) is not None:
                blobs.setdefault(Digest(f"sha256:{info.key[-64:]}"), []).append(stored)
        self._references(snapshots)
        self._blobs(blobs)
        self._strays()
        self._tally(snapshots, blobs)
        return Report(
            problems=tuple(self._problems),
            warnings=tuple(self._warnings()),
            counts=dict(sorted(self._counts.items())),
        )

    def _warnings(self) -> Iterator[Warned]:
        for lost in lost_holds(self._repository):
            yield Warned(about=f"holder {lost.id}", detail=f"nothing is collected: {lost}", fix=lost.fix)
        for concern in concerns(self._repository.store):
            yield Warned(about="repository", detail=concern.detail, fix=concern.fix)

    def _problem(self, kind: Kind, key: str, detail: str) -> None:
        self._problems.append(Problem(kind=kind, key=key, detail=detail))

    def _failed(self, kind: Kind, key: str, error: AenvError, more: str = "") -> None:
        """What could not be read; neither a store that does not answer nor a newer format is damage."""
        known: Kind = "unknown_format" if isinstance(error, Unsupported) else kind
        self._problem("unavailable" if error.retryable else known, key, error.message + more)

    def _ref(self, key: StoreKey) -> None:
        reader = _ref_reader(key)
        if reader is None:
            return  # reported as an unknown file
        try:
            reader(self, key)
        except AenvError as error:
            self._failed("unreadable_ref", key, error)

    def _version_ref(self, key: StoreKey) -> None:
        if (record := self._repository.read_ref(key, VersionRecord)) is not None:
            self._counts["versions"] += 1
            self._users.setdefault(record.snapshot_id, set()).add(key)
            _, _, name, version = key.split("/")
            self._versions.add((name, version))

    def _removed_ref(self, key: StoreKey) -> None:
        if self._repository.read_ref(key, RemovedRecord) is not None:
            _, _, name, version = key.split("/")
            self._removed.add((name, version))

    def _tag_ref(self, key: StoreKey) -> None:
        record = self._repository.read_ref(key, TagRecord)
        if record is not None and record.version is not None:  # one that was removed is kept for its moves
            self._counts["tags"] += 1
            _, _, name, tag = key.split("/")
            self._tags[name, tag] = record.version

    def _moves_ref(self, key: StoreKey) -> None:
        page = self._repository.read_ref(key, MovesPage)
        if page is not None and str(page.moves[0].number) != key.rpartition("/")[2]:
            raise CorruptData(f"{key} begins with move {page.moves[0].number}")

    def _labels_ref(self, key: StoreKey) -> None:
        self._repository.read_ref(key, LabelsRecord)

    def _stage_ref(self, key: StoreKey) -> None:
        """The builder owns these records: all that is known here is that they may name a snapshot."""
        try:
            value = json.loads(self._repository.store.read(key, limit_bytes=MAX_RECORD_BYTES))
        except NotFound:
            return
        except (ValueError, RecursionError) as error:
            raise CorruptData(f"{key} is no JSON: {error}") from None
        if not isinstance(value, dict):
            raise CorruptData(f"{key} is no JSON object")
        self._counts["records"] += 1
        if (id := value.get("snapshot_id")) is not None:
            if not isinstance(id, str):
                raise CorruptData(f"{key} has a snapshot_id that is no string")
            self._users.setdefault(SnapshotId(id), set()).add(key)

    def _snapshots(self) -> dict[SnapshotId, Snapshot | None]:
        found: dict[SnapshotId, Snapshot | None] = {}
        for id in self._repository.ids():
            try:
                found[id] = snapshot = self._repository.snapshot(id)
            except NotFound:
                continue  # collected meanwhile
            except AenvError as error:
                found[id] = None
                self._failed("unreadable_manifest", f"snapshots/{id[:2]}/{id}", error)
                continue
            for blob in snapshot.blobs():
                self._needed.setdefault(blob, set()).add(id.short)
            if snapshot.parent is not None:
                self._users.setdefault(snapshot.parent, set()).add(f"snapshots/{id[:2]}/{id}")
        return found

    def _classify(self, info: KeyInfo) -> Stored | None:
        """A form of a blob; a key of no known form is a problem."""
        if match := re.fullmatch(r"(blobs|packed)/sha256/([0-9a-f]{2})/\2[0-9a-f]{62}", info.key):
            return Stored(info, packed=match[1] == "packed")
        if self._is_of_collectors(info) or self._is_signature(info.key):
            return None
        if _ref_reader(info.key) is None and not re.fullmatch(r"snapshots/([0-9a-f]{2})/\1[0-9a-f]{62}", info.key):
            self._problem("unknown_file", info.key, "no such object is part of a repository")
        return None

    def _is_signature(self, key: StoreKey) -> bool:
        """Whose it is, and whether anybody would believe it, depends on the keys of whoever asks."""
        match = re.fullmatch(r"signatures/([0-9a-f]{2})/(\1[0-9a-f]{62})/([0-9A-F]{16})", key)
        if match is None:
            return False
        self._counts["signatures"] += 1
        try:
            found = Signature.parse(self._repository.store.read(key, limit_bytes=MAX_TEXT_BYTES), key)
            if found.key_name != match[3]:
                self._problem("unreadable_signature", key, f"it is by another key: {found.key_name}")
        except NotFound:
            pass
        except AenvError as error:
            self._problem("unreadable_signature", key, error.message)
        return True

    def _is_of_collectors(self, info: KeyInfo) -> bool:
        """Leases, manifests of what was collected, and what a repair moved away."""
        key = info.key
        if key.startswith("quarantine/"):
            self._counts["quarantined"] += 1
            if match := re.fullmatch(r"quarantine/[^/]+/(?:snapshots/[0-9a-f]{2}|lost)/([0-9a-f]{64})", key):
                self._gone.add(SnapshotId(match[1]))
            return True
        if match := re.fullmatch(r"collected/([0-9a-f]{2})/(\1[0-9a-f]{62})", key):
            self._counts["collected"] += 1
            self._gone.add(SnapshotId(match[2]))
            try:
                self._repository.collected(SnapshotId(match[2]))
            except NotFound:
                pass
            except AenvError as error:
                self._failed("unreadable_manifest", key, error)
            return True
        if not key.startswith("leases/"):
            return False
        self._counts["leases"] += 1
        if re.fullmatch(r"leases/clock/[0-9a-f]{32}", key):
            return True  # of a moment: how late it is by the store
        try:
            if key == STATE_KEY:
                self._repository.read_ref(key, GcState, limit_bytes=MAX_STATE_BYTES)
            elif re.fullmatch(MARKS + r"[0-9a-f]{32}", key):
                self._repository.read_ref(key, NodeMark)
            else:
                read_lease(self._repository, info)
        except AenvError as error:
            self._failed("unreadable_lease", key, error)
        return True

    def _references(self, snapshots: dict[SnapshotId, Snapshot | None]) -> None:
        for id, users in sorted(self._users.items()):
            if id not in snapshots and not self._exists(id):
                for user in sorted(users):
                    if id in self._gone and user.startswith("snapshots/"):
                        continue
                    self._problem("missing_manifest", user, f"refers to snapshot {id}, which does not exist")
        live = self._versions - self._removed
        for (name, _), version in self._tags.items():
            if (name, str(version)) not in live:
                self._counts["dangling_tags"] += 1

    def _exists(self, id: SnapshotId) -> bool:
        try:
            return self._repository.store.stat(StoreKey(f"snapshots/{id[:2]}/{id}")) is not None
        except AenvError:
            return False

    def _blobs(self, present: dict[Digest, list[Stored]]) -> None:
        for blob, users in sorted(self._needed.items(), key=lambda item: (item[0].digest, item[0].size_bytes)):
            need = f"needed by {', '.join(sorted(users)[:5])}{' and others' if len(users) > 5 else ''}"
            forms = present.get(blob.digest)
            if forms is None:
                self._problem("missing_blob", self._repository.blob_key(blob.digest), need)
                continue
            table = self._table(blob, need) if self._deep else None
            for stored in forms:
                self._form(blob, stored, table, need)

    def _form(self, blob: Blob, stored: Stored, table: ChunkTable | None, need: str) -> None:
        key, size = stored.info.key, stored.info.size_bytes
        try:
            if stored.packed:
                size = self._repository.blobs.index(stored).blob_bytes
            if size != blob.size_bytes:
                self._problem("wrong_size", key, f"{size} bytes instead of {blob.size_bytes}; {need}")
            elif self._deep:
                self._repository.blobs.verify_form(blob, stored, table)
                self._counts["blobs_digested"] += 1
        except NotFound:  # packed meanwhile, or collected
            if self._repository.blobs.find(blob.digest) is None and self._users_left(blob):
                self._problem("missing_blob", key, need)
        except AenvError as error:
            self._failed("damaged_blob", key, error, f"; {need}")

    def _users_left(self, blob: Blob) -> bool:
        """Whether a snapshot that needs it is still there."""
        ids = (
            id
            for short in self._needed[blob]
            for id in self._repository.store.list(f"snapshots/{short[:2]}/{short}")
        )
        return next(ids, None) is not None

    def _table(self, blob: Blob, need: str) -> ChunkTable | None:
        """None also if it is missing or damaged: it is a blob that is needed itself, and told as such."""
        try:
            return self._repository.blobs.table(blob)
        except AenvError as error:
            if blob.chunks is not None and self._is_whole(blob):
                self._failed("damaged_blob", self._repository.blob_key(blob.chunks), error, f"; {need}")
            return None

    def _is_whole(self, blob: Blob) -> bool:
        """Whether its table has the digest that it should have, so that nothing else tells of it."""
        try:
            if blob.table is not None:
                self._repository.verify_blob(blob.table)
        except AenvError:
            return False
        return True

    def _strays(self) -> None:
        for stray in self._repository.store.strays():
            if stray.kind == "temporary":
                self._counts["temporaries"] += 1
            else:
                self._problem("unknown_file", stray.path, stray.detail)

    def _tally(self, snapshots: dict[SnapshotId, Snapshot | None], blobs: dict[Digest, list[Stored]]) -> None:
        self._counts["snapshots"] = len(snapshots)
        needed = {blob.digest for blob in self._needed}
        self._counts["blobs"] = len(blobs)
        self._counts["packed_blobs"] = sum(any(one.packed for one in forms) for forms in blobs.values())
        self._counts["blob_bytes"] = _stored_bytes(blobs.values())
        orphans = [forms for digest, forms in blobs.items() if digest not in needed]
        self._counts["orphan_blobs"] = len(orphans)
        self._counts["orphan_blob_bytes"] = _stored_bytes(orphans)
        self._counts["unreferenced_snapshots"] = sum(id not in self._users for id in snapshots)


def _stored_bytes(blobs: Iterable[list[Stored]]) -> int:
    return sum(one.info.size_bytes for forms in blobs for one in forms)


NUMBERED = {"names": _Check._version_ref, "removed": _Check._removed_ref, "labels": _Check._labels_ref}


def _ref_reader(key: StoreKey) -> Callable[[_Check, StoreKey], None] | None:
    """How to read a ref of this form; None for a key that is no ref."""
    parts = key.split("/")
    try:
        if len(parts) == 4 and parts[0] == "refs":
            Name(parts[2])
            if (reader := NUMBERED.get(parts[1])) and re.fullmatch(r"[1-9][0-9]{0,8}", parts[3]):
                return reader
            if parts[1] == "tags":
                Tag(parts[3])
                return _Check._tag_ref
        if len(parts) == 5 and parts[:2] == ["refs", "moves"] and re.fullmatch(r"[1-9][0-9]{0,8}", parts[4]):
            Name(parts[2])
            Tag(parts[3])
            return _Check._moves_ref
        if len(parts) == 3 and parts[0] == "refs" and parts[1] in RECORD_KINDS:
            StageKey(parts[2])
            return _Check._stage_ref
    except InvalidInput:
        pass
    return None
