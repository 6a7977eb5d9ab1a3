"""A node or a build that holds snapshots: it writes them into its lease before it relies on them.

It also looks whether the lease is still as it left it, and writes it again when it is not.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress

from aenv_run.digest import canonical_json
from aenv_run.errors import CorruptData, NotFound, StoreUnavailable, Unsupported
from aenv_run.garbage.leases import (
    MAX_LEASE_BYTES,
    HolderLease,
    NodeMark,
    bounded,
    holder_key,
    lease_bytes,
    mark_key,
    new_id,
    parse_lease,
)
from aenv_run.garbage.lost import clear_traces
from aenv_run.garbage.owner import Owner
from aenv_run.repository import RACE_TRIES, Repository
from aenv_run.store.reserve import freeing
from aenv_run.types import SnapshotId

log = logging.getLogger(__name__)

Held = Mapping[SnapshotId, Iterable[str]]
#: How often a build renews its lease, which tells collectors that it is there.
RENEW_S = 60.0
#: How often a holder looks whether its lease is still as it left it: one small read, none where nothing is held.
LOOK_S = 60.0
#: One whose lease was not renewed for that long by the store's time is not known to run. A build, or a writer of a
#: ref, that gives no sign while one looks either is dead then.
TTL_S = 900.0


class Holder:
    """One lease. Blocking and thread-safe. It is written when something is to be held that was not before."""

    def __init__(self, repository: Repository, lease: HolderLease, id: str | None = None) -> None:
        self.id = id or new_id()
        self._repository, self._lease = repository, lease
        self._written: bytes | None = None
        self._marked = lease.runs_out  # whether it is noted that there is this lease
        self._missed = False  # it was gone, or damaged: a repair may have kept it
        self._looked_s = 0.0
        self._lock = threading.Lock()

    @classmethod
    def of_build(cls, repository: Repository, home: str) -> Holder:
        """For a build that begins; ``renew`` writes it."""
        return cls(repository, HolderLease(kind="build", owner=Owner.this(), home=home))

    @classmethod
    def of_ref(cls, repository: Repository) -> Holder:
        """For who writes a ref: it holds what that is going to name."""
        return cls(repository, HolderLease(kind="ref", owner=Owner.this()))

    @classmethod
    def of_node(cls, repository: Repository, home: str, id: str) -> Holder:
        """For a node, whose lease outlives it: what an earlier one held is held on until ``keep`` says else.

        One that is damaged is written over as soon as something is held.
        """
        lease = HolderLease(kind="node", owner=Owner.this(), home=home)
        holder = cls(repository, lease, id)
        try:
            data = repository.store.read(holder_key(id), limit_bytes=MAX_LEASE_BYTES)
        except NotFound:
            holder._missed = True  # or it was let go, or never was
            return holder
        try:
            earlier = parse_lease(data, holder_key(id))
            holder._lease = lease.model_copy(update={"beat": earlier.beat, "held": earlier.held})
        except CorruptData as error:
            log.warning("%s", error)
            holder._missed = True
        holder._written = data
        return holder

    @property
    def held(self) -> frozenset[SnapshotId]:
        """What the lease names."""
        return frozenset(self._lease.held)

    def hold(self, wanted: Held) -> None:
        """Once this returns none is collected that is there then.

        Costs nothing for what is held already, but for a look at the lease when the last one is long ago.
        """
        with self._lock:
            if self._written is not None and self._lease.held.keys() >= wanted.keys():
                self._look(LOOK_S)
                return
            self._write({**bounded(wanted), **self._lease.held})
            # A collector that looked before the lease was there may delete until its batch ends.
            self._repository.gate.wait_until_free()

    def keep(self, wanted: Held) -> None:
        """Hold exactly these from now on, all of which are held already or young."""
        with self._lock:
            held = bounded(wanted)
            if held != self._lease.held or (self._written is None and held):
                less = held.keys() < self._lease.held.keys()
                with freeing(self._repository.store) if less else nullcontext():
                    self._write(held)

    def renew(self) -> None:
        """Show that the holder is there."""
        with self._lock:
            self._write(self._lease.held)

    def look(self, *, older_than_s: float = 0.0) -> None:
        """See that the lease is as this holder left it, unless the last look is younger; else write it again."""
        with self._lock:
            self._look(older_than_s)

    def drop(self) -> None:
        """Hold nothing more, and leave no lease. No error when there is none."""
        store = self._repository.store
        with self._lock, freeing(store):
            missed = self._missed or (self._written is not None and store.stat(holder_key(self.id)) is None)
            self._written, self._marked = None, self._lease.runs_out
            self._lease = self._lease.model_copy(update={"held": {}})
            if not self._lease.runs_out:
                store.delete(mark_key(self.id))
            store.delete(holder_key(self.id))
            if missed:
                clear_traces(self._repository, self.id)
                self._missed = False

    def _look(self, older_than_s: float) -> None:
        now_s = self._repository.gate.timing.clock_s()
        if self._written is None or now_s - self._looked_s < older_than_s:
            return
        if self._present() == self._written:
            self._looked_s = now_s
        else:
            self._write(self._lease.held)

    def _present(self) -> bytes | None:
        try:
            return self._repository.store.read(holder_key(self.id), limit_bytes=MAX_LEASE_BYTES)
        except NotFound:
            return None

    def _write(self, held: Mapping[SnapshotId, tuple[str, ...]]) -> None:
        """Whatever happened to the object: one that is gone or damaged comes back, a copied home takes another.

        In the first case a collector may be at work that did not see it: it is waited for.
        """
        store, missed = self._repository.store, False
        for _ in range(RACE_TRIES):
            lease = self._lease.model_copy(
                update={
                    "held": dict(held),
                    "beat": self._lease.beat + 1,
                    "owner": Owner.this(),
                    "format": "aenv.holder/2",
                }
            )
            data = lease_bytes(lease)
            if store.swap(holder_key(self.id), data, expected=self._written):
                return self._note(lease, data, missed)
            present = self._present()
            if present == data:  # it was written, and only the answer was lost
                return self._note(lease, data, missed)
            if present is None:
                missed, self._written = self._written is not None, None
            elif self._is_mine(present):
                missed, self._written = True, present
            else:
                self.id, self._written, self._marked = new_id(), None, lease.runs_out
        raise StoreUnavailable("the lease of this process is changed by others all the time", fix="try again")

    def _is_mine(self, present: bytes) -> bool:
        """Whether no other holder wrote that: it is damaged, or an older one of this very process."""
        try:
            found = parse_lease(present, holder_key(self.id))
        except CorruptData:
            return True
        except Unsupported:
            return False
        return found.owner == Owner.this() and found.beat <= self._lease.beat

    def _note(self, lease: HolderLease, data: bytes, missed: bool) -> None:
        """It is written."""
        self._lease, self._written = lease, data
        self._looked_s = self._repository.gate.timing.clock_s()
        if not self._marked:
            mark = NodeMark(owner=lease.owner, home=lease.home)
            self._repository.store.put_new(mark_key(self.id), canonical_json(mark))
            self._marked = True
        if lease.kind == "build" and lease.since_s is None:
            self._note_beginning()
        if missed:
            log.warning("the lease %s of this process was gone or damaged; it is written again", self.id)
            self._missed = True
            self._repository.gate.wait_until_free()

    def _note_beginning(self) -> None:
        """By the store's clock, in the next renewal; before that the object's own time says it."""
        with suppress(NotFound):
            found = self._repository.store.stat(holder_key(self.id))
            if found is not None:
                self._lease = self._lease.model_copy(update={"since_s": int(found.modified_s)})
