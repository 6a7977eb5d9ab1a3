"""Blobs as local files: verified once, noticed when altered, never linked when damaged."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aenv_run.cache import BlobCache
from aenv_run.errors import Conflict, CorruptData
from aenv_run.repository import Repository
from aenv_run.snapshot import Blob
from aenv_run.store.memory import MemoryStore
from aenv_run.store.posix import PosixStore
from tests.bytes_half import ZERO_DIGEST, capture, commit, draft

CONTENT = b"x" * 5000 + b"\0" * (3 << 20) + b"end"


@pytest.fixture(params=["same file system", "other file system", "no local files"])
def repository(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Repository]:
    """The three ways in which bytes reach the cache: link, copy, stream."""
    if request.param == "no local files":
        yield Repository(MemoryStore())
    elif request.param == "same file system":
        yield Repository(PosixStore(tmp_path / "store"))
    else:
        other = Path("/dev/shm") / f"aenv-test-{secrets.token_hex(8)}"
        try:
            yield Repository(PosixStore(other))
        finally:
            shutil.rmtree(other, ignore_errors=True)


@pytest.fixture
def linked(tmp_path: Path) -> Repository:
    return Repository(PosixStore(tmp_path / "store"))


def stored(repository: Repository, tmp_path: Path, content: bytes = CONTENT) -> Blob:
    return commit(repository, tmp_path, content).disk[0]


def stored_path(repository: Repository, blob: Blob) -> Path:
    path = repository.store.local_path(repository.blob_key(blob.digest))
    assert path is not None
    return path


def settle(path: Path) -> None:
    """As if the file had been written a while ago: a mark is only kept then."""
    long_ago = time.time_ns() - 10**10
    os.utime(path, ns=(long_ago, long_ago))


def test_the_path_has_the_bytes_and_is_read_only(repository: Repository, tmp_path: Path) -> None:
    blob = stored(repository, tmp_path)
    cache = BlobCache(tmp_path / "cache", repository)
    path = cache.path(blob)
    assert path.read_bytes() == CONTENT
    assert path.stat().st_mode & 0o777 == 0o444
    assert cache.path(blob) == path
    assert path.is_relative_to(tmp_path / "cache")
    assert not list((tmp_path / "cache" / "tmp").glob("*"))


def test_copies_are_sparse(tmp_path: Path) -> None:
    repository = Repository(MemoryStore())
    blob = stored(repository, tmp_path, b"\0" * (16 << 20) + b"end")
    assert BlobCache(tmp_path / "cache", repository).path(blob).stat().st_blocks * 512 < 2 << 20


def test_same_file_system_is_a_hard_link(linked: Repository, tmp_path: Path) -> None:
    blob = stored(linked, tmp_path)
    path = BlobCache(tmp_path / "cache", linked).path(blob)
    assert path.samefile(stored_path(linked, blob))
    BlobCache(tmp_path / "cache", linked).link(blob, tmp_path / "layer")
    assert (tmp_path / "layer").samefile(path)


def test_link_across_file_systems_is_a_copy(linked: Repository, tmp_path: Path) -> None:
    blob = stored(linked, tmp_path)
    target = Path("/dev/shm") / f"aenv-test-{secrets.token_hex(8)}"
    try:
        BlobCache(tmp_path / "cache", linked).link(blob, target)
        assert target.read_bytes() == CONTENT and target.stat().st_mode & 0o777 == 0o444
    finally:
        target.unlink(missing_ok=True)


def test_link_replaces_nothing(linked: Repository, tmp_path: Path) -> None:
    blob = stored(linked, tmp_path)
    (tmp_path / "target").write_bytes(b"mine")
    with pytest.raises(Conflict, match="target"):
        BlobCache(tmp_path / "cache", linked).link(blob, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"mine"


def test_verified_once_also_by_the_next_process(linked: Repository, tmp_path: Path) -> None:
    blob = stored(linked, tmp_path)
    settle(stored_path(linked, blob))
    path = BlobCache(tmp_path / "cache", linked).path(blob)
    found = path.stat()
    # Other bytes, with size and mtime put back: only a digest could tell, so no error shows that none was made.
    path.chmod(0o644)
    path.write_bytes(b"y" * len(CONTENT))
    os.utime(path, ns=(found.st_mtime_ns, found.st_mtime_ns))
    assert BlobCache(tmp_path / "cache", linked).path(blob) == path


def test_what_this_process_committed_is_not_digested_again(linked: Repository, tmp_path: Path) -> None:
    captured = capture(tmp_path, CONTENT)
    settle(captured.disk[0])
    blob = linked.commit(captured, draft()).disk[0]
    original = stored_path(linked, blob)
    found = original.stat()
    original.write_bytes(b"y" * len(CONTENT))  # as above: only a digest could tell
    os.utime(original, ns=(found.st_mtime_ns, found.st_mtime_ns))
    assert BlobCache(tmp_path / "cache", linked).path(blob)
    with pytest.raises(CorruptData):
        BlobCache(tmp_path / "other", Repository(linked.store)).path(blob)
    original.write_bytes(b"z" * len(CONTENT))
    with pytest.raises(CorruptData):
        BlobCache(tmp_path / "third", linked).path(blob)


def test_links_and_chmod_need_no_second_look_and_it_is_fast(linked: Repository, tmp_path: Path) -> None:
    blob = stored(linked, tmp_path)
    settle(stored_path(linked, blob))
    cache = BlobCache(tmp_path / "cache", linked)
    path = cache.path(blob)
    inode = path.stat().st_ino
    times = []
    for number in range(50):
        os.link(path, tmp_path / f"link-{number}")
        started = time.perf_counter()
        assert cache.path(blob).stat().st_ino == inode
        times.append(time.perf_counter() - started)
    assert sorted(times)[25] < 0.001


def test_a_file_that_was_just_written_is_not_trusted_yet(linked: Repository, tmp_path: Path) -> None:
    blob = stored(linked, tmp_path)
    ahead = time.time_ns() + 10**10  # so that the test cannot be too slow
    os.utime(stored_path(linked, blob), ns=(ahead, ahead))
    cache = BlobCache(tmp_path / "cache", linked)
    found = cache.path(blob).stat()
    path = cache.path(blob)
    path.chmod(0o644)
    path.write_bytes(b"y" * len(CONTENT))
    os.utime(path, ns=(found.st_mtime_ns, found.st_mtime_ns))  # as a write in the same tick
    with pytest.raises(CorruptData):
        cache.path(blob)


@pytest.mark.parametrize("change", ["rewritten", "cut", "grown"])
def test_an_altered_repository_file_is_refused_and_unlinked(
    linked: Repository, tmp_path: Path, change: str
) -> None:
    blob = stored(linked, tmp_path)
    settle(stored_path(linked, blob))
    cache = BlobCache(tmp_path / "cache", linked)
    path = cache.path(blob)
    original = stored_path(linked, blob)
    if change == "rewritten":
        with original.open("r+b") as file:
            file.write(b"evil")
    else:
        os.truncate(original, blob.size_bytes + (10 if change == "grown" else -10))
    for _ in range(2):  # the second time it is fetched anew
        with pytest.raises(CorruptData) as caught:
            cache.path(blob)
        assert blob.digest in caught.value.message and caught.value.fix
        assert not path.exists()
    with pytest.raises(CorruptData):
        cache.link(blob, tmp_path / "target")
    assert not (tmp_path / "target").exists()
    original.unlink()
    assert stored(linked, tmp_path) == blob  # the fix: build it again
    assert cache.path(blob).read_bytes() == CONTENT


def test_a_damaged_blob_is_refused_at_first_use(repository: Repository, tmp_path: Path) -> None:
    blob = stored(repository, tmp_path)
    key = repository.blobs.require(blob).info.key
    damaged = b"y" * blob.size_bytes
    if isinstance(repository.store, MemoryStore):
        repository.store.damage(key, damaged)
    else:
        stored_path(repository, blob).write_bytes(damaged)
    cache = BlobCache(tmp_path / "cache", repository)
    with pytest.raises(CorruptData) as caught:
        cache.path(blob)
    assert blob.digest in caught.value.message and key in caught.value.message
    assert not list((tmp_path / "cache" / "blobs").rglob("*/*"))
    assert not list((tmp_path / "cache" / "tmp").glob("*"))


def test_a_damaged_copy_is_made_again(tmp_path: Path) -> None:
    repository = Repository(MemoryStore())
    blob = stored(repository, tmp_path)
    cache = BlobCache(tmp_path / "cache", repository)
    path = cache.path(blob)
    path.chmod(0o644)
    path.write_bytes(b"damaged")
    assert cache.path(blob).read_bytes() == CONTENT


def test_a_link_in_the_cache_is_no_blob(linked: Repository, tmp_path: Path) -> None:
    blob = stored(linked, tmp_path)
    cache = BlobCache(tmp_path / "cache", linked)
    path = cache.path(blob)
    path.unlink()
    path.symlink_to("/etc/hostname")
    assert cache.path(blob).read_bytes() == CONTENT
    assert not path.is_symlink()


def test_a_torn_mark_costs_one_digest(linked: Repository, tmp_path: Path) -> None:
    blob = stored(linked, tmp_path)
    settle(stored_path(linked, blob))
    cache = BlobCache(tmp_path / "cache", linked)
    path = cache.path(blob)
    (mark,) = (tmp_path / "cache" / "verified").glob("*/*")
    whole = mark.read_bytes()
    for torn in (b"", whole[:10], whole + b"more", b"\xff" * 1000):
        mark.write_bytes(torn)
        assert cache.path(blob) == path
        assert mark.read_bytes() == whole


def test_a_missing_blob_is_named(linked: Repository, tmp_path: Path) -> None:
    with pytest.raises(CorruptData, match=ZERO_DIGEST):
        BlobCache(tmp_path / "cache", linked).path(Blob(digest=ZERO_DIGEST, size_bytes=1))


def test_many_at_once(repository: Repository, tmp_path: Path) -> None:
    blob = stored(repository, tmp_path)
    caches = [BlobCache(tmp_path / "cache", repository) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda cache: cache.path(blob), caches))
    assert len(paths) == 1
    assert paths.pop().read_bytes() == CONTENT
    assert not list((tmp_path / "cache" / "tmp").glob("*"))
