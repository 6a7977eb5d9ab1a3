"""Whoever writes a ref may stand still between any two operations, while a collection passes, and be killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from aenv_build.cache.ledger import Ledger
from aenv_run.catalog import Catalog, VersionRecord
from aenv_run.catalog.records import now
from aenv_run.check import check
from aenv_run.errors import Conflict, NotFound
from aenv_run.garbage.collect import Rules, collect
from aenv_run.garbage.holder import Holder
from aenv_run.garbage.leases import holder_key, lease_bytes, parse_lease, read_leases
from aenv_run.garbage.refer import refer
from aenv_run.garbage.state import Gate, Timing
from aenv_run.repository import Repository, manifest_key
from aenv_run.snapshot import Snapshot
from aenv_run.store import StoreKey
from aenv_run.store.memory import Crash, MemoryStore
from aenv_run.types import Name, StageKey
from tests.bytes_half import capture, draft

NAME, KEY = Name("env"), StageKey("ab" * 32)
NOW = Timing(ttl_s=0.05, settle_s=0, poll_s=0.001)


class Stopped(MemoryStore):
    """Before operation ``stop_at`` of the writer somebody else acts; from ``kill_at`` on the writer is dead."""

    def __init__(self) -> None:
        super().__init__()
        self.begin(lambda: None)
        self.counting = False

    def begin(self, act: Callable[[], None], stop_at: int = 0, kill_at: int = 0) -> None:
        self._act, self._stop_at, self._kill_at = act, stop_at, kill_at
        self.counted, self.counting = 0, True

    @contextmanager
    def _operation(self, writes: StoreKey | None = None) -> Iterator[None]:
        if self.counting:
            self.counted += 1
            if self.counted == self._stop_at:
                self.counting = False
                self._act()
                self.counting = True
            if self._kill_at and self.counted >= self._kill_at:
                raise Crash("killed")
        with super()._operation(writes):
            yield


class Scene:
    def __init__(self, place: Path) -> None:
        self.store = Stopped()
        self.repository = Repository(self.store, Gate(self.store, NOW))
        named = self.repository.commit(capture(place, b"named"), draft())
        Catalog(self.repository, by="x").publish(NAME, named.id)
        self.old = self.repository.commit(capture(place, b"old"), draft())

    def collect(self) -> None:
        """As another process with no grace at all."""
        collect(Repository(self.store, Gate(self.store, NOW)), Rules(grace_s=0), dict)

    def refers(self) -> bool:
        versions = Catalog(self.repository).version_log.live(NAME)
        return len(versions) > 1 or self.store.stat(StoreKey(f"refs/stages/{KEY}")) is not None


def publishes(repository: Repository, snapshot: Snapshot) -> None:
    Catalog(repository, by="x").publish(NAME, snapshot.id)


def records(repository: Repository, snapshot: Snapshot) -> None:
    Ledger(repository).keep("stages", KEY, snapshot)


@pytest.mark.parametrize("write", [publishes, records], ids=lambda write: write.__name__)
def test_a_ref_never_names_what_was_collected(
    tmp_path: Path, write: Callable[[Repository, Snapshot], None]
) -> None:
    """At every pair of operations: the collector comes before the one, and the writer is killed at the other."""
    alone = Scene(tmp_path)
    alone.store.begin(lambda: None)
    write(alone.repository, alone.old)
    alone.store.counting = False
    count, seen = alone.store.counted, set()
    assert count > 7 and not list(alone.store.list("leases/holder/"))
    for stop_at in range(1, count + 1):
        for kill_at in range(stop_at, count + 2):
            scene = Scene(tmp_path)
            scene.store.begin(scene.collect, stop_at, kill_at)
            with suppress(Crash, NotFound, Conflict):
                write(scene.repository, scene.old)
            scene.store.counting = False
            there = scene.store.stat(manifest_key(scene.old.id)) is not None
            report = check(scene.repository, deep=True)
            assert report.ok and not report.warnings, (stop_at, kill_at, report)
            assert there or not scene.refers(), (stop_at, kill_at)
            seen.add((there, scene.refers()))
            for lease in read_leases(scene.repository):  # as it is when the writer's process is seen to be dead
                scene.store.delete(holder_key(lease.id))
            scene.collect()
            assert (scene.store.stat(manifest_key(scene.old.id)) is not None) == scene.refers()
            assert check(scene.repository, deep=True).ok
    assert seen == {(False, False), (True, False), (True, True)}


def test_a_writer_that_ends_while_a_collector_looks(tmp_path: Path) -> None:
    """Between any two operations of the collector it writes its ref, and is dead."""
    alone = Scene(tmp_path)
    alone.store.begin(lambda: None)
    alone.collect()
    for stop_at in range(1, alone.store.counted + 1):
        scene = Scene(tmp_path)
        holder = Holder.of_ref(scene.repository)
        holder.hold({scene.old.id: ("a ref that is being written",)})

        key = holder_key(holder.id)

        def end(scene: Scene = scene, key: StoreKey = key) -> None:
            record = VersionRecord(snapshot_id=scene.old.id, created_at=now(), by="x")
            Catalog(scene.repository).version_log.claim(NAME, record)
            lease = parse_lease(scene.store.read(key, limit_bytes=1 << 20), key)
            dead = lease.owner.model_copy(update={"start_ticks": 1})
            scene.store.damage(key, lease_bytes(lease.model_copy(update={"owner": dead})))

        scene.store.begin(end, stop_at)
        scene.collect()
        scene.store.counting = False
        assert scene.refers() and check(scene.repository, deep=True).ok, stop_at
        scene.repository.require_whole(scene.old)


def test_a_writer_that_stood_still_until_its_lease_was_gone_takes_its_ref_back(tmp_path: Path) -> None:
    scene = Scene(tmp_path)

    def slowly() -> str:
        for lease in read_leases(scene.repository):
            scene.store.delete(holder_key(lease.id))
        scene.collect()
        return "written"

    undone: list[str] = []
    with pytest.raises(Conflict, match="was collected"):
        refer(scene.repository, scene.old.id, slowly, undone.append)
    assert undone == ["written"] and not list(scene.store.list("leases/holder/"))


def test_one_lease_is_written_and_removed(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.store.begin(lambda: None)
    refer(scene.repository, scene.old.id, lambda: None, lambda done: None)
    scene.store.counting = False
    # lease, is the gate free, watch, manifest, watch; was the lease there, and away with it
    assert scene.store.counted == 7
