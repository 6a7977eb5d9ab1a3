"""A node or a build that holds snapshots: it writes them into its lease before it relies on them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress

from aenv_run.digest import canonical_json
from aenv_run.errors import NotFound, StoreUnavailable
from aenv_run.garbage.leases import MAX_LEASE_BYTES, HolderLease, bounded, holder_key, new_id
from aenv_run.garbage.owner import Owner
from aenv_run.repository import RACE_TRIES, Repository
from aenv_run.types import SnapshotId

Held = Mapping[SnapshotId, Iterable[str]]
#: How often a holder renews its lease, which tells collectors that it is there.
RENEW_S = 60.0
#: A build whose lease was not renewed for that long by the store's time, nor while one looks, is dead.
BUILD_TTL_S = 900.0


class Holder:
    """One lease. Blocking and thread-safe. It is written when something is to be held that was not before."""

    def __init__(self, repository: Repository, lease: HolderLease, id: str | None = None) -> None:
        self.id = id or new_id()
        self._repository, self._lease = repository, lease
        self._written: bytes | None = None
        self._lock = threading.Lock()

    @classmethod
    def of_build(cls, repository: Repository, home: str) -> Holder:
        """For a build that begins; ``renew`` writes it."""
        return cls(repository, HolderLease(kind="build", owner=Owner.this(), home=home))

    @classmethod
    def of_node(cls, repository: Repository, home: str, id: str) -> Holder:
        """For a node, whose lease outlives it: what an earlier one held is held on until ``keep`` says else."""
        lease = HolderLease(kind="node", owner=Owner.this(), home=home)
        holder = cls(repository, lease, id)
        earlier = repository.read_ref(holder_key(id), HolderLease, limit_bytes=MAX_LEASE_BYTES)
        if earlier is not None:
            holder._lease = lease.model_copy(update={"beat": earlier.beat, "held": earlier.held})
            holder._written = canonical_json(earlier)
        return holder

    @property
    def held(self) -> frozenset[SnapshotId]:
        """What the lease names."""
        return frozenset(self._lease.held)

    def hold(self, wanted: Held) -> None:
        """Once this returns none is collected that is there then. Costs nothing for what is held already."""
        with self._lock:
            if self._written is not None and self._lease.held.keys() >= wanted.keys():
                return
            watch = self._repository.gate.watch()
            self._write({**bounded(wanted), **self._lease.held})
            while not watch.quiet():  # a collector that looked before the lease was there may delete until it ends
                watch.wait()

    def keep(self, wanted: Held) -> None:
        """Hold exactly these from now on, all of which are held already or young."""
        with self._lock:
            held = bounded(wanted)
            if held != self._lease.held or (self._written is None and held):
                self._write(held)

    def renew(self) -> None:
        """Show that the holder is there."""
        with self._lock:
            self._write(self._lease.held)

    def drop(self) -> None:
        """Hold nothing more, and leave no lease. No error when there is none."""
        with self._lock:
            self._written = None
            self._lease = self._lease.model_copy(update={"held": {}})
            self._repository.store.delete(holder_key(self.id))

    def _write(self, held: Mapping[SnapshotId, tuple[str, ...]]) -> None:
        """Whatever happened to the object: one that was dropped comes back, a copied home takes another."""
        store = self._repository.store
        for _ in range(RACE_TRIES):
            lease = self._lease.model_copy(
                update={"held": dict(held), "beat": self._lease.beat + 1, "owner": Owner.this()}
            )
            data = canonical_json(lease)
            if store.swap(holder_key(self.id), data, expected=self._written):
                self._lease, self._written = lease, data
                if lease.kind == "build" and lease.since_s is None:
                    self._note_beginning()
                return
            try:
                present = store.read(holder_key(self.id), limit_bytes=MAX_LEASE_BYTES)
            except NotFound:
                self._written = None
                continue
            if present == data:  # it was written, and only the answer was lost
                self._lease, self._written = lease, data
                return
            self.id, self._written = new_id(), None
        raise StoreUnavailable("the lease of this process is changed by others all the time", fix="try again")

    def _note_beginning(self) -> None:
        """By the store's clock, in the next renewal; before that the object's own time says it."""
        with suppress(NotFound):
            found = self._repository.store.stat(holder_key(self.id))
            if found is not None:
                self._lease = self._lease.model_copy(update={"since_s": int(found.modified_s)})
