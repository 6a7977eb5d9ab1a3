"""Several writers of one ref, in processes of their own; clocks that go backwards."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from aenv_build.cache.known import Freshness
from aenv_build.cache.ledger import Ledger
from aenv_run.cache import BlobCache
from aenv_run.cache_limit import trim
from aenv_run.catalog import Catalog, Move, TagRecord, tag_key
from aenv_run.check import check
from aenv_run.digest import canonical_json, digest_file
from aenv_run.errors import Conflict
from aenv_run.garbage.collect import Rules, collect
from aenv_run.garbage.state import Gate, Timing
from aenv_run.repository import Repository
from aenv_run.store import Store
from aenv_run.store.memory import MemoryStore
from aenv_run.store.posix import PosixStore
from aenv_run.store.s3 import S3Store
from aenv_run.types import Name, StageKey, Tag
from tests.bytes_half import commit
from tests.crash.calls import in_process
from tests.crash.faulty_store import BackwardsStore

NAME, LATEST, STABLE = Name("task"), Tag("latest"), Tag("stable")
WRITERS, ROUNDS = 4, 5


def write(store: Store, scratch: Path, number: int, rounds: int) -> None:
    """Versions of one name, its tags, and labels of its first version: all refs that others write too."""
    catalog = Catalog(Repository(store), by=f"writer-{number}")
    for turn in range(rounds):
        snapshot = commit(catalog.repository, scratch / str(number), b"%d %d" % (number, turn))
        version = catalog.publish(NAME, snapshot.id, [LATEST])
        try:
            catalog.promote(NAME, STABLE, version)
        except Conflict as error:
            assert "no promotion" in error.message  # another was faster, and further
        catalog.label(NAME, 1, {f"w{number}": str(turn)})


@pytest.mark.parametrize("kind", ["posix", "s3"])
def test_writers_of_one_ref(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    rounds = ROUNDS if kind == "posix" else 2
    if kind == "s3":
        place = request.getfixturevalue("s3_server").place(tmp_path.name)
    make: Callable[[], Store] = (
        (lambda: PosixStore(tmp_path / "store"))
        if kind == "posix"
        else (lambda: S3Store(place, lock=tmp_path / "lock"))
    )
    catalog = Catalog(Repository(make()))
    catalog.publish(NAME, commit(catalog.repository, tmp_path, b"first").id, [LATEST])
    processes = []
    for number in range(WRITERS):
        with in_process(lambda number=number: write(make(), tmp_path, number, rounds)) as pid:  # type: ignore[misc]
            processes.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in processes] == [0] * WRITERS
    count = 1 + WRITERS * rounds
    assert catalog.versions(NAME) == tuple(range(1, count + 1))
    assert len({catalog.resolve(f"{NAME}:{version}").snapshot_id for version in catalog.versions(NAME)}) == count
    for tag in (LATEST, STABLE):
        moves = list(catalog.tag_log.moves(NAME, tag))[::-1]
        assert [move.number for move in moves] == list(range(1, len(moves) + 1))
        assert [move.from_version for move in moves] == [None, *(move.to_version for move in moves)][:-1]
        assert catalog.tag_log.read(NAME, tag) == count == moves[-1].to_version
    assert catalog.labels.shown(NAME, 1)[0] == {f"w{number}": str(rounds - 1) for number in range(WRITERS)}
    assert check(catalog.repository, deep=True).ok


def test_a_store_whose_clock_runs_backwards_loses_nothing(tmp_path: Path) -> None:
    """What seems older with every look is still not taken before it is told to be without use."""
    store = BackwardsStore(PosixStore(tmp_path / "store"))
    repository = Repository(store, Gate(store, Timing(settle_s=0.0)))
    catalog = Catalog(repository)
    kept = [commit(repository, tmp_path, b"%d" % number) for number in range(3)]
    for snapshot in kept:
        catalog.publish(NAME, snapshot.id, [LATEST])
    young = commit(repository, tmp_path, b"young")
    for _ in range(3):
        collect(repository, Rules(grace_s=10 * 365 * 86400.0), dict)
    for snapshot in (*kept, young):
        assert repository.snapshot(snapshot.id) == snapshot
    collect(repository, Rules(grace_s=0.0), dict)
    assert check(repository, deep=True).ok and catalog.versions(NAME) == (1, 2, 3)


def test_a_host_whose_clock_was_set_back(tmp_path: Path) -> None:
    """Times of before lie in the future then: history stays in order, results count, the cache is right."""
    repository = Repository(MemoryStore())
    catalog = Catalog(repository)
    base = commit(repository, tmp_path, b"base" * 1000)
    catalog.publish(NAME, base.id, [LATEST])
    later = "2999-01-31T12:00:00Z"
    move = Move(number=1, act="publish", at=later, from_version=None, to_version=1)
    repository.store.damage(tag_key(NAME, LATEST), canonical_json(TagRecord(version=1, moves=(move,))))  # type: ignore[attr-defined]
    catalog.publish(NAME, commit(repository, tmp_path, b"next").id, [LATEST])
    assert [one.at for one in catalog.tag_log.moves(NAME, LATEST)] == [later, later]

    now = datetime(2026, 1, 31, tzinfo=UTC)
    Ledger(repository, clock=lambda: now + timedelta(days=9)).keep("stages", StageKey("5" * 64), base)
    found = Ledger(repository, clock=lambda: now).recall("stages", StageKey("5" * 64))
    assert found is not None and found.snapshot == base
    assert Freshness(now).too_old(StageKey("5" * 64), 3600, found.at) == ""

    cache = BlobCache(tmp_path / "cache", repository)
    path = cache.path(base.disk[0])
    future_s = 32_000_000_000
    for file in (tmp_path / "cache").rglob("*"):
        if file.is_file():
            os.utime(file, (future_s, future_s))
    assert trim(tmp_path / "cache", 0).removed == 0, "used in the future is used lately"
    assert digest_file(cache.path(base.disk[0])) == base.disk[0].digest and path.exists()
    path.unlink()
    path.write_bytes(b"other" * 800)
    os.utime(path, (future_s, future_s))
    assert digest_file(cache.path(base.disk[0])) == base.disk[0].digest
