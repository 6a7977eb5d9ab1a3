"""What names, versions and snapshots take in a repository: what only they need, and what others need too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from pydantic import ConfigDict, Field

from aenv_run.catalog.names import Catalog
from aenv_run.catalog.reference import Reference
from aenv_run.errors import CorruptData, InvalidInput, NotFound, Unsupported
from aenv_run.repository import RECORD_KINDS, Repository
from aenv_run.snapshot import Snapshot
from aenv_run.store import KeyInfo
from aenv_run.types import Digest, Model, Name, SnapshotId, StageKey

BUILD_CACHE, UNNAMED = "(build cache)", "(unnamed)"


class Used(Model):
    """What some snapshots need of the repository.

    ``logical_bytes``: their files, each counted once, as a machine sees them. ``stored_bytes``: what of them is on
    disk or in the bucket, packed blobs as packed and files with holes without them. ``unique_bytes`` of that no
    other snapshot needs, so it is what their removal lets a collection free; ``shared_bytes`` is the rest.
    """

    of: str
    snapshots: int
    logical_bytes: int = 0
    stored_bytes: int = 0
    unique_bytes: int = 0
    shared_bytes: int = 0


class Usage(Model):
    """``total`` is of all snapshots together; ``orphan_bytes`` is stored besides and needed by none."""

    rows: tuple[Used, ...]
    total: Used
    blobs: int
    packed_blobs: int
    orphan_bytes: int
    unreadable: tuple[SnapshotId, ...] = Field((), description="manifests that cannot be read; not counted")


class _Record(Model):
    """What a builder's record may say that counts here."""

    model_config = ConfigDict(extra="ignore")

    snapshot_id: SnapshotId | None = None


@dataclass(frozen=True)
class _Need:
    """What one snapshot needs: blobs with their sizes, and of those the ones that only carry others' digests."""

    files: dict[Digest, int]
    tables: frozenset[Digest]

    @classmethod
    def of(cls, snapshot: Snapshot) -> _Need:
        return cls(
            {blob.digest: blob.size_bytes for blob in snapshot.files()},
            frozenset(blob.chunks for blob in snapshot.files() if blob.chunks is not None),
        )

    def digests(self) -> set[Digest]:
        return {*self.files, *self.tables}


def usage(catalog: Catalog, references: Iterable[str] = ()) -> Usage:
    """By name, or of each of ``references``: a name with all its versions, a version, a tag or an id.

    Reads every manifest, and asks the store for the size of every blob. Bytes change while others write: what is
    gone when it is looked at is not counted.
    """
    return _Survey(catalog).usage(tuple(references))


class _Survey:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog, self._repository = catalog, catalog.repository
        self._needs: dict[SnapshotId, _Need] = {}
        self._unreadable: list[SnapshotId] = []
        for id in self._repository.ids():
            try:
                self._needs[id] = _Need.of(self._repository.snapshot(id))
            except NotFound:
                continue
            except (CorruptData, Unsupported):
                self._unreadable.append(id)
        self._users = Counter(digest for need in self._needs.values() for digest in need.digests())
        self._stored: dict[Digest, int] = {}
        self._packed = 0
        for info in (*self._list("blobs/"), *self._list("packed/")):
            with suppress(InvalidInput):
                digest = Digest(f"sha256:{info.key.rpartition('/')[2]}")
                self._stored[digest] = self._stored.get(digest, 0) + _disk_bytes(self._repository, info)
                self._packed += info.key.startswith("packed/")

    def usage(self, references: tuple[str, ...]) -> Usage:
        rows = [row for reference in references for row in self._of(reference)] if references else self._all()
        return Usage(
            rows=tuple(rows),
            total=self._used("total", set(self._needs)),
            blobs=len(self._stored),
            packed_blobs=self._packed,
            orphan_bytes=sum(size for digest, size in self._stored.items() if digest not in self._users),
            unreadable=tuple(self._unreadable),
        )

    def _all(self) -> Iterator[Used]:
        named: set[SnapshotId] = set()
        for name in self._catalog.names():
            ids = set(self._versions(name).values())
            named |= ids
            if ids:
                yield self._used(name, ids)
        recorded = (self._recorded() & self._needs.keys()) - named
        if recorded:
            yield self._used(BUILD_CACHE, recorded)
        if rest := self._needs.keys() - named - recorded:
            yield self._used(UNNAMED, set(rest))

    def _of(self, reference: str) -> Iterator[Used]:
        wanted = Reference.parse(reference)
        if wanted.name is not None and wanted.version is None and wanted.tag is None:
            versions = self._versions(wanted.name)
            if not versions:
                raise self._catalog.version_log.unknown(wanted.name)
            for one, id in versions.items():
                yield self._used(one, {id})
            yield self._used(wanted.name, set(versions.values()))
            return
        resolved = self._catalog.resolve(reference)
        self._repository.snapshot(resolved.snapshot_id)  # says what is wrong with it
        yield self._used(reference, {resolved.snapshot_id})

    def _versions(self, name: Name) -> dict[str, SnapshotId]:
        found: dict[str, SnapshotId] = {}
        for version in self._catalog.versions(name):
            with suppress(CorruptData, Unsupported):  # for check
                record = self._catalog.version_log.read(name, version)
                if record is not None and record.snapshot_id in self._needs:
                    found[f"{name}:{version}"] = record.snapshot_id
        return found

    def _recorded(self) -> set[SnapshotId]:
        found: set[SnapshotId] = set()
        for kind in RECORD_KINDS:
            for info in self._list(f"refs/{kind}/"):
                with suppress(CorruptData, InvalidInput):
                    record = self._repository.recall(kind, StageKey(info.key.rpartition("/")[2]), _Record)
                    if record is not None and record.snapshot_id is not None:
                        found.add(record.snapshot_id)
        return found

    def _used(self, of: str, ids: set[SnapshotId]) -> Used:
        needs = [self._needs[id] for id in ids if id in self._needs]
        files = {digest: size for need in needs for digest, size in need.files.items()}
        own = Counter(digest for need in needs for digest in need.digests())
        stored = {digest: self._stored.get(digest, 0) for digest in own}
        unique = sum(size for digest, size in stored.items() if own[digest] == self._users[digest])
        total = sum(stored.values())
        return Used(
            of=of, snapshots=len(needs), logical_bytes=sum(files.values()), stored_bytes=total,
            unique_bytes=unique, shared_bytes=total - unique,
        )  # fmt: skip

    def _list(self, prefix: str) -> Iterator[KeyInfo]:
        return self._repository.store.list(prefix)


def _disk_bytes(repository: Repository, info: KeyInfo) -> int:
    """What it takes: of a file of this machine without its holes."""
    if repository.store.has_files and (path := repository.store.local_path(info.key)) is not None:
        with suppress(FileNotFoundError):
            return path.stat(follow_symlinks=False).st_blocks * 512
        return 0  # packed or collected meanwhile
    return info.size_bytes
