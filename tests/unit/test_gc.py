"""Garbage collection: what goes, what stays and who holds it, and that nothing that is needed ever goes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from aenv_build.cache.elsewhere import Elsewhere, Other
from aenv_build.cache.ledger import Ledger
from aenv_run.catalog import Catalog, version_key
from aenv_run.catalog.export import export
from aenv_run.catalog.intake import take_in
from aenv_run.check import check
from aenv_run.cli.command import run
from aenv_run.errors import Conflict, CorruptData, InvalidInput, NotFound, Unsupported
from aenv_run.garbage.collect import Collected, Rules, collect
from aenv_run.garbage.holder import Holder
from aenv_run.garbage.holders import drop_holder
from aenv_run.garbage.leases import HolderLease, holder_key, lease_bytes
from aenv_run.garbage.owner import Owner
from aenv_run.garbage.state import Gate, Timing
from aenv_run.repository import Repository, manifest_key
from aenv_run.snapshot import Snapshot
from aenv_run.store import StoreKey
from aenv_run.store.memory import MemoryStore
from aenv_run.store.posix import PosixStore
from aenv_run.types import Name, SnapshotId, StageKey
from tests.bytes_half import capture, commit, draft

NAME = Name("env")
KEY = StageKey("ab" * 32)
QUICK = Timing(ttl_s=0.05, patience_s=5, settle_s=0, poll_s=0.001)
ELSEWHERE = Owner(host="far", pid=1, start_ticks=1, place="elsewhere")


class World:
    """A repository in memory in which nothing is young unless a test says so."""

    def __init__(self, place: Path, timing: Timing = QUICK) -> None:
        self.place, self.store = place, MemoryStore()
        self.repository = Repository(self.store, Gate(self.store, timing))
        self.catalog = Catalog(self.repository, by="x")

    def commit(self, *disk: bytes, parent: Snapshot | None = None, ram: bytes | None = None) -> Snapshot:
        return self.repository.commit(capture(self.place, *disk, ram=ram), draft(parent))

    def gc(self, grace_s: float = 0, used: Mapping[SnapshotId, str] | None = None, **rules: object) -> Collected:
        return collect(
            self.repository, Rules.model_validate({"grace_s": grace_s, **rules}), lambda: dict(used or {})
        )

    def ids(self) -> set[SnapshotId]:
        return set(self.repository.ids())

    def whole(self) -> None:
        report = check(self.repository, deep=True)
        assert report.ok, report.problems


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_repository_that_shows_no_ref_is_not_emptied(world: World) -> None:
    gone = world.commit(b"gone")
    assert world.gc(grace_s=3600, require_refs=True).snapshots == 0  # young: nothing would go
    for dry_run in (True, False):
        with pytest.raises(Conflict, match="--allow-no-refs"):
            world.gc(require_refs=True, dry_run=dry_run)
    assert world.ids() == {gone.id}
    world.catalog.publish(NAME, world.commit(b"kept").id)
    assert world.gc(require_refs=True).snapshots == 1


def test_what_nothing_names_goes_with_its_blobs(world: World) -> None:
    kept, gone = world.commit(b"base"), world.commit(b"gone", ram=b"memory")
    world.catalog.publish(NAME, kept.id)
    done = world.gc()
    assert (done.snapshots, done.blobs, done.freed_bytes) == (1, 3, len(b"gone" + b"memory" + b"device state"))
    assert world.ids() == {kept.id} and done.referenced == 1 and not done.kept
    with pytest.raises(NotFound):
        world.repository.snapshot(gone.id)
    world.whole()
    again = world.gc()
    assert (again.snapshots, again.blobs) == (0, 0)


def test_a_dry_run_says_the_same_and_changes_nothing(world: World) -> None:
    world.catalog.publish(NAME, world.commit(b"base").id)
    world.commit(b"gone")
    before = {info.key: info for info in world.store.list("")}
    said = world.gc(dry_run=True)
    assert {info.key: info for info in world.store.list("")} == before
    done = world.gc()
    assert said == done.model_copy(update={"dry_run": True})


def test_shared_blobs_stay(world: World) -> None:
    base = world.commit(b"base")
    child, other = world.commit(b"delta", parent=base), world.commit(b"other", parent=base)
    world.catalog.publish(NAME, child.id)
    world.catalog.publish(NAME, base.id)
    assert world.gc().blobs == 1
    assert world.ids() == {base.id, child.id} and other.id not in world.ids()
    world.whole()


def test_an_ancestor_is_remembered_while_something_grew_from_it(world: World) -> None:
    base = world.commit(b"base", ram=b"of the base")
    middle = world.commit(b"middle", parent=base)
    child = world.commit(b"child", parent=middle)
    world.catalog.publish(NAME, child.id)
    done = world.gc()
    assert (done.snapshots, done.remembered, done.blobs) == (2, 2, 2)  # the base's memory
    assert world.ids() == {child.id}
    assert [one.id for one in world.catalog.lineage(child.id)] == [child.id, middle.id, base.id]
    world.whole()
    world.catalog.remove(NAME)
    assert world.gc().snapshots == 1
    assert not list(world.store.list("collected/")) and not list(world.store.list("blobs/"))
    world.whole()


def test_one_that_was_remembered_may_come_back(world: World) -> None:
    base = world.commit(b"base", ram=b"r")
    world.catalog.publish(NAME, world.commit(b"child", parent=base).id)
    world.gc()
    assert world.commit(b"base", ram=b"r").id == base.id
    world.catalog.publish(NAME, base.id)
    world.gc()
    assert base.id in world.ids() and not list(world.store.list("collected/"))
    world.whole()


def test_what_is_young_stays_and_says_so(world: World) -> None:
    young = world.commit(b"young")
    done = world.gc(grace_s=60)
    assert [(one.snapshot_id, one.held_by) for one in done.kept] == [(young.id, ("young",))]
    world.store.put_new(StoreKey("blobs/sha256/ab/" + "ab" * 32), b"being uploaded")
    assert world.gc(grace_s=60).blobs == 0


def test_a_commit_of_what_is_there_makes_it_young(world: World) -> None:
    world.commit(b"again")
    time.sleep(0.05)
    now_s = time.time()
    again = world.commit(b"again")
    found = world.store.stat(manifest_key(again.id))
    assert found is not None and found.modified_s >= now_s


def test_sandboxes_of_this_home_hold(world: World) -> None:
    held = world.commit(b"held")
    done = world.gc(used={held.id: "the sandbox s1"})
    assert done.kept[0].held_by == ("the sandbox s1 of this home",)
    assert world.ids() == {held.id}


def test_a_node_elsewhere_holds_until_it_is_dropped(world: World) -> None:
    held = world.commit(b"held")
    node = Holder.of_node(world.repository, "/var/aenv-x", "ab" * 16)
    node.hold({held.id: ["sandbox s1"]})
    done = world.gc()
    assert done.kept[0].snapshot_id == held.id and "sandbox s1" in done.kept[0].held_by[0]
    assert done.holders[0].snapshots == 1 and "/var/aenv-x" in done.holders[0].who
    world.whole()
    for id in ("", "aba", "xyzw", "ab" * 17):
        with pytest.raises(InvalidInput):
            drop_holder(world.repository, id)
    with pytest.raises(NotFound):
        drop_holder(world.repository, "abcd")
    with pytest.raises(Conflict, match="runs"):  # it is this process
        drop_holder(world.repository, "abab")
    assert drop_holder(world.repository, "abab", force=True, dry_run=True).id == "ab" * 16
    assert world.gc().snapshots == 0
    assert drop_holder(world.repository, "abab", force=True).id == "ab" * 16
    assert world.gc().snapshots == 1


def test_the_next_node_of_a_home_goes_on_holding(world: World) -> None:
    held, more = world.commit(b"held"), world.commit(b"more")
    Holder.of_node(world.repository, "/h", "cd" * 16).hold({held.id: ["sandbox s1"]})
    node = Holder.of_node(world.repository, "/h", "cd" * 16)
    node.hold({more.id: ["sandbox s2"]})
    assert node.held == {held.id, more.id}
    world.gc()
    assert world.ids() == {held.id, more.id}
    node.keep({more.id: ["sandbox s2"]})
    world.gc()
    assert world.ids() == {more.id}
    node.drop()
    node.drop()
    world.gc()
    assert not world.ids()


def test_a_home_that_was_copied_gets_a_lease_of_its_own(world: World) -> None:
    one, two = world.commit(b"one"), world.commit(b"two")
    first = Holder.of_node(world.repository, "/h", "ef" * 16)
    first.hold({one.id: ["sandbox s1"]})
    copy = Holder.of_node(world.repository, "/h", "ef" * 16)
    copy.hold({two.id: ["sandbox s2"]})
    first.renew()  # sees that somebody else writes its lease
    assert first.id != copy.id
    world.gc()
    assert world.ids() == {one.id, two.id}


def test_what_is_held_already_costs_nothing(world: World) -> None:
    held = world.commit(b"held")
    node = Holder.of_node(world.repository, "/h", "ab" * 16)
    node.hold({held.id: ["sandbox s1"]})
    before = world.store.operations
    node.hold({held.id: ["sandbox s2"]})
    assert world.store.operations == before


def test_a_running_build_holds_what_was_made_since_it_began(world: World) -> None:
    before = world.commit(b"before")
    time.sleep(1.1)  # a lease counts in whole seconds, as stores do
    build = Holder.of_build(world.repository, "/h")
    build.renew()
    made = world.commit(b"made")
    done = world.gc()
    assert world.ids() == {made.id} and before.id not in world.ids()
    assert f"process {Owner.this().pid}" in done.kept[0].held_by[0]
    build.renew()
    world.gc()
    assert world.ids() == {made.id}
    build.drop()
    world.gc()
    assert not world.ids()


def lease_of_a_build(world: World, owner: Owner, held: SnapshotId, *, age_s: float = 0) -> str:
    lease = HolderLease(kind="build", owner=owner, since_s=4_000_000_000, held={held: ("the base",)})
    world.store.put_new(holder_key("12" * 16), lease_bytes(lease))
    world.store.age(holder_key("12" * 16), age_s)
    return "12" * 16


def test_a_build_that_died_here_holds_nothing(world: World) -> None:
    dead = Owner.this().model_copy(update={"start_ticks": 1})
    lease_of_a_build(world, dead, world.commit(b"held").id)
    done = world.gc()
    assert done.leases == 1 and done.snapshots == 1
    world.whole()


def test_a_build_elsewhere_holds_while_it_is_renewed(world: World) -> None:
    held = world.commit(b"held")
    lease_of_a_build(world, ELSEWHERE, held.id, age_s=600)
    assert world.gc().snapshots == 0
    world.store.age(holder_key("12" * 16), 3600)
    done = world.gc()
    assert (done.leases, done.snapshots) == (1, 1)


def test_one_that_seems_old_by_a_clock_that_jumped_is_watched(world: World) -> None:
    held = world.commit(b"held")
    id = lease_of_a_build(world, ELSEWHERE, held.id, age_s=3600)

    def renewed_while_one_looks(seconds: float) -> None:
        lease = HolderLease(kind="build", owner=ELSEWHERE, since_s=4_000_000_000, beat=1, held={held.id: ("x",)})
        before = world.store.read(holder_key(id), limit_bytes=1 << 20)
        world.store.swap(holder_key(id), lease_bytes(lease), expected=before)

    world.repository.gate.timing = replace(QUICK, sleep=renewed_while_one_looks)
    assert world.gc().snapshots == 0


def test_a_clock_that_went_backwards_makes_nothing_old(world: World) -> None:
    future = world.commit(b"future")
    world.store.age(manifest_key(future.id), -86400)
    assert world.gc(grace_s=0).snapshots == 0 and world.gc(grace_s=3600).snapshots == 0
    assert world.ids() == {future.id}


def test_records_of_the_build_cache_are_roots_until_they_are_too_old(world: World) -> None:
    made = world.commit(b"made")
    ledger = Ledger(world.repository)
    ledger.keep("stages", KEY, made)
    assert world.gc().referenced == 1
    record = StoreKey(f"refs/stages/{KEY}")
    world.store.age(record, 10 * 86400)
    assert ledger.recall("stages", KEY) is not None  # of use: young again
    assert world.gc(records_older_s=5 * 86400).records == 0
    world.store.age(record, 10 * 86400)
    done = world.gc(records_older_s=5 * 86400)
    assert (done.records, done.snapshots) == (1, 1) and ledger.recall("stages", KEY) is None
    world.whole()


def test_a_removal_that_was_not_finished_is(world: World) -> None:
    gone = world.commit(b"gone")
    world.catalog.publish(NAME, gone.id)
    world.catalog.version_log.bury(NAME, 1, "x")
    assert world.gc().snapshots == 1
    assert world.store.stat(version_key(NAME, 1)) is None
    world.whole()


@pytest.mark.parametrize("what", ["ref", "manifest", "lease", "kind", "record"])
def test_nothing_goes_when_something_cannot_be_read(world: World, what: str) -> None:
    kept, orphan = world.commit(b"kept"), world.commit(b"orphan")
    world.catalog.publish(NAME, kept.id)
    Ledger(world.repository).keep("stages", KEY, kept)
    damaged = {
        "ref": version_key(NAME, 1),
        "manifest": manifest_key(kept.id),
        "lease": holder_key("ab" * 16),
        "kind": StoreKey("refs/moods/env/1"),
        "record": StoreKey(f"refs/stages/{KEY}"),
    }
    world.store.damage(damaged[what], b"{broken")
    with pytest.raises(Unsupported if what == "kind" else CorruptData) as failed:
        world.gc()
    assert failed.value.fix and world.ids() == {kept.id, orphan.id}
    world.store.delete(damaged[what])
    world.gc()  # and the lock was let go


def test_signatures_go_with_their_snapshot(world: World) -> None:
    gone = world.commit(b"gone")
    key = StoreKey(f"signatures/{gone.id[:2]}/{gone.id}/0123456789ABCDEF")
    world.store.put_new(key, b"signed")
    world.gc()
    assert world.store.stat(key) is None


def test_quarantine_goes_on_request(world: World) -> None:
    key = StoreKey("quarantine/20260101T000000Z/snapshots/ab/" + "ab" * 32)
    world.store.put_new(key, b"x")
    assert world.gc().quarantined == 0
    assert world.gc(quarantine_older_s=3600).quarantined == 0
    assert world.gc(quarantine_older_s=0).quarantined == 1


def test_batches_let_others_have_their_turn(tmp_path: Path) -> None:
    world = World(tmp_path, replace(QUICK, batch_s=-1.0, settle_s=0))
    clock = iter(range(10**6))
    world.repository.gate.timing = replace(
        QUICK, ttl_s=1e9, batch_s=20, clock_s=lambda: float(next(clock)), sleep=lambda seconds: None
    )
    for number in range(30):
        world.commit(b"%d" % number)
    partly: list[Collected] = []
    done = collect(world.repository, Rules(grace_s=0), dict, partly=partly.append)
    assert done.snapshots == 30 and done.blobs == 30 and len(partly) > 2
    world.whole()


def test_a_second_collector_waits_and_gives_up(world: World) -> None:
    from aenv_run.garbage.lock import CollectorLock

    world.repository.gate.timing = replace(QUICK, ttl_s=60, patience_s=0.02)
    first = CollectorLock(world.repository.gate, "gc")
    first.acquire()
    with pytest.raises(Conflict, match="another collector"):
        world.gc()
    first.release()
    world.gc()


def test_unfinished_writes_of_the_dead_go(world: World) -> None:
    store = PosixStore(world.place / "store")
    repository = Repository(store, Gate(store, QUICK))
    commit(repository, world.place, b"x")
    left, busy = world.place / "store/.tmp/1-aa", world.place / "store/.tmp/2-bb"
    left.write_bytes(b"half")
    busy.write_bytes(b"half")
    os.utime(left, (time.time() - 7200, time.time() - 7200))
    done = collect(repository, Rules(grace_s=0), dict)
    assert done.temporaries == 1 and not left.exists() and busy.exists()
    assert not list(repository.store.list("blobs/"))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("AENV_HOME", str(tmp_path))
    repository = Repository(PosixStore(tmp_path / "repository"))
    named, gone = commit(repository, tmp_path, b"named"), commit(repository, tmp_path, b"gone")
    held = commit(repository, tmp_path, b"held")
    Catalog(repository).publish(NAME, named.id)
    Holder.of_node(repository, "/elsewhere", "ab" * 16).hold({held.id: ["sandbox s1"]})
    assert run(["gc", "--dry-run", "--grace", "0s"]) == 0
    said = capsys.readouterr().out
    assert "would free 4 B: 1 snapshots, 1 blobs" in said and held.id.short in said and "sandbox s1" in said
    assert repository.snapshot(gone.id) == gone
    assert run(["gc", "--grace", "0s", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["snapshots"], done["blobs"], done["referenced"]) == (1, 1, 1)
    assert done["holders"][0]["id"] == "ab" * 16
    assert run(["gc", "--drop-holder", "cdcd"]) == 66
    assert run(["gc", "--drop-holder", "abab", "--force"]) == 0
    assert run(["gc", "--grace", "0s"]) == 0
    assert "freed 4 B" in capsys.readouterr().out
    assert run(["gc", "--grace", "soon"]) == 64
    assert check(repository, deep=True).ok


def test_an_interrupt_lets_the_lock_go(world: World) -> None:
    for number in range(5):
        world.commit(b"%d" % number)

    def interrupt(done: Collected) -> None:
        raise KeyboardInterrupt

    world.repository.gate.timing = replace(QUICK, batch_s=-1)
    with pytest.raises(KeyboardInterrupt):
        collect(world.repository, Rules(grace_s=0), dict, partly=interrupt)
    assert world.repository.gate.watch().quiet()
    world.repository.gate.timing = QUICK
    world.gc()
    world.whole()


def test_retention_sees_what_other_homes_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AENV_HOME", str(tmp_path))
    repository = Repository(PosixStore(tmp_path / "repository"))
    snapshot = commit(repository, tmp_path, b"named")
    Catalog(repository).publish(NAME, snapshot.id)
    Holder.of_node(repository, "/elsewhere", "ab" * 16).hold({snapshot.id: ["sandbox s1"]})
    assert run(["catalog", "retain", "env", "--keep", "0", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["versions"]
    assert "sandbox s1" in row["kept_because"]


def test_a_snapshot_whose_ancestor_was_collected_can_travel(world: World, tmp_path: Path) -> None:
    base = world.commit(b"base", ram=b"memory of the base")
    child = world.commit(b"child", parent=base)
    world.catalog.publish(NAME, child.id)
    world.gc()
    export(world.catalog, "env:1", tmp_path / "layout")
    assert not any(b"memory of the base" in path.read_bytes() for path in (tmp_path / "layout").rglob("*/*/*"))
    (tmp_path / "scratch").mkdir()
    theirs = Catalog(Repository(MemoryStore()), by="y")
    taken = take_in(theirs, tmp_path / "layout", tmp_path / "scratch")
    assert taken.snapshot_id == child.id and len(theirs.lineage(child.id)) == 2
    assert check(theirs.repository, deep=True).ok and base.id not in set(theirs.repository.ids())
    cached = Repository(MemoryStore())
    Ledger(world.repository).keep("stages", KEY, child)
    elsewhere = Elsewhere([Other("x", world.repository)], tmp_path / "scratch")
    assert elsewhere.bring(cached, "stages", KEY) is not None and not elsewhere.warnings
    assert check(cached, deep=True).ok and len(Catalog(cached).lineage(child.id)) == 2
