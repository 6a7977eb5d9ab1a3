"""The files of a sandbox: linked from a snapshot, from a capture, from its parent; committed to a repository.

Blocking: call from a thread (``threads.in_thread``). All links are hard links, so no file needs an owner.
"""

from __future__ import annotations

import os
import secrets
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from aenv_run.blocks.layers import Layers
from aenv_run.cache import BlobCache
from aenv_run.capture import Capture
from aenv_run.hooks import Hooks
from aenv_run.lifecycle import State
from aenv_run.nbd import DiskLayer
from aenv_run.repository import Draft, Repository
from aenv_run.sandbox_record import Layer, MemoryFiles, Record, SandboxDirectory
from aenv_run.snapshot import Blob, Provenance, Snapshot
from aenv_run.types import SandboxId
from aenv_run.warm_images import WarmImage


def link_all(sources: Iterable[Path], directory: Path, folder: str, serial: int) -> tuple[tuple[str, ...], int]:
    """Hard-link ``sources`` into ``directory/folder`` under fresh names; the names and the next serial."""
    names: list[str] = []
    for source in sources:
        name = f"{folder}/{serial:04d}{source.suffix}"
        os.link(source, directory / name)
        names.append(name)
        serial += 1
    return tuple(names), serial


def adopt(directory: SandboxDirectory, record: Record, capture: Capture, below: SandboxDirectory) -> Record:
    """``record`` standing on a capture, hard-linked into ``directory``: the disk chain of ``below`` (its own or
    its parent's) and what of its memory the capture stands on, then the capture's own layers and memory."""
    own = below.root == directory.root
    serial = record.serial
    chain: list[Layer] = []
    for layer in record.disk:
        if own or layer.file is None:
            chain.append(layer)
            continue
        (name,), serial = link_all([below.root / layer.file], directory.root, "disk", serial)
        chain.append(Layer(file=name, blob=layer.blob))
    names, serial = link_all(capture.disk, directory.root, "disk", serial)
    chain += [Layer(file=name) for name in names]
    if capture.facts is None:
        return record.model_copy(update={"disk": tuple(chain), "memory": None, "serial": serial})
    kept = record.memory.files if record.memory else {}
    blobs = record.memory.blobs if record.memory else {}
    stay = {role: kept[role] for role in capture.memory_below}
    if not own:
        stay, serial = _link_memory({role: below.root / file for role, file in stay.items()}, directory, serial)
    new, serial = _link_memory(capture.memory, directory, serial)
    memory = MemoryFiles(
        files={**stay, **new}, blobs={role: blobs[role] for role in stay if role in blobs}, facts=capture.facts
    )
    return record.model_copy(update={"disk": tuple(chain), "memory": memory, "serial": serial})


def _link_memory(
    memory: Mapping[str, Path], directory: SandboxDirectory, serial: int
) -> tuple[dict[str, str], int]:
    roles = list(memory)
    names, serial = link_all((memory[role] for role in roles), directory.root, "memory", serial)
    return dict(zip(roles, names, strict=True)), serial


def adopt_merged(directory: SandboxDirectory, record: Record, merged: Mapping[str, Path]) -> Record:
    """``record`` with its memory image in the files of ``merged``, of which some are its own already."""
    assert record.memory is not None
    before = directory.memory_paths(record)
    stay = {role: record.memory.files[role] for role, path in merged.items() if before.get(role) == path}
    new, serial = _link_memory(
        {role: path for role, path in merged.items() if role not in stay}, directory, record.serial
    )
    blobs = {role: blob for role, blob in record.memory.blobs.items() if role in stay}
    memory = record.memory.model_copy(update={"files": {**stay, **new}, "blobs": blobs})
    return record.model_copy(update={"memory": memory, "serial": serial})


def link_snapshot(
    cache: BlobCache,
    snapshot: Snapshot,
    directory: SandboxDirectory,
    *,
    memory: bool,
    is_far: Callable[[Blob], bool] = lambda _: False,
) -> tuple[tuple[Layer, ...], MemoryFiles | None, int]:
    """Blocking: a snapshot's files as a sandbox's own (hard links), and the next free serial.

    A layer that ``is_far`` is left where it is, for ``open_layers``.
    """
    serial = 0
    layers: list[Layer] = []
    for blob in snapshot.disk:
        if is_far(blob):
            layers.append(Layer(file=None, blob=blob))
            continue
        name = f"disk/{serial:04d}.qcow2"
        cache.link(blob, directory.root / name)
        layers.append(Layer(file=name, blob=blob))
        serial += 1
    if snapshot.memory is None or not memory:
        return tuple(layers), None, serial
    files: dict[str, str] = {}
    for role, blob in snapshot.memory.files.items():
        files[role] = f"memory/{serial:04d}"
        cache.link(blob, directory.root / files[role])
        serial += 1
    memory_files = MemoryFiles(files=files, blobs=snapshot.memory.files, facts=snapshot.memory.facts)
    return tuple(layers), memory_files, serial


