"""Who holds what, and how an administrator ends it."""

from __future__ import annotations

import re
import secrets

from aenv_run.errors import AenvError, Conflict, InvalidInput, NotFound
from aenv_run.garbage.holder import TTL_S
from aenv_run.garbage.leases import KEY, UNDER, Found, holder_key, mark_key, read_lease
from aenv_run.garbage.lost import clear_traces, lost_holds
from aenv_run.repository import Repository
from aenv_run.store import KeyInfo, StoreKey
from aenv_run.store.reserve import freeing
from aenv_run.types import Model

CLOCKS = "leases/clock/"


class Holding(Model):
    """A lease that was there."""

    id: str
    who: str
    snapshots: int
    renewed_s_ago: float

    @classmethod
    def of(cls, found: Found, present_s: float) -> Holding:
        """By the store's time."""
        return cls(
            id=found.id,
            who=str(found.lease),
            snapshots=len(found.lease.held),
            renewed_s_ago=round(max(0.0, present_s - found.renewed_s), 1),
        )


class Dropped(Model):
    """A holder that was forgotten. ``snapshots``: how many it held, as far as could be read."""

    id: str
    who: str
    snapshots: int


def drop_holder(repository: Repository, id: str, *, force: bool = False, dry_run: bool = False) -> Dropped:
    """Forget a node or a build that will not come back; ``id`` may be shortened to 4 digits.

    Also one whose lease cannot be read, or is gone, or was put away by a repair. ``Conflict`` without ``force``
    for one whose process runs on this machine, and for one elsewhere that was renewed within ``TTL_S``: a node
    that runs would write its lease again at its next look, and until then nothing keeps what it uses.
    """
    if not re.fullmatch(r"[0-9a-f]{4,32}", id):
        raise InvalidInput(
            f"{id[:40]!r} is no id of a holder: 4 to 32 digits 0-9, a-f", fix="`aenv gc --dry-run` lists them"
        )
    leases = {info.key.removeprefix(UNDER): info for info in repository.store.list(UNDER + id) if _is_one(info)}
    lost = {one.id: one for one in lost_holds(repository) if one.id.startswith(id)}
    matches = sorted(leases.keys() | lost.keys())
    if not matches:
        raise NotFound(f"no holder has an id that starts with {id}", fix="`aenv gc --dry-run` lists them")
    if len(matches) > 1:
        raise Conflict(f"{id} is the start of {len(matches)} ids of holders", fix="give more digits")
    (whole,) = matches
    if (info := leases.get(whole)) is not None:
        dropped = _of_lease(repository, info, force)
    else:
        dropped = Dropped(id=whole, who=lost[whole].who, snapshots=len(lost[whole].snapshots))
    if not dry_run:
        with freeing(repository.store):
            repository.store.delete(mark_key(whole))
            repository.store.delete(holder_key(whole))
            clear_traces(repository, whole)
    return dropped


def _is_one(info: KeyInfo) -> bool:
    return KEY.fullmatch(info.key) is not None


def _of_lease(repository: Repository, info: KeyInfo, force: bool) -> Dropped:
    id = info.key.removeprefix(UNDER)
    try:
        found = read_lease(repository, info)
    except AenvError as error:
        if error.retryable:
            raise
        found, who = None, "its lease cannot be read"
    else:
        who = str(found.lease) if found is not None else "gone meanwhile"
    owner = found.lease.owner if found is not None else None
    if not force and (owner is None or not owner.is_dead):
        if owner is not None and owner.is_here:
            raise Conflict(f"the holder {id[:8]} runs: {who}", fix="end it first; or give --force")
        age_s = store_present_s(repository) - info.modified_s
        if age_s < TTL_S:
            raise Conflict(
                f"the holder {id[:8]} was renewed {max(0.0, age_s):.0f} s ago, so it may well run: {who}",
                fix=f"end it first, or wait until it gave no sign for {TTL_S / 60:.0f} minutes; or give --force",
            )
    return Dropped(id=id, who=who, snapshots=len(found.lease.held) if found is not None else 0)


def store_present_s(repository: Repository) -> float:
    """The store's own time, told by an object of a moment. Of a store that is only read: its last change."""
    key = StoreKey(f"{CLOCKS}{secrets.token_hex(16)}")
    try:
        repository.store.put_new(key, b"")
        found = repository.store.stat(key)
        repository.store.delete(key)
        if found is not None:
            return found.modified_s
    except AenvError:
        pass
    return max((info.modified_s for info in repository.store.list("")), default=0.0)
