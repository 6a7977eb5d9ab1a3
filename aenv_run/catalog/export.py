"""A snapshot, with all that it stands on, as one directory: an OCI image layout. docs/catalog.md says how."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from aenv_run import durable
from aenv_run.catalog.names import Catalog
from aenv_run.catalog.oci_documents import LAYOUT, artifact_document, index_document
from aenv_run.digest import canonical_json, digest_bytes
from aenv_run.errors import Conflict, from_os
from aenv_run.repository import manifest_key
from aenv_run.signatures import signatures_of
from aenv_run.snapshot import Blob
from aenv_run.store.sparse import write_stream_sparse
from aenv_run.types import Digest, Model, SnapshotId

BLOBS = Path("blobs", "sha256")
#: Told of bytes that are done, of how many in all.
Progress = Callable[[int, int], None]


def silent(done_bytes: int, total_bytes: int) -> None:
    """No progress is shown."""


class Exported(Model):
    """What was written. ``manifest_digest`` is that of the artifact, by which registries know it."""

    snapshot_id: SnapshotId
    reference: str | None
    manifest_digest: Digest
    snapshots: int
    blobs: int
    size_bytes: int


def export(catalog: Catalog, reference: str, target: Path, progress: Progress = silent) -> Exported:
    """Write it to ``target``, a new or an empty directory, whole or not at all. Every byte is verified on the way.

    Ancestors go along, with their blobs: a snapshot is not without them. Of those that were collected only
    their manifests do.
    """
    resolved = catalog.resolve(reference)
    name = f"{resolved.name}:{resolved.version}" if resolved.name else None
    lineage = catalog.lineage(resolved.snapshot_id)
    manifests = [canonical_json(snapshot) for snapshot in lineage]
    signatures = [
        (snapshot.id, signed.data)
        for snapshot in lineage
        for signed in signatures_of(catalog.repository.store, snapshot.id)
        if signed.signature is not None
    ]
    store = catalog.repository.store
    collected = {ancestor.id for ancestor in lineage[1:] if store.stat(manifest_key(ancestor.id)) is None}
    artifact = artifact_document(lineage, manifests, signatures, collected=collected)
    whole = [snapshot for snapshot in lineage if snapshot.id not in collected]
    blobs = {blob.digest: blob for snapshot in whole for blob in snapshot.blobs()}
    total, done = sum(blob.size_bytes for blob in blobs.values()), 0
    try:
        with _part(target) as part:
            for blob in blobs.values():
                _write_blob(catalog, blob, part, Told(progress, done, total))
                done += blob.size_bytes
            for data in dict.fromkeys((artifact, *manifests, *(data for _, data in signatures))):
                _write(part / BLOBS / digest_bytes(data).hex, data)
            _write(part / "oci-layout", LAYOUT)
            _write(part / "index.json", index_document(artifact, name))
            for directory in (part / BLOBS, part / "blobs", part):
                durable.sync(directory)
            part.rename(target)
            durable.sync(target.parent)
    except OSError as error:
        raise from_os(error, f"cannot export {reference}") from error
    return Exported(
        snapshot_id=resolved.snapshot_id, reference=name, manifest_digest=digest_bytes(artifact),
        snapshots=len(lineage), blobs=len(blobs), size_bytes=total,
    )  # fmt: skip


@contextmanager
def _part(target: Path) -> Iterator[Path]:
    """An empty layout beside ``target``, removed if it does not become it; it may be one that was left."""
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise Conflict(f"{target} exists already", fix="give a new directory, or remove it")
    part = target.with_name(f".{target.name}.aenv-part")
    part.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(f"another export is writing to {target}", fix="wait for it, or give another") from None
        try:
            for left in part.iterdir():
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
            (part / BLOBS).mkdir(mode=0o700, parents=True)
            yield part
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Told:
    """Tells of one blob as a part of all."""

    progress: Progress
    before: int
    total: int

    def through(self, read: Callable[[int], bytes]) -> BinaryIO:
        """A reader that says how far it is."""
        return cast(BinaryIO, _Counted(read, self))


class _Counted:
    def __init__(self, read: Callable[[int], bytes], told: Told) -> None:
        self._read, self._told, self._done = read, told, 0

    def read(self, size: int) -> bytes:
        data = self._read(size)
        self._done += len(data)
        self._told.progress(self._told.before + self._done, self._told.total)
        return data


def _write_blob(catalog: Catalog, blob: Blob, part: Path, told: Told) -> None:
    catalog.repository.require_blob(blob)
    with _created(part / BLOBS / blob.digest.hex) as fd, catalog.repository.open_blob(blob) as reader:
        write_stream_sparse(told.through(reader.read), fd)


def _write(path: Path, data: bytes) -> None:
    with _created(path) as fd, os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)


@contextmanager
def _created(path: Path) -> Iterator[int]:
    """A new file, synced at the end."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        yield fd
        os.fsync(fd)
    finally:
        os.close(fd)
