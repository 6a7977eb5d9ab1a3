"""``leases/holder/<id>``: which snapshots a node, a running build or a writer of a ref holds.

A lease says the digest of itself: one that was altered is never taken for another one. That a node has a lease is
also noted in ``leases/node/<id>``, which is written after it and removed before it: so one that is gone, though
nobody let it go, is missed.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from aenv_run.digest import canonical_json
from aenv_run.errors import CorruptData, NotFound, Unsupported
from aenv_run.garbage.owner import Owner
from aenv_run.repository import Repository
from aenv_run.store import KeyInfo, StoreKey
from aenv_run.stored_json import parse_record
from aenv_run.types import Model, SnapshotId

MAX_LEASE_BYTES = 8 << 20
#: Of each snapshot a lease names no more than so many users; people want to know one.
MAX_USERS = 8
UNDER = "leases/holder/"
MARKS = "leases/node/"
KEY = re.compile(r"leases/holder/[0-9a-f]{32}")

Users = Annotated[tuple[Annotated[str, Field(max_length=4096)], ...], Field(max_length=256)]


class HolderLease(Model):
    """One holder. ``held``: snapshots, each with what uses it.

    Of a build ``since_s`` is the store's time when it began: what was committed since is held too, whoever did it.
    ``beat`` counts the renewals, so that each is another content. ``sum``: sha256 of the lease without it; leases
    of format 1 have none.
    """

    format: Literal["aenv.holder/1", "aenv.holder/2"] = "aenv.holder/2"
    kind: Literal["node", "build", "ref"]
    owner: Owner
    home: str = Field("", max_length=4096)
    beat: int = Field(0, ge=0, le=1 << 60)
    since_s: int | None = Field(None, ge=0, le=1 << 60, description="seconds since 1970, by the store")
    held: dict[
        SnapshotId, Annotated[tuple[Annotated[str, Field(max_length=4096)], ...], Field(max_length=256)]
    ] = Field(default_factory=dict, max_length=100_000)
    sum: str = Field("", max_length=64)

    def __str__(self) -> str:
        return f"{self.kind}, {self.owner}" + (f", {self.home}" if self.home else "")

    @property
    def runs_out(self) -> bool:
        """Whether it ends with its process. That of a node stays: a paused sandbox needs it when no node runs."""
        return self.kind != "node"


class NodeMark(Model):
    """That a node has a lease, and which, for people who must find it when the lease is gone."""

    format: Literal["aenv.node/1"] = "aenv.node/1"
    owner: Owner
    home: str = Field("", max_length=4096)

    def __str__(self) -> str:
        return f"node, {self.owner}" + (f", {self.home}" if self.home else "")


class Found(Model):
    """A lease of the repository, with the store's time of its last renewal."""

    id: str
    renewed_s: float
    lease: HolderLease


def holder_key(id: str) -> StoreKey:
    """Where the lease is."""
    return StoreKey(f"{UNDER}{id}")


def mark_key(id: str) -> StoreKey:
    """Where it is noted that a node has that lease."""
    return StoreKey(f"{MARKS}{id}")


def lease_bytes(lease: HolderLease) -> bytes:
    """As it is stored, with its sum."""
    bare = lease.model_copy(update={"sum": ""})
    return canonical_json(bare.model_copy(update={"sum": hashlib.sha256(canonical_json(bare)).hexdigest()}))


def parse_lease(data: bytes, what: str) -> HolderLease:
    """``CorruptData`` for one that was altered, ``Unsupported`` for one of a newer format."""
    try:
        lease = parse_record(HolderLease, data, what)
    except Unsupported as error:
        if re.search(rb'"format":\s*"aenv\.holder/[1-9][0-9]*"', data) is not None:
            raise
        raise CorruptData(f"{what} is damaged: {error.message}", fix="`aenv check --repair`") from None
    if lease.format != "aenv.holder/1" and lease_bytes(lease) != data:
        raise CorruptData(f"{what} is damaged: it is not what its sum says", fix="`aenv check --repair`")
    return lease


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
    try:
        data = repository.store.read(info.key, limit_bytes=MAX_LEASE_BYTES)
    except NotFound:
        return None
    lease = parse_lease(data, info.key)
    return Found(id=info.key.removeprefix(UNDER), renewed_s=info.modified_s, lease=lease)


def held_snapshots(repository: Repository) -> dict[SnapshotId, str]:
    """What nodes and running builds of any home hold, each with one that does."""
    held: dict[SnapshotId, str] = {}
    for found in read_leases(repository):
        if not (found.lease.runs_out and found.lease.owner.is_dead):
            for id, users in found.lease.held.items():
                held.setdefault(id, f"{', '.join(users[:1])} ({found.lease})")
    return held


def bounded(held: Mapping[SnapshotId, Iterable[str]]) -> dict[SnapshotId, tuple[str, ...]]:
    """As a lease keeps it."""
    return {id: tuple(sorted(users)[:MAX_USERS]) for id, users in held.items()}
