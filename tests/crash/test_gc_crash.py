"""A garbage collection that is stopped, or refused, at every operation of its store."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from aenv_build.cache.ledger import Ledger
from aenv_run.catalog import Catalog
from aenv_run.check import check
from aenv_run.errors import AenvError, StoreUnavailable
from aenv_run.garbage.collect import Collected, Rules, collect
from aenv_run.garbage.holder import Holder
from aenv_run.garbage.state import Gate, Timing
from aenv_run.repository import Repository
from aenv_run.store.memory import Crash, Fault, MemoryStore
from aenv_run.types import Name, StageKey
from tests.bytes_half import capture, draft

WHENS = ("before", "half", "after")
NAME = Name("env")
#: No sign of life is due, so that each run has the same operations; and one who takes the killed for dead at once.
CALM = Timing(settle_s=0)
AFTER = Timing(ttl_s=0.001, patience_s=10, settle_s=0, poll_s=0.001, batch_s=100)


class Before:
    """Something of every kind that stays, and of every kind that goes."""

    def __init__(self, place: Path) -> None:
        self.store = MemoryStore()
        repository = self.open()
        catalog = Catalog(repository, by="x")
        grandparent = repository.commit(capture(place, b"grand", ram=b"g"), draft())
        parent = repository.commit(capture(place, b"parent", ram=b"p"), draft(grandparent))
        self.named = repository.commit(capture(place, b"named"), draft(parent))
        catalog.publish(NAME, self.named.id)
        self.cached = repository.commit(capture(place, b"cached"), draft())
        Ledger(repository).keep("stages", StageKey("1" * 64), self.cached)
        self.held = repository.commit(capture(place, b"held"), draft())
        Holder.of_node(repository, "h", "ab" * 16).hold({self.held.id: ["sandbox"]})
        lost = repository.commit(capture(place, b"lost"), draft())
        repository.commit(capture(place, b"child of lost"), draft(lost))
        old = repository.commit(capture(place, b"old"), draft())
        Ledger(repository).keep("stages", StageKey("2" * 64), old)
        for info in list(self.store.list("")):
            self.store.age(info.key, 7200)
        self.store.age(next(self.store.list(f"refs/stages/{'1' * 64}")).key, 0)
        buried = repository.commit(capture(place, b"buried"), draft())
        catalog.publish(NAME, buried.id)
        catalog.version_log.bury(NAME, 2, "x")
        for info in list(self.store.list("snapshots/")):
            self.store.age(info.key, 7200)

    def open(self, timing: Timing = CALM) -> Repository:
        return Repository(self.store, Gate(self.store, timing))

    def gc(self, timing: Timing = CALM) -> Collected:
        return collect(self.open(timing), Rules(grace_s=60, records_older_s=3600), dict)

    def intact(self) -> None:
        repository = self.open()
        report = check(repository, deep=True)
        assert report.ok, report.problems
        for snapshot in (self.named, self.cached, self.held):
            repository.require_whole(snapshot)
        assert len(Catalog(repository).lineage(self.named.id)) == 3

    def clean(self) -> None:
        """As a collection leaves it that nothing stops."""
        self.intact()
        assert set(self.open().ids()) == {self.named.id, self.cached.id, self.held.id}
        assert len(list(self.store.list("collected/"))) == 2
        assert (
            len(list(self.store.list("blobs/"))) == 6
        )  # three of the named one, two of 'buried', which are young
        assert not [info for info in self.store.list("refs/names/") if info.key.endswith("/2")]


def operations(place: Path) -> int:
    before = Before(place)
    start = before.store.operations
    before.gc()
    count = before.store.operations - start
    before.clean()
    return count


@pytest.mark.parametrize("when", WHENS)
def test_killed_at_every_operation(tmp_path: Path, when: str) -> None:
    count = operations(tmp_path)
    assert count > 60
    outcomes: Counter[str] = Counter()
    for at in range(1, count + 1):
        before = Before(tmp_path)
        before.store.arm(Fault(at, when))  # type: ignore[arg-type]
        with pytest.raises(Crash):
            before.gc()
        before.store.restart()
        before.intact()
        left = len(list(before.store.list("snapshots/"))) - 3
        outcomes["nothing went" if left == 6 else "all went" if left == 0 else "some went"] += 1
        before.gc(AFTER)
        before.clean()
    print(when, dict(outcomes))
    assert set(outcomes) == {"nothing went", "some went", "all went"}


@pytest.mark.parametrize("when", WHENS)
def test_an_error_at_every_operation(tmp_path: Path, when: str) -> None:
    for at in range(1, operations(tmp_path) + 1):
        before = Before(tmp_path)
        before.store.arm(Fault(at, when, StoreUnavailable("timed out")))  # type: ignore[arg-type]
        try:
            before.gc()
        except AenvError as error:
            assert isinstance(error, StoreUnavailable)
        before.intact()
        before.gc(AFTER)
        before.clean()
