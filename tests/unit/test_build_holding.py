"""What a running build uses and makes is held against garbage collection by anybody."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from aenv_build.running.holding import holding
from aenv_run.catalog import Catalog
from aenv_run.check import check
from aenv_run.errors import AenvError, StoreUnavailable, Unauthenticated
from aenv_run.garbage.collect import Collected, Rules, collect
from aenv_run.garbage.leases import read_leases
from aenv_run.garbage.state import Gate, Timing
from aenv_run.garbage.unheld import UNHELD_VARIABLE
from aenv_run.repository import Repository
from aenv_run.store import StoreKey
from aenv_run.store.memory import MemoryStore
from aenv_run.store.posix import PosixStore
from aenv_run.types import Name, SnapshotId
from tests.bytes_half import commit
from tests.unit.build_site import HEAD, BuildSite

RECIPE = HEAD + "steps:\n  - {id: one, run: one}\n  - {id: two, run: two}\n"
LONGER = RECIPE + "  - {id: three, run: three}\n"


def elsewhere(site: BuildSite) -> Collected:
    """Collects all that it may, also every result of the build cache."""
    store = PosixStore(site.home.repository)
    return collect(Repository(store, Gate(store, Timing(settle_s=0))), Rules(grace_s=0, records_older_s=0), dict)


async def test_a_build_holds_what_it_found_and_leaves_no_lease(tmp_path: Path) -> None:
    site = BuildSite.make(tmp_path)
    await site.build(RECIPE)
    Catalog(site.repository).remove(Name("made"))
    collected: list[Collected] = []
    async with holding(site.repository, site.home) as holder:
        (lease,) = read_leases(site.repository)
        assert lease.lease.kind == "build" and lease.lease.home == str(site.home.root)

        def hold(snapshots: Mapping[SnapshotId, Iterable[str]]) -> None:
            holder.hold(snapshots)
            if not collected:  # names and results of the cache go, the snapshots that are held do not
                collected.append(elsewhere(site))
                assert snapshots.keys() <= set(site.repository.ids())

        site.commands.clear()
        await site.build(LONGER, hold=hold)
        assert site.commands[-1] == "three" and collected[0].records > 0
        assert check(site.repository, deep=True).ok
    assert not list(read_leases(site.repository))
    assert elsewhere(site).snapshots > 0
    assert check(site.repository, deep=True).ok


async def test_what_is_collected_while_a_build_looks_is_made_again(tmp_path: Path) -> None:
    """Its look at the build cache is repeated, since a collector was at work before it held anything."""
    site = BuildSite.make(tmp_path)
    await site.build(RECIPE)
    Catalog(site.repository).remove(Name("made"))
    calls = 0

    def too_late(snapshots: Mapping[SnapshotId, Iterable[str]]) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            elsewhere(site)

    site.commands.clear()
    await site.build(RECIPE, hold=too_late)
    assert calls == 2 and site.commands == ["one", "two"]
    assert check(site.repository, deep=True).ok


class Refusing(MemoryStore):
    """Leases of holders cannot be written."""

    error: AenvError = Unauthenticated("403 of leases")

    def swap(self, key: StoreKey, data: bytes, *, expected: bytes | None) -> bool:
        if key.startswith("leases/holder/"):
            raise self.error
        return super().swap(key, data, expected=expected)


async def test_what_a_build_cannot_hold_it_does_not_use_unless_the_operator_says_so(tmp_path: Path) -> None:
    store, home = Refusing(), BuildSite.make(tmp_path).home
    repository = Repository(store)
    made = commit(repository, tmp_path, b"made")
    with pytest.raises(Unauthenticated, match="cannot be held") as failed:
        async with holding(repository, home):
            raise AssertionError("it began")
    assert f"{UNHELD_VARIABLE}=on" in failed.value.fix
    with pytest.raises(Unauthenticated, match="cannot be held"):
        Catalog(repository).publish(Name("made"), made.id)
    repository.allow_unheld = True
    async with holding(repository, home) as build:
        assert build.unheld is not None
        build.hold({made.id: ["the base"]})
    assert Catalog(repository).publish(Name("made"), made.id) == 1
    store.error = StoreUnavailable("503 of leases")
    with pytest.raises(StoreUnavailable):
        async with holding(repository, home):
            raise AssertionError("it began")
    with pytest.raises(StoreUnavailable):
        Catalog(repository).publish(Name("other"), made.id)
