"""A snapshot that was exported somewhere, taken into this repository. Nothing of the directory is believed.

No name in it is followed: blobs are opened by their digests below ``blobs/sha256``, never through a link. Sizes
are compared before a byte is copied, digests before anything is committed, and the name is written last.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from aenv_run.catalog.export import Progress, Told, silent
from aenv_run.catalog.names import Catalog
from aenv_run.catalog.oci_documents import (
    MAX_DOCUMENT_BYTES,
    REFERENCE,
    REMEMBERED_TYPE,
    SNAPSHOT_TYPE,
    Artifact,
    Descriptor,
    parse_artifact,
    parse_index,
    parse_layout,
    signed_by,
)
from aenv_run.catalog.records import Version
from aenv_run.catalog.reference import Reference, require_publishable
from aenv_run.digest import canonical_json, digest_bytes
from aenv_run.errors import AenvError, CorruptData, InvalidInput, NotFound, TooLarge, from_os
from aenv_run.minisign import MAX_TEXT_BYTES, Signature
from aenv_run.repository import Repository, parse_manifest
from aenv_run.signatures import MAX_SIGNATURES, keep
from aenv_run.snapshot import MAX_MANIFEST_BYTES, Blob, Snapshot
from aenv_run.store.sparse import write_stream_sparse
from aenv_run.types import Digest, Model, Name, SnapshotId, Tag

DEFAULT_LIMIT_BYTES = 256 << 30
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Imported(Model):
    """What was taken in. ``version`` is None when it got no name; what was here before was not copied."""

    snapshot_id: SnapshotId
    name: Name | None
    version: Version | None
    snapshots: int
    copied_bytes: int


def take_in(
    catalog: Catalog,
    source: Path,
    scratch: Path,
    *,
    name: Name | None = None,
    tags: tuple[Tag, ...] = (),
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
    progress: Progress = silent,
) -> Imported:
    """Import the layout in ``source`` and publish it as ``name``, or as the name that it was exported under.

    ``scratch`` is an empty directory of the caller, removed by it; best on the repository's file system. What is
    damaged, cut, altered, or larger than ``limit_bytes`` in all is refused by name, and then nothing is named.
    """
    try:
        with _Layout.opened(source) as layout:
            return _take_in(catalog, layout, scratch, name, tags, limit_bytes, progress)
    except OSError as error:
        raise from_os(error, f"cannot import {source}") from error


def _take_in(
    catalog: Catalog,
    layout: _Layout,
    scratch: Path,
    name: Name | None,
    tags: tuple[Tag, ...],
    limit_bytes: int,
    progress: Progress,
) -> Imported:
    parse_layout(layout.document("oci-layout"))
    descriptor = parse_index(layout.document("index.json"))
    artifact = parse_artifact(layout.blob(descriptor, MAX_DOCUMENT_BYTES))
    lineage = _lineage(layout, artifact, catalog.repository)
    signatures = _signatures(layout, artifact, lineage)
    _require_signed(catalog.repository, lineage[0], [one for id, _, one in signatures if id == lineage[0].id])
    name = name or _exported_name(descriptor)
    if name is not None:
        require_publishable(name)
    elif tags:
        raise InvalidInput("a tag belongs to a name, and the layout has none", fix="give one with --name")
    collected = {one.digest.hex for one in artifact.layers if one.media_type == REMEMBERED_TYPE}
    whole = [snapshot for snapshot in lineage if snapshot.id not in collected]
    missing = _missing(whole, artifact, catalog.repository)
    total, done = sum(blob.size_bytes for blob in missing.values()), 0
    if total > limit_bytes:
        raise TooLarge(
            f"the snapshot has {total} bytes that are not here, more than {limit_bytes}",
            fix="if it is trusted to be that large, say so with --max-size",
        )
    for blob in missing.values():
        layout.require(blob)
    for snapshot in reversed(lineage):
        if snapshot.id in collected:
            catalog.repository.remember(snapshot)
            continue
        files: dict[Digest, Path] = {}
        for blob in snapshot.blobs():
            if missing.pop(blob.digest, None) is not None:
                files[blob.digest] = layout.copy(blob, scratch, Told(progress, done, total))
                done += blob.size_bytes
        catalog.repository.adopt(snapshot, files)
    trust, manifests = catalog.repository.trust, {snapshot.id: canonical_json(snapshot) for snapshot in lineage}
    for signed_id, data, signature in signatures:
        # One that nobody here can verify does not take the place of another.
        good = trust is not None and trust.accepts([signature], manifests[signed_id])
        keep(catalog.repository.store, signed_id, data, f"the signature of {signature.key_name}", replace=good)
    id = lineage[0].id
    version = catalog.publish(name, id, tags) if name is not None else None
    return Imported(snapshot_id=id, name=name, version=version, snapshots=len(lineage), copied_bytes=total)


def _lineage(layout: _Layout, artifact: Artifact, repository: Repository) -> list[Snapshot]:
    """The snapshot and those of its ancestors that are not here, newest first."""
    kinds = (SNAPSHOT_TYPE, REMEMBERED_TYPE)
    ancestors = {one.digest.hex: one for one in artifact.layers if one.media_type in kinds}
    lineage = [_snapshot(layout, artifact.config)]
    while (parent := lineage[-1].parent) is not None:
        found = ancestors.get(parent)
        try:
            if found is None or found.media_type == REMEMBERED_TYPE:
                repository.ancestor(parent)
            else:
                repository.snapshot(parent)
            return lineage
        except NotFound:
            pass
        if found is None:
            raise CorruptData(
                f"the layout lacks snapshot {parent}, from which {lineage[-1].id.short} grew",
                fix="export it again, and copy the whole directory",
            )
        lineage.append(_snapshot(layout, found))
    return lineage


def _snapshot(layout: _Layout, descriptor: Descriptor) -> Snapshot:
    data = layout.blob(descriptor, MAX_MANIFEST_BYTES)
    return parse_manifest(
        SnapshotId(descriptor.digest.hex), data, f"the manifest {descriptor.digest} of the layout"
    )


def _signatures(
    layout: _Layout, artifact: Artifact, lineage: list[Snapshot]
) -> list[tuple[SnapshotId, bytes, Signature]]:
    """Those of the layout that are of these snapshots; nobody has verified them yet."""
    wanted = {snapshot.id for snapshot in lineage}
    listed = [(id, one) for one in artifact.layers if (id := signed_by(one)) in wanted and id is not None]
    if len(listed) > MAX_SIGNATURES * len(lineage):
        raise TooLarge(f"the layout has {len(listed)} signatures", fix="export it again")
    found = [(id, layout.blob(one, MAX_TEXT_BYTES)) for id, one in listed]
    return [(id, data, Signature.parse(data, f"a signature of snapshot {id.short}")) for id, data in found]


def _require_signed(repository: Repository, snapshot: Snapshot, signatures: list[Signature]) -> None:
    """Before a byte of it is copied. One that is here counts too."""
    trust, manifest = repository.trust, canonical_json(snapshot)
    if trust is None or trust.accepts(signatures, manifest):
        return
    if trust.signer(repository.store, snapshot.id, manifest) is None:
        raise trust.refuse(snapshot.id)


def _missing(lineage: list[Snapshot], artifact: Artifact, repository: Repository) -> dict[Digest, Blob]:
    """Blobs that are to be copied. The artifact must list each, as large as the snapshot says."""
    listed = {one.digest: one.size for one in artifact.layers}
    missing: dict[Digest, Blob] = {}
    for snapshot in lineage:
        for blob in snapshot.blobs():
            if blob.digest in missing:
                continue
            try:
                repository.require_blob(blob)
            except CorruptData:
                if listed.get(blob.digest) != blob.size_bytes:
                    raise CorruptData(
                        f"the artifact does not list blob {blob.digest} of {blob.size_bytes} bytes, "
                        f"which snapshot {snapshot.id.short} needs",
                        fix="export it again, and copy the whole directory",
                    ) from None
                missing[blob.digest] = blob
    return missing


def _limited(file: BinaryIO, limit_bytes: int) -> Callable[[int], bytes]:
    """Reads no more than that, however fast the file grows meanwhile."""
    left = limit_bytes

    def read(size: int) -> bytes:
        nonlocal left
        data = file.read(min(size, left))
        left -= len(data)
        return data

    return read


def _exported_name(descriptor: Descriptor) -> Name | None:
    """The name in the layout's index; None for what is no name of ours."""
    try:
        return Reference.parse((descriptor.annotations or {}).get(REFERENCE, "")).name
    except InvalidInput:
        return None