def open_layers(
    layers: Layers | None, cache: BlobCache, record: Record, directory: SandboxDirectory, *, served: bool
) -> tuple[DiskLayer, ...]:
    """Blocking: the disk chain for the next machine, base first. ``served``: a layer need not be a file."""
    below = directory.fresh_below()
    chain: list[DiskLayer] = []
    for number, layer in enumerate(record.disk):
        if layer.file is not None:
            chain.append(directory.root / layer.file)
            continue
        assert layer.blob is not None
        if layers is not None:
            chain.append(layers.open(layer.blob, below, f"{number:02}", served=served))
        else:
            chain.append(below / f"{number:02}.qcow2")
            cache.link(layer.blob, below / f"{number:02}.qcow2")
    return tuple(chain)


def link_image(
    image: WarmImage, directory: SandboxDirectory, disk: tuple[Layer, ...], serial: int
) -> tuple[tuple[Layer, ...], MemoryFiles, int]:
    """Blocking: a warm image above the snapshot's ``disk`` as a sandbox's own files, and the next free serial."""
    names, serial = link_all(image.disk, directory.root, "disk", serial)
    files, serial = _link_memory(image.memory, directory, serial)
    return (*disk, *(Layer(file=name) for name in names)), MemoryFiles(files=files, facts=image.facts), serial


def child_record(parent: Record, child: SandboxId, call: str, timeout_s: float) -> Record:
    """The record of a fork's child: its parent's, with an identity of its own and no files yet."""
    now_s = time.time()
    return parent.model_copy(
        update={
            "id": child,
            "parent": parent.id,
            "state": State.STARTING,
            "created_at_s": now_s,
            "expires_at_s": now_s + timeout_s,
            "timeout_s": timeout_s,
            "terms": parent.terms.model_copy(update={"request": call}),
            "access_token": secrets.token_urlsafe(32),
            "machine_id": uuid.uuid4().hex,
            "address": None,
            "launches": 0,
            "slot": None,
            "publish": (),  # a path belongs to one sandbox
            "seconds_left": parent.max_seconds,  # an episode of its own
            "time_over_at_s": None,
            "serial": 0,
        }
    )


def commit(
    repository: Repository,
    record: Record,
    directory: SandboxDirectory,
    capture: Capture,
    labels: dict[str, str],
    hooks: Hooks | None,
) -> Snapshot:
    """Files below that are in no repository yet go in with the capture's own: disk layers below its, in order."""
    below = tuple(layer.blob for layer in record.disk if layer.blob is not None)
    local = [directory.root / layer.file for layer in record.disk if layer.blob is None and layer.file]
    (capture.directory / "below").mkdir(exist_ok=True)
    names, serial = link_all(local, capture.directory, "below", 0)
    blobs = record.memory.blobs if record.memory else {}
    files = directory.memory_paths(record)
    unknown = [role for role in capture.memory_below if role not in blobs]
    memory_names, _ = link_all((files[role] for role in unknown), capture.directory, "below", serial)
    linked = {role: capture.directory / name for role, name in zip(unknown, memory_names, strict=True)}
    whole = replace(
        capture,
        disk=(*(capture.directory / name for name in names), *capture.disk),
        memory={**linked, **capture.memory},
        memory_below=tuple(role for role in capture.memory_below if role in blobs),
    )
    draft = Draft(
        parent=record.base_id,
        architecture=record.architecture,
        machine=record.machine,
        context=record.context,
        hooks=hooks,
        labels=labels,
        provenance=Provenance(builder="aenv", created_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")),
        disk_below=below,
        memory_below=blobs,
    )
    return repository.commit(whole, draft)


def known_blobs(record: Record, snapshot: Snapshot, capture: Capture) -> dict[str, object]:
    """What changes in ``record`` once ``capture`` is ``snapshot``: the files below it are in the repository."""
    disk = tuple(
        layer.model_copy(update={"blob": blob}) for layer, blob in zip(record.disk, snapshot.disk, strict=False)
    )
    memory = record.memory
    if memory is not None and snapshot.memory is not None:
        stored = {role: snapshot.memory.files[role] for role in capture.memory_below}
        memory = memory.model_copy(update={"blobs": {**memory.blobs, **stored}})
    return {"disk": disk, "memory": memory}
