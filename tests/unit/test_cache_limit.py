"""The cache stays within its bound and never drops what somebody holds."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from aenv_run.cache import BlobCache
from aenv_run.cache_limit import ABANDONED_S, GRACE_S, trim, usage
from aenv_run.config import cache_limit_bytes
from aenv_run.errors import InvalidInput
from aenv_run.node_core import Node
from aenv_run.repository import Repository
from aenv_run.snapshot import Blob
from aenv_run.store.memory import MemoryStore
from tests.bytes_half import commit
from tests.unit.node_site import Site, launch, make_site

SIZE = 1 << 20


@pytest.fixture
def repository() -> Repository:
    """One whose blobs are no local files: the cache has copies of its own."""
    return Repository(MemoryStore())


def stored(repository: Repository, tmp_path: Path, count: int) -> list[Blob]:
    contents = [bytes([1 + number]) * SIZE for number in range(count)]
    return [commit(repository, tmp_path, content).disk[0] for content in contents]


def age(cache: BlobCache, blob: Blob, seconds: float) -> None:
    """As if it had been used last so long ago."""
    mark = cache.root / "verified" / blob.digest.hex[:2] / blob.digest.hex
    then = time.time() - seconds
    os.utime(mark, (then, then))


def held(cache: BlobCache, blobs: list[Blob]) -> list[bool]:
    return [(cache.root / "blobs" / blob.digest.hex[:2] / blob.digest.hex).exists() for blob in blobs]


def test_the_least_recently_used_goes_first(repository: Repository, tmp_path: Path) -> None:
    cache = BlobCache(tmp_path / "cache", repository)
    blobs = stored(repository, tmp_path, 4)
    for number, blob in enumerate(blobs):
        cache.path(blob)
        age(cache, blob, 10 * GRACE_S - number)
    cache.path(blobs[0])  # used again: now the newest
    age(cache, blobs[0], 2 * GRACE_S)
    done = trim(cache.root, 2 * SIZE)
    assert held(cache, blobs) == [True, False, False, True]
    assert (done.removed, done.freed_bytes, done.left.own_bytes) == (2, 2 * SIZE, 2 * SIZE)
    assert cache.path(blobs[1]).read_bytes() == b"\x02" * SIZE  # it comes again


def test_what_a_sandbox_holds_stays_and_counts_for_nothing(repository: Repository, tmp_path: Path) -> None:
    cache = BlobCache(tmp_path / "cache", repository)
    blobs = stored(repository, tmp_path, 2)
    cache.link(blobs[0], tmp_path / "layer")
    cache.path(blobs[1])
    for blob in blobs:
        age(cache, blob, 10 * GRACE_S)
    found = usage(cache.root)
    assert (found.blobs, found.own_bytes, found.shared_bytes) == (2, SIZE, SIZE)
    trim(cache.root, 0)
    assert held(cache, blobs) == [True, False]
    (tmp_path / "layer").unlink()
    trim(cache.root, 0)
    assert held(cache, blobs) == [False, False]


def test_what_was_asked_for_just_now_stays(repository: Repository, tmp_path: Path) -> None:
    cache = BlobCache(tmp_path / "cache", repository)
    blobs = stored(repository, tmp_path, 1)
    path = cache.path(blobs[0])
    assert trim(cache.root, 0).removed == 0 and path.exists()
    age(cache, blobs[0], GRACE_S + 60)
    cache.path(blobs[0])
    assert trim(cache.root, 0).removed == 0
    assert trim(cache.root, 0, grace_s=-1).removed == 1


def test_leftovers_of_a_killed_fetch_go_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    dead, living, young = (tmp_path / "tmp" / name for name in ("dead", "living", "young"))
    for path in (dead, living, young):
        path.write_bytes(b"half")
    then = time.time() - ABANDONED_S - 5
    for path in (dead, living):
        os.utime(path, (then, then))
    with living.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        trim(tmp_path, 0)
    assert [path.exists() for path in (dead, living, young)] == [False, True, True]


def test_users_and_trims_at_once(repository: Repository, tmp_path: Path) -> None:
    """Whoever was given a path can open it, whatever is removed meanwhile."""
    cache = BlobCache(tmp_path / "cache", repository)
    blobs = stored(repository, tmp_path, 3)
    over = threading.Event()

    def keep_trimming() -> None:
        while not over.wait(0.005):
            for blob in blobs:
                try:
                    age(cache, blob, 10 * GRACE_S)
                except FileNotFoundError:
                    continue
            trim(cache.root, SIZE)

    trimmer = threading.Thread(target=keep_trimming)
    trimmer.start()
    try:
        for round_number in range(150):
            blob = blobs[round_number % 3]
            target = tmp_path / f"layer-{round_number}"
            cache.link(blob, target)
            assert target.stat().st_size == SIZE
            target.unlink()
    finally:
        over.set()
        trimmer.join()


def test_the_bound_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AENV_CACHE_MIB", raising=False)
    assert cache_limit_bytes() == 20 << 30
    monkeypatch.setenv("AENV_CACHE_MIB", "3")
    assert cache_limit_bytes() == 3 << 20
    for wrong in ("-1", "1G", "9" * 30):
        monkeypatch.setenv("AENV_CACHE_MIB", wrong)
        with pytest.raises(InvalidInput, match="AENV_CACHE_MIB"):
            cache_limit_bytes()


async def test_a_node_keeps_the_bound(tmp_path: Path) -> None:
    site: Site = make_site(tmp_path / "home", tmp_path / "seed")
    node: Node = site.node()
    await node.reconcile()
    other = Repository(MemoryStore())
    (blob,) = stored(other, tmp_path, 1)
    cache = BlobCache(site.home.cache, other)
    cache.path(blob)
    age(cache, blob, 10 * GRACE_S)
    sandbox = await launch(node)
    await node.kill(sandbox)
    await node.settled()
    assert held(cache, [blob]) == [True]  # far below the bound
    await node.close()
    small = Node(site.home, replace(site.tools, cache_limit_bytes=0))
    await small.reconcile()
    await small.settled()
    assert held(cache, [blob]) == [False]
    await small.close()
