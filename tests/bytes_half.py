"""What the tests of repository, catalog, cache and check share: real captures in a directory of the test."""

from __future__ import annotations

import secrets
from pathlib import Path

from aenv_run.capture import Capture
from aenv_run.repository import Draft, Repository
from aenv_run.snapshot import Blob, MemoryFacts, Snapshot
from aenv_run.types import Architecture, Digest, MachineSpec, SnapshotId

ZERO_DIGEST = Digest("sha256:" + "0" * 64)
FACTS = MemoryFacts(
    driver="qemu",
    vmm_version="10.0.0",
    mode="tcg",
    cpu="qemu64",
    kernel_digest=ZERO_DIGEST,
    envd_digest=ZERO_DIGEST,
    devices="microvm/1",
)


def capture(
    directory: Path, *disk: bytes, ram: bytes | None = None, device_state: bytes = b"device state"
) -> Capture:
    """A sealed capture in a new directory below ``directory``."""
    own = directory / f"capture-{secrets.token_hex(4)}"
    own.mkdir(parents=True)
    layers = []
    for index, content in enumerate(disk):
        (own / f"disk-{index}").write_bytes(content)
        layers.append(own / f"disk-{index}")
    memory = {}
    if ram is not None:
        for role, content in (("ram", ram), ("device_state", device_state)):
            (own / role).write_bytes(content)
            memory[role] = own / role
    return Capture(own, tuple(layers), memory, FACTS if memory else None)


def draft(parent: Snapshot | None = None, below: tuple[Blob, ...] | None = None, **labels: str) -> Draft:
    """A draft on top of ``parent`` and its disk."""
    if below is None:
        below = parent.disk if parent else ()
    return Draft(
        parent=SnapshotId(parent.id) if parent else None,
        architecture=Architecture("amd64"),
        machine=MachineSpec(),
        labels=labels,
        disk_below=below,
    )


def commit(repository: Repository, directory: Path, *disk: bytes, parent: Snapshot | None = None) -> Snapshot:
    """A committed snapshot with these layers."""
    return repository.commit(capture(directory, *disk), draft(parent))
