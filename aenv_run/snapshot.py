"""The snapshot manifest: an immutable value whose id is the digest of its canonical form.

The bytes on disk are described in docs/snapshot-format.md.
"""

from __future__ import annotations

import hashlib
from typing import Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from aenv_run.digest import canonical_json
from aenv_run.hooks import Hooks
from aenv_run.types import Architecture, Context, Digest, MachineSpec, Model, SnapshotId, StageKey

#: A root disk that is deeper than this is slow to open (measured: depth 30 halves 4k IOPS against depth 10).
MAX_DISK_LAYERS = 64
#: No manifest is larger; a store that offers more is lying.
MAX_MANIFEST_BYTES = 1 << 20


_FORMAT_OF_HOOKS = {False: "aenv.snapshot/2", True: "aenv.snapshot/3"}


class Blob(Model):
    """A content-addressed file of the repository."""

    digest: Digest
    size_bytes: int = Field(ge=0)


class MemoryFacts(Model):
    """What a memory image is bound to. A restore needs every field equal, or it is refused.

    ``mode`` is how guest code runs: ``kvm``, ``pvm`` or ``tcg`` (software). ``tsc_khz`` counts under ``tcg``
    only (the guest was told it at boot) and is 0 elsewhere. ``devices`` names the shape of the virtual
    machine (machine type, devices, their order), so that an older shape is refused, never half loaded.
    """

    driver: str
    vmm_version: str
    mode: Literal["kvm", "pvm", "tcg", "systrap", "ptrace"]
    cpu: str
    kernel_digest: Digest
    envd_digest: Digest
    devices: str
    tsc_khz: int = 0


class MemoryPart(Model):
    """A machine's RAM and device state at one instant, of the same instant as the disk."""

    files: dict[str, Blob] = Field(description="by role: for qemu 'ram', its layers 'ram.1' ..., 'device_state'")
    facts: MemoryFacts


class Provenance(Model):
    """Where a snapshot came from. Part of the id: it is a claim of the snapshot, not a note about it."""

    recipe_digest: Digest | None = None
    recipe_name: str | None = None
    step: str | None = None
    stage_key: StageKey | None = None
    source_commit: str | None = None
    builder: str = ""
    created_at: str = Field("", description="RFC 3339, UTC, seconds")


class Snapshot(Model):
    """An immutable environment: disk layers (base first, all qcow2), perhaps memory, and how to run in it.

    One with hooks is of format 2, with ``on_pause`` among them of format 3. Without, its bytes and its id are
    those of format 1, which knows no hooks.
    """

    format: Literal["aenv.snapshot/1", "aenv.snapshot/2", "aenv.snapshot/3"] = "aenv.snapshot/1"
    parent: SnapshotId | None = None
    architecture: Architecture
    machine: MachineSpec
    context: Context = Field(default_factory=Context)
    disk: tuple[Blob, ...] = Field(min_length=1, max_length=MAX_DISK_LAYERS)
    memory: MemoryPart | None = None
    hooks: Hooks | None = Field(None, description="formats 2 and 3: commands for guests restored from the memory")
    labels: dict[str, str] = Field(default_factory=dict)
    provenance: Provenance = Field(default_factory=Provenance)

    @model_validator(mode="before")
    @classmethod
    def _newest_only_where_needed(cls, data: object) -> object:
        """One that is made here says by its hooks of which format it is."""
        if isinstance(data, dict) and (hooks := data.get("hooks")) is not None:
            on_pause = hooks.get("on_pause") if isinstance(hooks, dict) else getattr(hooks, "on_pause", None)
            return {"format": _FORMAT_OF_HOOKS[bool(on_pause)], **data}
        return data

    @model_validator(mode="after")
    def _hooks_of_its_format(self) -> Self:
        wanted = "aenv.snapshot/1" if self.hooks is None else _FORMAT_OF_HOOKS[bool(self.hooks.on_pause)]
        if self.format != wanted:
            raise ValueError("format 2 is that of snapshots with hooks, 3 with on_pause, and no other has them")
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
        """Every blob that the snapshot needs, disk first."""
        return self.disk + (tuple(self.memory.files.values()) if self.memory else ())
