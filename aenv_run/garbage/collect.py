"""``aenv gc``: deletes what nothing holds, in batches, beside builds and launches. See docs/garbage.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from pydantic import Field

from aenv_run.digest import canonical_json
from aenv_run.errors import Conflict, NotFound
from aenv_run.garbage.holder import RENEW_S
from aenv_run.garbage.holders import CLOCKS, Holding, store_present_s
from aenv_run.garbage.leases import holder_key
from aenv_run.garbage.lock import CollectorLock
from aenv_run.garbage.state import STATE_KEY
from aenv_run.garbage.survey import Survey, Surveyor, looks_dead
from aenv_run.repository import Repository, collected_key, manifest_key
from aenv_run.store import KeyInfo, StoreKey, Stray
from aenv_run.store.reserve import freeing
from aenv_run.types import Model, SnapshotId

DEFAULT_GRACE_S = 86400.0
#: Temporaries of a writer are never younger than this when they go, whatever the grace period is.
TEMPORARY_S = 3600.0
#: Where blobs are: raw, and packed by the digest of the raw one.
BLOBS = ("blobs/sha256/", "packed/sha256/")
Tell = Callable[[str], None]


class Rules(Model):
    """``grace_s``: nothing younger goes. The other ages: kinds of things that go only on request.

    ``require_refs``: a repository that shows no ref at all, and snapshots that would go, is refused.
    """

    grace_s: float = Field(DEFAULT_GRACE_S, ge=0)
    records_older_s: float | None = Field(None, ge=0)
    quarantine_older_s: float | None = Field(None, ge=0)
    require_refs: bool = False
    dry_run: bool = False


class Kept(Model):
    """A snapshot that no version and no record of the build cache names, and who holds it."""

    snapshot_id: SnapshotId
    held_by: tuple[str, ...]


class Counts(Model, frozen=False):
    """What went. The manifest of what is ``remembered`` stays, as an ancestor's."""

    snapshots: int = 0
    remembered: int = 0
    blobs: int = 0
    freed_bytes: int = 0
    records: int = 0
    leases: int = 0
    temporaries: int = 0
    quarantined: int = 0


class Collected(Counts, frozen=True):
    """What went, or with ``dry_run`` would go; and what stays without a name, and who holds it."""

    dry_run: bool
    referenced: int = 0
    kept: tuple[Kept, ...] = ()
    holders: tuple[Holding, ...] = ()


def collect(
    repository: Repository,
    rules: Rules,
    used: Callable[[], Mapping[SnapshotId, str]],
    *,
    tell: Tell = lambda line: None,
    partly: Callable[[Collected], None] = lambda done: None,
) -> Collected:
    """Collect, or say what would go. ``partly`` gets what was done so far, at the end of every batch.

    Whatever ends it, what is referred to or held is whole, and the next one goes on.
    """
    with freeing(repository.store):
        return _Collection(repository, rules, used, tell, partly).run()


class _BatchOver(Exception):
    """Others are to have their turn."""


