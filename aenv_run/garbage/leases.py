"""``leases/holder/<id>``: which snapshots a node or a running build holds, whatever names they have."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from pydantic import Field

from aenv_run.errors import CorruptData
from aenv_run.garbage.owner import Owner
from aenv_run.repository import Repository
from aenv_run.store import KeyInfo, StoreKey
from aenv_run.types import Model, SnapshotId

MAX_LEASE_BYTES = 8 << 20
#: Of each snapshot a lease names no more than so many users; people want to know one.
MAX_USERS = 8
UNDER = "leases/holder/"
KEY = re.compile(r"leases/holder/[0-9a-f]{32}")


class HolderLease(Model):
    """One holder. ``held``: snapshots, each with what uses it.

    Of a build ``since_s`` is the store's time when it began: what was committed since is held too, whoever did it.
    ``beat`` counts the renewals, so that each is another content.
    """

    format: Literal["aenv.holder/1"] = "aenv.holder/1"
    kind: Literal["node", "build"]
    owner: Owner
    home: str = Field("", max_length=4096)
    beat: int = 0
    since_s: int | None = Field(None, description="seconds since 1970, by the store")
    held: dict[SnapshotId, tuple[str, ...]] = Field(default_factory=dict, max_length=100_000)

    def __str__(self) -> str:
        what = "build" if self.kind == "build" else "node"
        return f"{what}, {self.owner}" + (f", {self.home}" if self.home else "")


class Found(Model):
    """A lease of the repository, with the store's time of its last renewal."""

    id: str
    renewed_s: float
    lease: HolderLease


def holder_key(id: str) -> StoreKey:
    """Where the lease is."""
    return StoreKey(f"{UNDER}{id}")


def new_id() -> str:
    """Of a holder that is new."""
    return uuid.uuid4().hex


def read_leases(repository: Repository) -> Iterator[Found]:
    """All. ``CorruptData`` for one that cannot be read: what it holds is not known then."""
    for info in repository.store.list(UNDER):
        found = read_lease(repository, info)
        if found is not None:
            yield found


def read_lease(repository: Repository, info: KeyInfo) -> Found | None:
    """None when it is gone meanwhile."""
    if not KEY.fullmatch(info.key):
        raise CorruptData(f"{info.key} is no key of a lease", fix="aenv check --repair moves it away")
    lease = repository.read_ref(info.key, HolderLease, limit_bytes=MAX_LEASE_BYTES)
    if lease is None:
        return None
    return Found(id=info.key.removeprefix(UNDER), renewed_s=info.modified_s, lease=lease)


def held_snapshots(repository: Repository) -> dict[SnapshotId, str]:
    """What nodes and running builds of any home hold, each with one that does."""
    held: dict[SnapshotId, str] = {}
    for found in read_leases(repository):
        if found.lease.kind == "node" or not found.lease.owner.is_dead:
            for id, users in found.lease.held.items():
                held.setdefault(id, f"{', '.join(users[:1])} ({found.lease})")
    return held


def bounded(held: Mapping[SnapshotId, Iterable[str]]) -> dict[SnapshotId, tuple[str, ...]]:
    """As a lease keeps it."""
    return {id: tuple(sorted(users)[:MAX_USERS]) for id, users in held.items()}
