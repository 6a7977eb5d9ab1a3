"""The files of a sandbox: linked from a snapshot, from a capture, from its parent; committed to a repository.

Blocking: call from a thread (``in_thread``). All links are hard links, so no file needs an owner.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import ParamSpec, TypeVar

from aenv_run.cache import BlobCache
from aenv_run.capture import Capture
from aenv_run.hooks import Hooks
from aenv_run.lifecycle import State
from aenv_run.repository import Draft, Repository
from aenv_run.sandbox_record import Layer, MemoryFiles, Record, SandboxDirectory
from aenv_run.snapshot import Provenance, Snapshot
from aenv_run.types import SandboxId
from aenv_run.warm_images import WarmImage

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``asyncio.to_thread``, but a cancel waits for the thread: what cleans up then does not race with it."""
    return await to_the_end(asyncio.to_thread(work, *args, **kwargs))


async def to_the_end(work: Coroutine[object, object, T]) -> T:
    """Do ``work``; a cancel is delivered when it has ended, so nothing of it runs on unowned."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # seen: the cancel is what counts
        raise


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
    """``record`` standing on a capture: the chain of ``below`` (its own, or its parent's), the capture's layers,
    and the capture's memory, all hard-linked into ``directory``."""
    own = below.root == directory.root
    serial = record.serial
    chain: list[Layer] = []
    for layer in record.disk:
        if own:
            chain.append(layer)
            continue
        (name,), serial = link_all([below.root / layer.file], directory.root, "disk", serial)
        chain.append(Layer(file=name, blob=layer.blob))
    names, serial = link_all(capture.disk, directory.root, "disk", serial)
    chain += [Layer(file=name) for name in names]
    memory, serial = _link_memory(capture.memory, directory, serial)
    kept = MemoryFiles(files=memory, facts=capture.facts) if capture.facts and memory else None
    return record.model_copy(update={"disk": tuple(chain), "memory": kept, "serial": serial})


def _link_memory(
    memory: Mapping[str, Path], directory: SandboxDirectory, serial: int
) -> tuple[dict[str, str], int]:
    roles = list(memory)
    names, serial = link_all((memory[role] for role in roles), directory.root, "memory", serial)
    return dict(zip(roles, names, strict=True)), serial


def link_snapshot(
    cache: BlobCache, snapshot: Snapshot, directory: SandboxDirectory, *, memory: bool
) -> tuple[tuple[Layer, ...], MemoryFiles | None, int]:
    """Blocking: a snapshot's files as a sandbox's own (hard links), and the next free serial."""
    serial = 0
    layers: list[Layer] = []
    for blob in snapshot.disk:
        layers.append(Layer(file=f"disk/{serial:04d}.qcow2", blob=blob))
        cache.link(blob, directory.root / layers[-1].file)
        serial += 1
    if snapshot.memory is None or not memory:
        return tuple(layers), None, serial
    files: dict[str, str] = {}
    for role, blob in snapshot.memory.files.items():
        files[role] = f"memory/{serial:04d}"
        cache.link(blob, directory.root / files[role])
        serial += 1
    return tuple(layers), MemoryFiles(files=files, facts=snapshot.memory.facts), serial


def link_image(
    image: WarmImage, directory: SandboxDirectory, disk: tuple[Layer, ...], serial: int
) -> tuple[tuple[Layer, ...], MemoryFiles, int]:
    """Blocking: a warm image above the snapshot's ``disk`` as a sandbox's own files, and the next free serial."""
    names, serial = link_all(image.disk, directory.root, "disk", serial)
    files, serial = _link_memory(image.memory, directory, serial)
    return (*disk, *(Layer(file=name) for name in names)), MemoryFiles(files=files, facts=image.facts), serial


def child_record(parent: Record, child: SandboxId, expires_at_s: float | None) -> Record:
    """The record of a fork's child: its parent's, with an identity of its own and no files yet."""
    return parent.model_copy(
        update={
            "id": child,
            "parent": parent.id,
            "state": State.STARTING,
            "created_at_s": time.time(),
            "expires_at_s": expires_at_s,
            "access_token": secrets.token_urlsafe(32),
            "machine_id": uuid.uuid4().hex,
            "address": None,
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
    """Layers that are in no repository yet go in below the capture's own, in order."""
    below = tuple(layer.blob for layer in record.disk if layer.blob is not None)
    local = [directory.root / layer.file for layer in record.disk if layer.blob is None]
    (capture.directory / "below").mkdir(exist_ok=True)
    names, _ = link_all(local, capture.directory, "below", 0)
    whole = replace(capture, disk=(*(capture.directory / name for name in names), *capture.disk))
    draft = Draft(
        parent=record.base_id,
        architecture=record.architecture,
        machine=record.machine,
        context=record.context,
        hooks=hooks,
        labels=labels,
        provenance=Provenance(builder="aenv", created_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")),
        disk_below=below,
    )
    return repository.commit(whole, draft)