class _Collection:
    def __init__(
        self,
        repository: Repository,
        rules: Rules,
        used: Callable[[], Mapping[SnapshotId, str]],
        tell: Tell,
        partly: Callable[[Collected], None],
    ) -> None:
        self._repository, self._rules, self._tell, self._partly = repository, rules, tell, partly
        self._store, self._timing = repository.store, repository.gate.timing
        self._lock = CollectorLock(repository.gate, "gc", lambda who: tell(f"waiting for {who}"))
        self._locked = False
        self._until_s = 0.0
        self._surveyor = Surveyor(
            repository,
            used,
            grace_s=rules.grace_s,
            records_older_s=rules.records_older_s,
            require_refs=rules.require_refs,
            alive=self._alive,
        )
        self._dead: frozenset[str] = frozenset()
        self._counts = Counts()
        self._last: Survey | None = None
        self._places = [f"{under}{first:x}" for under in BLOBS for first in range(16)]

    def run(self) -> Collected:
        """All of it."""
        if self._rules.dry_run:
            return self._dry_run()
        if not self._store.conditional:
            self._tell("this store cannot exclude two writers: collect only from the one home that writes to it")
        self._tell("looking at what is needed")
        first = self._surveyor.survey(self._present_s())  # without the lock: it reads every manifest
        self._watch_silent_builds(first)
        while not self._batch():
            self._partly(self._report())
            self._timing.sleep(2 * self._timing.poll_s)  # writers that wait have their turn
        return self._report()

    # -- what goes -----------------------------------------------------------------------------------------

    def _batch(self) -> bool:
        """As much as one may do before others get their turn; whether that was all."""
        self._lock.acquire()
        self._locked = True
        try:
            # A writer that looked at the lock before we took it, and is about to write a manifest, is seen then.
            self._timing.sleep(self._timing.settle_s)
            self._lock.require()
            begun_s = self._timing.clock_s()
            found = self._surveyor.survey(self._present_s(), dead=self._dead)
            self._last = found
            now_s, batch_s = self._timing.clock_s(), self._timing.batch_s
            # Where looking takes long, so do batches, or nothing else would be done.
            self._until_s = now_s + (max(batch_s, now_s - begun_s) if batch_s >= 0 else batch_s)
            try:
                self._small_things(found)
                self._snapshots(found)
                self._blobs(found)
                self._leftovers(found)
            except _BatchOver:
                return False
            return True
        finally:
            self._locked = False
            self._lock.release()

    def _small_things(self, found: Survey) -> None:
        for lease in found.dead:
            self._delete(holder_key(lease.id))
            self._counts.leases += 1
        for key in found.buried:
            self._delete(StoreKey(key.replace("refs/names/", "refs/labels/")))
            self._delete(key)
        for key in found.old_records:
            self._delete(key)
            self._counts.records += 1

    def _snapshots(self, found: Survey) -> None:
        """Manifests, children first; one that a kept snapshot grew from is remembered."""
        doomed, remembered, forgotten = self._plan(found)
        for id in _children_first(doomed, self._surveyor):
            if id in remembered:
                try:
                    data = canonical_json(self._repository.snapshot(id))
                except NotFound:
                    continue
                self._store.put_new(collected_key(id), data)
                found.collected[id] = found.present_s
                self._counts.remembered += 1
            self._delete(manifest_key(id))
            found.manifests.pop(id)
            self._counts.snapshots += 1
        for id in forgotten:
            self._delete(collected_key(id))
            found.collected.pop(id)

    def _plan(self, found: Survey) -> tuple[set[SnapshotId], set[SnapshotId], set[SnapshotId]]:
        """Snapshots that go, those of them that are remembered as ancestors, and ancestors of nothing more."""
        doomed = found.manifests.keys() - found.kept.keys()
        above: set[SnapshotId] = set()
        for id in found.kept:
            parent = self._surveyor.needs(id).parent
            while parent is not None and parent not in above:
                if parent not in found.manifests and parent not in found.collected:
                    break
                above.add(parent)
                parent = self._surveyor.needs(parent).parent
        kept = found.kept.keys()
        return (
            doomed,
            doomed & above,
            {
                id
                for id, modified_s in found.collected.items()  # a young one may be of an import that goes on
                if id in kept or (id not in above and found.present_s - modified_s >= self._rules.grace_s)
            },
        )

    def _blobs(self, found: Survey) -> None:
        """Those that no manifest needs that is left. Places that are done are not looked at again."""
        needed = {digest for id in found.manifests for digest in self._surveyor.needs(id).blobs}
        while self._places:
            if self._timing.clock_s() > self._until_s:
                raise _BatchOver
            for info in self._unneeded(found, needed, self._places[0]):
                self._delete(info.key)
                self._counts.blobs += 1
                self._counts.freed_bytes += info.size_bytes
            self._places.pop(0)

    def _unneeded(self, found: Survey, needed: set[bytes], place: str) -> Iterator[KeyInfo]:
        for info in self._store.list(place):
            self._alive()
            name = info.key.rpartition("/")[2]
            old = found.present_s - info.modified_s >= self._rules.grace_s
            if old and len(name) == 64 and _digest(name) not in needed:
                yield info

    def _old_strays(self, found: Survey) -> Iterator[Stray]:
        """Unfinished writes whose writers have died. One that still writes would fail, and nothing else."""
        for stray in self._store.strays():
            self._alive()
            age_s = found.present_s - stray.modified_s
            if stray.kind == "temporary" and stray.modified_s and age_s >= max(self._rules.grace_s, TEMPORARY_S):
                yield stray

    def _leftovers(self, found: Survey) -> None:
        for stray in self._old_strays(found):
            self._lock.require()
            self._store.clear(stray)
            self._counts.temporaries += 1
        for info in self._store.list(CLOCKS):
            if found.present_s - info.modified_s >= TEMPORARY_S:
                self._delete(info.key)
        for info in self._store.list("signatures/"):
            self._alive()
            parts = info.key.split("/")
            young = found.present_s - info.modified_s < self._rules.grace_s
            if (
                len(parts) == 4
                and parts[2] not in found.manifests
                and parts[2] not in found.collected
                and not young
            ):
                self._delete(info.key)
        age_s = self._rules.quarantine_older_s
        for info in self._store.list("quarantine/") if age_s is not None else ():
            self._alive()
            if age_s is not None and found.present_s - info.modified_s >= age_s:
                self._delete(info.key)
                self._counts.quarantined += 1
                self._counts.freed_bytes += info.size_bytes

    def _delete(self, key: StoreKey) -> None:
        if self._timing.clock_s() > self._until_s:
            raise _BatchOver
        self._lock.require()
        self._store.delete(key)

    # -- what is seen --------------------------------------------------------------------------------------

    def _alive(self) -> None:
        if self._locked:
            self._lock.require()

    def _present_s(self) -> float:
        """The store's own time: that of the last thing written to it."""
        if self._locked:
            found = self._store.stat(STATE_KEY)
            if found is None:
                raise Conflict("the lock of the garbage collector is gone", fix="run it again")
            return found.modified_s
        return store_present_s(self._repository)

    def _watch_silent_builds(self, found: Survey) -> None:
        """Builds elsewhere that have not shown themselves for long are watched: a clock may be wrong, not they."""
        silent = {one.id: one for one in found.leases if looks_dead(one, found.present_s)}
        if not silent:
            return
        wait_s = 1.5 * RENEW_S * self._timing.ttl_s / 60
        who = ", ".join(str(one.lease) for one in silent.values())
        self._tell(f"watching {wait_s:.0f} s whether they still run: {who}")
        self._timing.sleep(wait_s)
        again = self._surveyor.survey(self._present_s())
        self._dead = frozenset(
            one.id for one in again.leases if one.id in silent and one.lease.beat == silent[one.id].lease.beat
        )

    def _dry_run(self) -> Collected:
        first = self._surveyor.survey(self._present_s())
        dead = frozenset(one.id for one in first.leases if looks_dead(one, first.present_s))
        found = self._surveyor.survey(first.present_s, dead=dead)
        self._last, counts = found, self._counts
        doomed, remembered, _ = self._plan(found)
        counts.snapshots, counts.remembered = len(doomed), len(remembered)
        counts.leases, counts.records = len(found.dead), len(found.old_records)
        for id in doomed:
            del found.manifests[id]
        needed = {digest for id in found.manifests for digest in self._surveyor.needs(id).blobs}
        for place in BLOBS:
            for info in self._unneeded(found, needed, place):
                counts.blobs += 1
                counts.freed_bytes += info.size_bytes
        counts.temporaries = sum(1 for _ in self._old_strays(found))
        age_s = self._rules.quarantine_older_s
        for info in self._store.list("quarantine/") if age_s is not None else ():
            if age_s is not None and found.present_s - info.modified_s >= age_s:
                counts.quarantined += 1
                counts.freed_bytes += info.size_bytes
        return self._report()

    def _report(self) -> Collected:
        found = self._last
        assert found is not None
        return Collected(
            dry_run=self._rules.dry_run,
            **self._counts.model_dump(),
            referenced=len(found.referenced & found.manifests.keys()),
            kept=tuple(
                Kept(snapshot_id=id, held_by=tuple(users))
                for id, users in sorted(found.kept.items())
                if id not in found.referenced
            ),
            holders=tuple(Holding.of(one, found.present_s) for one in found.leases if one not in found.dead),
        )


def _children_first(doomed: set[SnapshotId], surveyor: Surveyor) -> list[SnapshotId]:
    """So that no manifest is ever there whose parent is not."""
    children: dict[SnapshotId, int] = dict.fromkeys(doomed, 0)
    for id in doomed:
        parent = surveyor.needs(id).parent
        if parent in children:
            children[parent] += 1
    ready = sorted(id for id, count in children.items() if count == 0)
    ordered: list[SnapshotId] = []
    while ready:
        id = ready.pop()
        ordered.append(id)
        parent = surveyor.needs(id).parent
        if parent in children:
            children[parent] -= 1
            if children[parent] == 0:
                ready.append(parent)
    return ordered


def _digest(name: str) -> bytes | None:
    try:
        return bytes.fromhex(name)
    except ValueError:
        return None
