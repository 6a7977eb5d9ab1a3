"""What two snapshots differ in: the facts of their manifests, packages and files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from aenv_run.cache import BlobCache
from aenv_run.disk_listing import Listing, differences, flat_disk, list_files, packages
from aenv_run.ext4 import Ext4
from aenv_run.snapshot import Snapshot
from aenv_run.threads import in_thread
from aenv_run.types import Model, SnapshotId


class FactChange(Model):
    """A fact of the manifest, as text; None where it is absent."""

    fact: str
    before: str | None
    after: str | None


class PackageChange(Model):
    """A package that came, went or has another version."""

    manager: str
    name: str
    before: str | None
    after: str | None


class FileChange(Model):
    """A file that differs in ``what``. Bytes of its name that are no UTF-8 are shown as ``\\xNN``."""

    path: str
    what: tuple[str, ...] = ()
    size_bytes_before: int | None = None
    size_bytes_after: int | None = None


class FileChanges(Model):
    """All of them are counted, of each kind the first ``limit`` by path are listed."""

    added_count: int = 0
    removed_count: int = 0
    changed_count: int = 0
    added: tuple[FileChange, ...] = ()
    removed: tuple[FileChange, ...] = ()
    changed: tuple[FileChange, ...] = ()


class Difference(Model):
    """From ``before`` to ``after``. ``files`` and ``packages`` are None where the disks were not compared."""

    before: SnapshotId
    after: SnapshotId
    facts: tuple[FactChange, ...]
    packages: tuple[PackageChange, ...] | None = None
    files: FileChanges | None = Field(None, description="times and extended attributes are not compared")


def fact_changes(a: Snapshot, b: Snapshot) -> tuple[FactChange, ...]:
    """What differs in the manifests, but for their layers."""
    before, after = _facts(a), _facts(b)
    names = sorted({*before, *after})
    return tuple(
        FactChange(fact=name, before=before.get(name), after=after.get(name))
        for name in names
        if before.get(name) != after.get(name)
    )


async def compare(
    a: Snapshot, b: Snapshot, cache: BlobCache, scratch: Path, *, limit: int, with_files: bool = True
) -> Difference:
    """All differences. ``scratch`` is a directory of the caller with room for both disks, as far as they are used.

    Equal disks are not read. ``CorruptData`` where a disk is none that a machine would mount.
    """
    known = Difference(before=a.id, after=b.id, facts=fact_changes(a, b))
    if not with_files:
        return known
    if a.disk == b.disk:
        return known.model_copy(update={"packages": (), "files": FileChanges()})
    raws = scratch / "before.raw", scratch / "after.raw"
    for snapshot, raw in zip((a, b), raws, strict=True):
        layers = tuple([await in_thread(cache.path, blob) for blob in snapshot.disk])
        await flat_disk(layers, snapshot.machine.disk_mib, raw)
    changed_packages, files = await in_thread(_compare_disks, *raws, limit)
    return known.model_copy(update={"packages": changed_packages, "files": files})


def _compare_disks(before: Path, after: Path, limit: int) -> tuple[tuple[PackageChange, ...], FileChanges]:
    with Ext4(before) as one, Ext4(after) as two:
        left, right = list_files(one), list_files(two)
        return (
            _package_changes(packages(one, left), packages(two, right)),
            _file_changes(one, left, two, right, limit),
        )


def _file_changes(one: Ext4, left: Listing, two: Ext4, right: Listing, limit: int) -> FileChanges:
    added, removed = sorted(right.keys() - left.keys()), sorted(left.keys() - right.keys())
    changed, count = [], 0
    for path in sorted(left.keys() & right.keys()):
        a, b = left[path], right[path]
        if what := differences(one, a, two, b):
            count += 1
            if count <= limit:
                sizes = {"size_bytes_before": a.inode.size, "size_bytes_after": b.inode.size}
                changed.append(FileChange(path=_shown(path), what=what, **sizes))
    return FileChanges(
        added_count=len(added), removed_count=len(removed), changed_count=count,
        added=tuple(FileChange(path=_shown(p), size_bytes_after=right[p].inode.size) for p in added[:limit]),
        removed=tuple(FileChange(path=_shown(p), size_bytes_before=left[p].inode.size) for p in removed[:limit]),
        changed=tuple(changed),
    )  # fmt: skip


def _package_changes(
    before: Mapping[tuple[str, str], str], after: Mapping[tuple[str, str], str]
) -> tuple[PackageChange, ...]:
    return tuple(
        PackageChange(manager=key[0], name=key[1], before=before.get(key), after=after.get(key))
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    )


def _facts(snapshot: Snapshot) -> dict[str, str]:
    memory = snapshot.memory
    facts = {
        "architecture": str(snapshot.architecture),
        "cpus": str(snapshot.machine.cpus),
        "memory_mib": str(snapshot.machine.memory_mib),
        "disk_mib": str(snapshot.machine.disk_mib),
        "user": snapshot.context.user,
        "workdir": snapshot.context.workdir,
        "layers": str(len(snapshot.disk)),
        "size_bytes": str(sum({blob.digest: blob.size_bytes for blob in snapshot.blobs()}.values())),
        "memory": "yes" if memory else "no",
        **{f"env {name}": value for name, value in snapshot.context.env.items()},
        **{f"label {name}": value for name, value in snapshot.labels.items()},
    }
    if memory is not None:
        bound = memory.facts.model_dump(mode="json")
        facts |= {f"memory {name}": str(value) for name, value in bound.items()}
    if snapshot.hooks is not None:
        hooks = snapshot.hooks.model_dump(mode="json")
        facts |= {name: json.dumps(commands, ensure_ascii=False) for name, commands in hooks.items() if commands}
    return facts


def _shown(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")
