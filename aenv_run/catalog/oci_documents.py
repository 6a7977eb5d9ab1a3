"""A snapshot as an OCI artifact: the documents of an image layout. What others wrote is bounded and checked.

The config is the snapshot's manifest as it is, so its digest is the snapshot's id. The layers are all blobs that
it and its ancestors need, and the ancestors' manifests. Specification: github.com/opencontainers/image-spec.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aenv_run.digest import digest_bytes
from aenv_run.errors import CorruptData, Unsupported
from aenv_run.snapshot import Blob, Snapshot
from aenv_run.types import Digest, SnapshotId

ARTIFACT_TYPE = "application/vnd.aenv.snapshot.v1"
REMEMBERED_TYPE = "application/vnd.aenv.snapshot.collected.v1+json"
SNAPSHOT_TYPE = "application/vnd.aenv.snapshot.manifest.v1+json"
DISK_TYPE = "application/vnd.aenv.disk.layer.v1.qcow2"
MEMORY_TYPE = "application/vnd.aenv.memory.file.v1"
TABLE_TYPE = "application/vnd.aenv.chunks.v1"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
REFERENCE, TITLE = "org.opencontainers.image.ref.name", "org.opencontainers.image.title"
SIGNATURE_TYPE = "application/vnd.aenv.snapshot.signature.v1+minisign"
LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'
M = TypeVar("M", bound=BaseModel)
#: What registries allow for a manifest.
MAX_DOCUMENT_BYTES = 4 << 20
MAX_LAYERS = 16_384


class Descriptor(BaseModel):
    """A pointer to a blob of the layout."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    media_type: str = Field(alias="mediaType", max_length=256)
    digest: Digest
    size: int = Field(ge=0)
    artifact_type: str | None = Field(None, alias="artifactType", max_length=256)
    annotations: dict[str, str] | None = None


class Artifact(BaseModel):
    """The manifest of an artifact."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: int = Field(alias="schemaVersion")
    artifact_type: str | None = Field(None, alias="artifactType", max_length=256)
    config: Descriptor
    layers: tuple[Descriptor, ...] = Field(max_length=MAX_LAYERS)


class _Index(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: int = Field(alias="schemaVersion")
    manifests: tuple[Descriptor, ...] = Field(max_length=4096)


class _Layout(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    version: str = Field(alias="imageLayoutVersion")


def artifact_document(
    lineage: Sequence[Snapshot],
    manifests: Sequence[bytes],
    signatures: Sequence[tuple[SnapshotId, bytes]] = (),
    *,
    collected: AbstractSet[SnapshotId] = frozenset(),
) -> bytes:
    """The artifact's manifest. ``lineage`` is newest first, ``manifests`` its canonical bytes. Always the same.

    Of those that were ``collected`` only the manifests go along.
    """
    layers: dict[Digest, dict[str, object]] = {}
    for snapshot in lineage:
        if snapshot.id in collected:
            continue
        for blob in snapshot.disk:
            layers.setdefault(blob.digest, _descriptor(DISK_TYPE, blob.digest, blob.size_bytes))
        for role, blob in snapshot.memory.files.items() if snapshot.memory else ():
            layers.setdefault(blob.digest, _descriptor(MEMORY_TYPE, blob.digest, blob.size_bytes, title=role))
        for blob in snapshot.blobs():  # what is neither: chunk tables
            layers.setdefault(blob.digest, _descriptor(TABLE_TYPE, blob.digest, blob.size_bytes))
    for snapshot, data in zip(lineage[1:], manifests[1:], strict=True):
        kind = REMEMBERED_TYPE if snapshot.id in collected else SNAPSHOT_TYPE
        layers.setdefault(digest_bytes(data), _descriptor(kind, digest_bytes(data), len(data)))
    for id, data in signatures:
        layers.setdefault(
            digest_bytes(data), _descriptor(SIGNATURE_TYPE, digest_bytes(data), len(data), title=f"{id}.minisig")
        )
    return _dump(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": ARTIFACT_TYPE,
            "config": _descriptor(SNAPSHOT_TYPE, digest_bytes(manifests[0]), len(manifests[0])),
            "layers": list(layers.values()),
        }
    )


def index_document(artifact: bytes, reference: str | None) -> bytes:
    """The layout's index, with the one artifact and its name."""
    descriptor = _descriptor(MANIFEST_TYPE, digest_bytes(artifact), len(artifact))
    descriptor["artifactType"] = ARTIFACT_TYPE
    if reference is not None:
        descriptor["annotations"] = {REFERENCE: reference}
    return _dump({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [descriptor]})


def parse_layout(data: bytes) -> None:
    """``oci-layout``: only version 1 is known."""
    version = _parse(_Layout, data, "oci-layout").version
    if version != "1.0.0":
        raise Unsupported(
            f"the layout has the version {version[:40]!r}; this aenv knows 1.0.0", fix="export it again"
        )


def parse_index(data: bytes) -> Descriptor:
    """The one artifact of the layout."""
    manifests = _parse(_Index, data, "index.json").manifests
    if len(manifests) != 1:
        raise Unsupported(
            f"index.json lists {len(manifests)} manifests; an exported snapshot is one",
            fix="copy the one that is wanted into a layout of its own, for example with skopeo or oras",
        )
    return manifests[0]


def parse_artifact(data: bytes) -> Artifact:
    """The manifest; ``Unsupported`` for that of something else, such as a container image."""
    artifact = _parse(Artifact, data, "the artifact's manifest")
    kind = artifact.artifact_type or artifact.config.media_type
    if kind != ARTIFACT_TYPE or artifact.config.media_type != SNAPSHOT_TYPE:
        raise Unsupported(
            f"the layout holds {kind[:80]!r}, no snapshot ({ARTIFACT_TYPE})",
            fix="a container image is a base for a recipe: base: {image: 'oci:DIRECTORY'}",
        )
    if artifact.schema_version != 2:
        raise Unsupported(
            f"the artifact's manifest has the schema version {artifact.schema_version}, not 2",
            fix="export it again",
        )
    return artifact


def signed_by(descriptor: Descriptor) -> SnapshotId | None:
    """The snapshot that a signature says it is of; None for what is no signature or says nothing of the kind."""
    title = (descriptor.annotations or {}).get(TITLE, "")
    if descriptor.media_type != SIGNATURE_TYPE or not re.fullmatch(r"[0-9a-f]{64}\.minisig", title):
        return None
    return SnapshotId(title.removesuffix(".minisig"))


def blob_of(descriptor: Descriptor) -> Blob:
    """What the repository calls it."""
    return Blob(digest=descriptor.digest, size_bytes=descriptor.size)


def _descriptor(media_type: str, digest: Digest, size: int, *, title: str | None = None) -> dict[str, object]:
    found: dict[str, object] = {"mediaType": media_type, "digest": str(digest), "size": size}
    if title is not None:
        found["annotations"] = {TITLE: title}
    return found


def _dump(value: dict[str, object]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _parse(model: type[M], data: bytes, what: str) -> M:
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CorruptData(
            f"{what} of the layout is damaged: {where}: {first['msg']}",
            fix="export it again, and copy the whole directory",
        ) from None
