"""The snapshot manifest: an immutable value whose id is the digest of its canonical form.

The bytes on disk are described in docs/snapshot-format.md.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, StringConstraints, model_serializer, model_validator

from aenv_run.chunk_table import has_table, table_bytes
from aenv_run.digest import canonical_json
from aenv_run.hooks import Hooks
from aenv_run.text import Labels, Moment, ShortLine
from aenv_run.types import Architecture, Context, Digest, MachineSpec, Model, SnapshotId, StageKey

#: A root disk that is deeper than this is slow to open (measured: depth 30 halves 4k IOPS against depth 10).
MAX_DISK_LAYERS = 64
#: No manifest is larger; a store that offers more is lying.
MAX_MANIFEST_BYTES = 1 << 20
MAX_BLOB_BYTES = 1 << 60
MAX_TSC_KHZ = 1_000_000_000


class Blob(Model):
    """A content-addressed file of the repository.

    ``chunks`` is the digest of the table of its chunks, itself a blob. None for a blob of one chunk, which its
    own digest verifies, and for those of snapshots from before format 4.
    """

    digest: Digest
    size_bytes: int = Field(ge=0, le=MAX_BLOB_BYTES)
    chunks: Digest | None = Field(None, description="format 4: digest of the chunk table")

    @model_validator(mode="after")
    def _table_of_a_large_one(self) -> Self:
        if self.chunks is not None and not has_table(self.size_bytes):
            raise ValueError(f"a blob of {self.size_bytes} bytes has no chunk table")
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Without a table the bytes are those of before there was any."""
        fields: dict[str, object] = handler(self)
        if self.chunks is None:
            fields.pop("chunks", None)
        return fields

    @property
    def table(self) -> Blob | None:
        """Its chunk table, as a blob: the size follows from this one's."""
        return Blob(digest=self.chunks, size_bytes=table_bytes(self.size_bytes)) if self.chunks else None

    @property
    def with_table(self) -> tuple[Blob, ...]:
        """It, and its chunk table if it has one."""
        return (self, self.table) if self.table else (self,)


class MemoryFacts(Model):
    """What a memory image is bound to. A restore needs every field equal, or it is refused.

    ``mode`` is how guest code runs: ``kvm``, ``pvm`` or ``tcg`` (software). ``tsc_khz`` counts under ``tcg``
    only (the guest was told it at boot) and is 0 elsewhere. ``devices`` names the shape of the virtual
    machine (machine type, devices, their order), so that an older shape is refused, never half loaded.
    """

    driver: ShortLine
    vmm_version: ShortLine
    mode: Literal["kvm", "pvm", "tcg", "systrap", "ptrace"]
    cpu: ShortLine
    kernel_digest: Digest
    envd_digest: Digest
    devices: ShortLine
    tsc_khz: int = Field(0, ge=0, le=MAX_TSC_KHZ)


#: Labels that begin so are what aenv itself says of a snapshot: images and their makers may not.
OWN_LABELS = "aenv."
#: Drivers make file names of roles, so none leads elsewhere.
Role = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_.-]{0,63}$")]
MAX_ROLES = 64


class MemoryPart(Model):
    """A machine's RAM and device state at one instant, of the same instant as the disk."""

    files: dict[Role, Blob] = Field(
        max_length=MAX_ROLES, description="by role: for qemu 'ram', its layers 'ram.1' ..., 'device_state'"
    )
    facts: MemoryFacts


class Provenance(Model):
    """Where a snapshot came from. Part of the id: it is a claim of the snapshot, not a note about it."""

    recipe_digest: Digest | None = None
    recipe_name: ShortLine | None = None
    step: ShortLine | None = None
    stage_key: StageKey | None = None
    source_commit: ShortLine | None = None
    builder: ShortLine = ""
    created_at: Moment = Field("", description="RFC 3339, UTC, seconds")


class Snapshot(Model):
    """An immutable environment: disk layers (base first, all qcow2), perhaps memory, and how to run in it.

    One of whose blobs has a chunk table is of format 4. Else one with hooks is of format 2, with ``on_pause``
    among them of format 3. Without either its bytes and its id are those of format 1, which knows neither.
    """

    format: Literal["aenv.snapshot/1", "aenv.snapshot/2", "aenv.snapshot/3", "aenv.snapshot/4"] = "aenv.snapshot/1"
    parent: SnapshotId | None = None
    architecture: Architecture
    machine: MachineSpec
    context: Context = Field(default_factory=Context)
    disk: tuple[Blob, ...] = Field(min_length=1, max_length=MAX_DISK_LAYERS)
    memory: MemoryPart | None = None
    hooks: Hooks | None = Field(None, description="formats 2 to 4: commands for guests restored from the memory")
    labels: Labels = Field(default_factory=dict)
    provenance: Provenance = Field(default_factory=Provenance)

    @model_validator(mode="before")
    @classmethod
    def _newest_only_where_needed(cls, data: object) -> object:
        """One that is made here says by what it has of which format it is."""
        if isinstance(data, dict) and "format" not in data:
            on_pause = _part(data.get("hooks"), "on_pause")
            files = _part(data.get("memory"), "files")
            blobs = [*_several(data.get("disk")), *(files.values() if isinstance(files, dict) else ())]
            chunked = any(_part(blob, "chunks") is not None for blob in blobs)
            return {"format": _format(data.get("hooks") is not None, bool(on_pause), chunked), **data}
        return data

    @model_validator(mode="after")
    def _of_its_format(self) -> Self:
        on_pause = self.hooks is not None and bool(self.hooks.on_pause)
        chunked = any(blob.chunks is not None for blob in self.files())
        if self.format != _format(self.hooks is not None, on_pause, chunked):
            raise ValueError(
                "format 2 is that of snapshots with hooks, 3 with on_pause, 4 with chunk tables, "
                "and no other has them"
            )
        if self.hooks is not None and self.memory is None:
            raise ValueError("hooks are for what was in memory, and there is none")
        return self

    @model_serializer(mode="wrap")
    def _as_its_format(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        fields: dict[str, object] = handler(self)
        if self.hooks is None:
            fields.pop("hooks", None)
        return fields

    @property
    def id(self) -> SnapshotId:
        """sha256 of the canonical manifest."""
        return SnapshotId(hashlib.sha256(canonical_json(self)).hexdigest())

    def blobs(self) -> tuple[Blob, ...]:
        """Every blob that the snapshot needs: disk, memory, then their chunk tables."""
        return self.files() + tuple(blob.table for blob in self.files() if blob.table)

    def files(self) -> tuple[Blob, ...]:
        """Every blob that a machine uses: disk, then memory, without their chunk tables."""
        return self.disk + (tuple(self.memory.files.values()) if self.memory else ())


def _format(hooks: bool, on_pause: bool, chunked: bool) -> str:
    return f"aenv.snapshot/{4 if chunked else 3 if on_pause else 2 if hooks else 1}"


def _part(value: object, name: str) -> object:
    """A field of what is not validated yet: a model, or the dict of one."""
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def _several(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else []
