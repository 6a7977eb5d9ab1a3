"""What only the posix store has: a hostile directory, permissions, a full disk's errors."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from aenv_run.errors import AenvError, CorruptData, InvalidInput, NoSpace
from aenv_run.store import StoreKey, Stray
from aenv_run.store.posix import PosixStore
from aenv_run.store.posix_files import typed_error

KEY = StoreKey("a/b")


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    return PosixStore(tmp_path / "deep" / "store")


def test_modes(store: PosixStore) -> None:
    store.put_new(KEY, b"1")
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700
    assert stat.S_IMODE((store.root / "a").stat().st_mode) == 0o700
    assert stat.S_IMODE((store.root / "a/b").stat().st_mode) == 0o444
    store.swap(KEY, b"2", expected=b"1")
    assert stat.S_IMODE((store.root / "a/b").stat().st_mode) == 0o444


def test_reading_creates_nothing(store: PosixStore) -> None:
    assert store.stat(KEY) is None and list(store.list("")) == [] and list(store.strays()) == []
    assert not store.root.exists()


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_is_no_repository(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("not ours")
    store = PosixStore(tmp_path / "file" / below)
    for call in (
        lambda: store.stat(KEY),
        lambda: list(store.list("")),
        lambda: store.put_new(KEY, b"1"),
        lambda: store.read(KEY, limit_bytes=1),
        lambda: store.delete(KEY),
    ):
        with pytest.raises(InvalidInput, match="is no directory"):
            call()
    assert (tmp_path / "file").read_text() == "not ours"


def test_consume_takes_the_file_itself(store: PosixStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * 100)
    inode = source.stat().st_ino
    store.put_file(KEY, source, consume=True)
    assert (store.root / "a/b").stat().st_ino == inode


def test_consume_across_file_systems_copies(store: PosixStore) -> None:
    source = Path("/dev/shm") / f"aenv-test-{os.getpid()}"
    source.write_bytes(b"x" * 100)
    try:
        assert store.put_file(KEY, source, consume=True)
        assert store.read(KEY, limit_bytes=100) == b"x" * 100
        assert not list(store.strays())
    finally:
        source.unlink(missing_ok=True)


@pytest.mark.parametrize("target", ["/etc/hostname", "c", "/nowhere"])
def test_a_link_in_place_of_an_object_is_not_followed(store: PosixStore, target: str) -> None:
    store.put_new(StoreKey("a/c"), b"1")
    (store.root / "a/b").symlink_to(target)
    source = store.root.parent / "source"
    source.write_bytes(b"2")
    for call in (
        lambda: store.read(KEY, limit_bytes=1 << 20),
        lambda: store.read_range(KEY, 0, 1),
        lambda: store.stat(KEY),
        lambda: store.local_path(KEY),
        lambda: store.put_new(KEY, b"2"),
        lambda: store.put_file(KEY, source, consume=True),
        lambda: store.swap(KEY, b"2", expected=None),
    ):
        with pytest.raises(AenvError) as caught:
            call()
        assert caught.type is CorruptData and "a/b" in caught.value.message
    assert not store.swap(KEY, b"2", expected=b"1")
    assert [info.key for info in store.list("")] == ["a/c"]
    assert store.read(StoreKey("a/c"), limit_bytes=1) == b"1"
    store.delete(KEY)
    assert store.put_new(KEY, b"2")


def test_a_link_in_place_of_a_directory_is_not_followed(store: PosixStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "b").write_bytes(b"secret")
    store.put_new(StoreKey("z/z"), b"1")
    (store.root / "a").symlink_to(outside)
    for call in (
        lambda: store.read(KEY, limit_bytes=100),
        lambda: store.stat(KEY),
        lambda: store.put_new(StoreKey("a/new"), b"2"),
        lambda: store.delete(KEY),
    ):
        with pytest.raises(CorruptData):
            call()
    assert [info.key for info in store.list("")] == ["z/z"]
    assert sorted(path.name for path in outside.iterdir()) == ["b"]


def test_odd_files_neither_hang_nor_count(store: PosixStore) -> None:
    store.put_new(StoreKey("a/c"), b"1")
    os.mkfifo(store.root / "a/b")
    with pytest.raises(CorruptData):
        store.read(KEY, limit_bytes=10)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(store.root / "a/s"))
    (store.root / "a/.hidden").write_bytes(b"")
    (store.root / "a/white space").write_bytes(b"")
    Path(os.fsdecode(bytes(store.root) + b"/a/\xff")).write_bytes(b"")
    (store.root / "a/l").symlink_to("c")
    assert [info.key for info in store.list("")] == ["a/c"]
    strays = list(store.strays())
    assert {stray.kind for stray in strays} == {"foreign"}
    assert {stray.path for stray in strays} == {"a/b", "a/s", "a/.hidden", "a/white space", "a/\\udcff", "a/l"}


def test_temporaries_are_strays_and_no_objects(store: PosixStore) -> None:
    store.put_new(KEY, b"1")
    (store.root / ".tmp" / "12-ab").write_bytes(b"half")
    assert [info.key for info in store.list("")] == ["a/b"]
    (stray,) = store.strays()
    assert stray == Stray("temporary", ".tmp/12-ab", stray.detail, stray.modified_s)


def test_a_temporary_is_cleared_and_nothing_outside(store: PosixStore, tmp_path: Path) -> None:
    store.put_new(KEY, b"x")
    (store.root / ".tmp" / "left").write_bytes(b"half")
    (stray,) = store.strays()
    assert stray.modified_s > 0
    store.clear(stray)
    store.clear(stray)
    assert list(store.strays()) == []
    for path in (".tmp/../blobs", ".tmp", "blobs/x", ".tmp/"):
        with pytest.raises(InvalidInput):
            store.clear(Stray("temporary", path, ""))
    assert store.read(KEY, limit_bytes=1) == b"x"


def test_a_failed_write_leaves_no_temporary(store: PosixStore) -> None:
    store.put_new(KEY, b"1")
    source = store.root.parent / "source"
    source.write_bytes(b"x")
    (store.root / "a" / "d").mkdir()
    with pytest.raises(AenvError):
        store.put_file(StoreKey("a/d"), source)
    assert not list(store.strays())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_and_a_full_quota_are_no_space(number: int) -> None:
    error = typed_error(OSError(number, os.strerror(number)), "storing a/b", Path("/somewhere"))
    assert isinstance(error, NoSpace)
    assert "a/b" in error.message and "/somewhere" in error.fix


def test_deep_directories_are_reported_not_walked(store: PosixStore) -> None:
    store.put_new(KEY, b"1")
    (store.root / "/".join(["d"] * 40)).mkdir(parents=True)
    assert [info.key for info in store.list("")] == ["a/b"]
    (stray,) = store.strays()
    assert stray.kind == "foreign"


def test_no_descriptor_is_left_open(store: PosixStore) -> None:
    def used() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    store.put_new(KEY, b"1")
    before = used()
    for _ in range(5):
        store.put_new(StoreKey("x/y/z"), b"1")
        store.swap(KEY, b"1", expected=b"1")
        store.read(KEY, limit_bytes=10)
        list(store.list(""))
        next(store.list(""))
        store.delete(StoreKey("x/y/z"))
        assert store.stat(StoreKey("q/w")) is None
    assert used() == before
