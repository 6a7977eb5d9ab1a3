"""``--cache-from``: results that other repositories have, copied into ours. They are only read.

Every manifest is compared with its id and every blob with its digest before it counts. That a result is what its
key says, no digest can tell: name only repositories whose builders are trusted.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Self, cast

from pydantic import AwareDatetime, Field

from aenv_run.config import open_repository, repository_directory
from aenv_run.errors import AenvError, CorruptData, NotFound
from aenv_run.paths import Home
from aenv_run.repository import Repository
from aenv_run.signatures import keep, require_signed, signatures_of
from aenv_run.snapshot import Blob, Snapshot
from aenv_run.store.sparse import write_stream_sparse
from aenv_run.types import Digest, Model, SnapshotId, StageKey

#: No honest snapshot grew from more.
MAX_LINEAGE = 1000


class KeptResult(Model):
    """The record at refs/stages/<key> and refs/outputs/<key>. Of a verify: the snapshot that it held for."""

    snapshot_id: SnapshotId
    at: AwareDatetime | None = Field(None, description="when; absent in records of older builders")

    def of(self, snapshot: Snapshot, origin: str = "") -> Kept:
        """The result with its snapshot."""
        return Kept(snapshot, self.at or _made_at(snapshot), origin)


@dataclass(frozen=True)
class Kept:
    """A result and when it was made. ``origin``: the repository that it was copied from just now."""

    snapshot: Snapshot
    at: datetime
    origin: str = ""


def _made_at(snapshot: Snapshot) -> datetime:
    try:
        found = datetime.fromisoformat(snapshot.provenance.created_at)
        return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)  # unknown counts as old


@dataclass(frozen=True)
class Other:
    """A repository that is not ours; ``url`` is how the user named it."""

    url: str
    repository: Repository


class Elsewhere:
    """Other repositories, in their order. Blocking. One that fails is not asked again; ``warnings`` say so."""

    def __init__(self, others: Sequence[Other], scratch: Path | None = None) -> None:
        self._others = list(others)
        self._scratch = scratch
        self.warnings: list[str] = []

    @classmethod
    def opened(cls, urls: Sequence[str], home: Home, scratch: Path | None = None) -> Self:
        """Of URLs; ``InvalidInput``, ``Unsupported`` for what is none. Without ``scratch`` nothing is copied."""
        found = cls([], scratch)
        for url in urls:
            other = Other(url, open_repository(url, home))
            directory = repository_directory(url, home)
            if directory is None or directory.is_dir():
                found._others.append(other)
            else:
                found.warnings.append(f"--cache-from {url}: there is no such directory; building without it")
        return found

    @property
    def copies(self) -> bool:
        """Whether what is found becomes ours."""
        return self._scratch is not None

    def bring(self, ours: Repository, kind: str, key: StageKey) -> Kept | None:
        """The result of the first that has it whole, copied into ours if it is to be; None without one."""
        for other in list(self._others):
            try:
                kept = other.repository.recall(kind, key, KeptResult)
                if kept is None:
                    continue
                require_signed(other.repository, kept.snapshot_id)
                snapshot = other.repository.snapshot(kept.snapshot_id)
                if self._scratch is not None:
                    _copy(other.repository, ours, snapshot, self._scratch)
                    for signed in signatures_of(other.repository.store, snapshot.id):
                        if signed.signature is not None:
                            keep(ours.store, snapshot.id, signed.data, signed.key_name)
                return kept.of(snapshot, other.url)
            except NotFound:
                continue
            except (AenvError, OSError) as error:
                with suppress(ValueError):  # another thread has met it, too
                    self._others.remove(other)
                    self.warnings.append(f"--cache-from {other.url}: {error}; building without it")
        return None


def _copy(theirs: Repository, ours: Repository, snapshot: Snapshot, scratch: Path) -> None:
    """The snapshot with what it grew from, oldest first, so that whatever stops it leaves only whole ones."""
    lineage = [snapshot]
    collected: set[SnapshotId] = set()
    while (parent := lineage[-1].parent) is not None and not _has(ours, parent):
        if len(lineage) == MAX_LINEAGE:
            raise CorruptData(f"snapshot {snapshot.id} grew from more than {MAX_LINEAGE} others")
        lineage.append(theirs.ancestor(parent))
        if not _has(theirs, parent):
            collected.add(parent)
    for each in reversed(lineage):
        if each.id in collected:
            ours.remember(each)
            continue
        files: dict[Digest, Path] = {}
        try:
            for blob in each.blobs():
                if blob.digest not in files and not _has_blob(ours, blob):
                    files[blob.digest] = _copy_blob(theirs, blob, scratch)
            ours.adopt(each, files)
        finally:
            for path in files.values():
                path.unlink(missing_ok=True)


def _copy_blob(theirs: Repository, blob: Blob, scratch: Path) -> Path:
    """A verified copy, sealed; no more is read than the blob should have."""
    theirs.require_blob(blob)
    target = scratch / f"copy-{secrets.token_hex(8)}"
    descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
    try:
        with theirs.open_blob(blob) as reader:
            write_stream_sparse(cast(BinaryIO, reader), descriptor)
    except BaseException:
        target.unlink()
        raise
    finally:
        os.close(descriptor)
    return target


def _has(repository: Repository, id: SnapshotId) -> bool:
    try:
        repository.snapshot(id)
    except NotFound:
        return False
    return True


def _has_blob(repository: Repository, blob: Blob) -> bool:
    try:
        repository.require_blob(blob)
    except CorruptData:
        return False
    return True