class _Layout:
    """The directory, open: nothing in it is reached but by these names, and nothing through a link."""

    def __init__(self, root: Path, directory: int, blobs: int) -> None:
        self._root, self._directory, self._blobs = root, directory, blobs

    @classmethod
    @contextmanager
    def opened(cls, root: Path) -> Iterator[_Layout]:
        """Of the directory ``root``."""
        opened: list[int] = []
        try:
            opened.append(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            for part in ("blobs", "sha256"):
                opened.append(os.open(part, _DIRECTORY, dir_fd=opened[-1]))
            yield cls(root, opened[0], opened[2])
        except (FileNotFoundError, NotADirectoryError):
            raise InvalidInput(
                f"{root} is no OCI image layout", fix="give a directory that `aenv catalog export` made"
            ) from None
        finally:
            for fd in opened:
                os.close(fd)

    def document(self, name: str) -> bytes:
        """A document beside the blobs."""
        with self._file(self._directory, name, name) as fd:
            return self._read(fd, name, MAX_DOCUMENT_BYTES)

    def blob(self, descriptor: Descriptor, limit_bytes: int) -> bytes:
        """A small blob, verified."""
        what = f"blob {descriptor.digest}"
        with self._file(self._blobs, descriptor.digest.hex, what) as fd:
            data = self._read(fd, what, limit_bytes)
        if len(data) != descriptor.size:
            raise self._damaged(what, f"it has {len(data)} bytes instead of {descriptor.size}")
        if digest_bytes(data) != descriptor.digest:
            raise self._damaged(what, f"its content has the digest {digest_bytes(data)}")
        return data

    def require(self, blob: Blob) -> None:
        """``CorruptData`` unless a file of that size is there."""
        with self._file(self._blobs, blob.digest.hex, f"blob {blob.digest}") as fd:
            self._require_size(fd, blob)

    def copy(self, blob: Blob, scratch: Path, told: Told) -> Path:
        """A copy of our own, zeroes as holes, of no more than the blob's size. Its digest is not looked at yet."""
        target = scratch / blob.digest.hex
        copy = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with self._file(self._blobs, blob.digest.hex, f"blob {blob.digest}") as fd:
                self._require_size(fd, blob)
                with os.fdopen(os.dup(fd), "rb") as file:
                    write_stream_sparse(told.through(_limited(file, blob.size_bytes)), copy)
        finally:
            os.close(copy)
        return target

    def _require_size(self, fd: int, blob: Blob) -> None:
        size = os.fstat(fd).st_size
        if size != blob.size_bytes:
            raise self._damaged(f"blob {blob.digest}", f"it has {size} bytes instead of {blob.size_bytes}")

    def _read(self, fd: int, what: str, limit_bytes: int) -> bytes:
        size = os.fstat(fd).st_size
        if size > limit_bytes:
            raise self._damaged(what, f"it has {size} bytes, more than {limit_bytes}")
        with os.fdopen(os.dup(fd), "rb") as file:
            return file.read(limit_bytes)

    @contextmanager
    def _file(self, directory: int, name: str, what: str) -> Iterator[int]:
        try:
            fd = os.open(name, _FILE, dir_fd=directory)
        except OSError as error:
            raise self._damaged(what, os.strerror(error.errno or 0)) from None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise self._damaged(what, "it is no regular file")
            yield fd
        finally:
            os.close(fd)

    def _damaged(self, what: str, why: str) -> AenvError:
        return CorruptData(
            f"{what} of the layout {self._root} cannot be used: {why}",
            fix="export it again, and copy the whole directory",
        )
