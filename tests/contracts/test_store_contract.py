"""What every store promises (aenv_run/store/protocol.py), checked on every store."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aenv_run.errors import Conflict, CorruptData, InvalidInput, NotFound
from aenv_run.store import Store, StoreKey, Stray
from aenv_run.store.memory import MemoryStore
from aenv_run.store.posix import PosixStore
from aenv_run.store.remote import RemoteStore
from aenv_run.store.s3 import S3Store
from tests.s3.swift import SWIFT
from tests.unit.store_server import StoreServer, store_server

KEY = StoreKey("blobs/sha256/ab/abcdef")


STORES = [
    "posix",
    "memory",
    "remote",
    "s3",
    pytest.param("swift", marks=pytest.mark.skipif(not SWIFT, reason="make soak starts Swift")),
]
AT_ONCE = 16
Make = Callable[[], Store]


@pytest.fixture(scope="module")
def remote_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    with store_server(tmp_path_factory.mktemp("remote")) as server:
        yield server


@pytest.fixture(params=STORES)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes an empty store with each call."""
    if request.param == "memory":
        return MemoryStore
    if request.param == "posix":
        return lambda: PosixStore(tmp_path / uuid4().hex)
    if request.param == "remote":
        given = request.getfixturevalue("remote_server")
        return lambda: RemoteStore(given.address())
    server = request.getfixturevalue(f"{request.param}_server")
    return lambda: S3Store(server.place(uuid4().hex), lock=tmp_path / "lock", part_bytes=5 << 20)


@pytest.fixture
def store(make: Make) -> Store:
    return make()


def at_once(count: int, call: Callable[[int], bool]) -> list[bool]:
    """Run ``call`` in ``count`` threads that start together."""
    barrier = threading.Barrier(count)

    def one(index: int) -> bool:
        barrier.wait()
        return call(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


# Creating


def test_put_new_creates_once(store: Store) -> None:
    assert store.put_new(KEY, b"one")
    assert not store.put_new(KEY, b"two")
    assert not store.put_new(KEY, b"one")
    assert store.read(KEY, limit_bytes=10) == b"one"


def test_put_new_has_one_winner_whose_bytes_stay(store: Store) -> None:
    won = at_once(AT_ONCE, lambda index: store.put_new(KEY, b"%d" % index))
    assert won.count(True) == 1
    assert store.read(KEY, limit_bytes=10) == b"%d" % won.index(True)


@pytest.mark.parametrize("consume", [False, True])
def test_put_file_creates_once(store: Store, tmp_path: Path, consume: bool) -> None:
    for content, created in ((b"one", True), (b"two", False)):
        source = tmp_path / "source"
        source.unlink(missing_ok=True)
        source.write_bytes(content)
        assert store.put_file(KEY, source, consume=consume) is created
    assert store.read(KEY, limit_bytes=10) == b"one"


@pytest.mark.parametrize("consume", [False, True])
def test_put_file_has_one_winner(store: Store, tmp_path: Path, consume: bool) -> None:
    sources = [tmp_path / str(index) for index in range(AT_ONCE)]
    for index, source in enumerate(sources):
        source.write_bytes(b"%d" % index)
    won = at_once(AT_ONCE, lambda index: store.put_file(KEY, sources[index], consume=consume))
    assert won.count(True) == 1
    assert store.read(KEY, limit_bytes=10) == b"%d" % won.index(True)


def test_put_file_without_consume_leaves_the_source_alone(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"one")
    source.chmod(0o640)
    store.put_file(KEY, source)
    assert source.stat().st_mode & 0o777 == 0o640
    source.write_bytes(b"changed afterwards")
    assert store.read(KEY, limit_bytes=100) == b"one"


def test_put_file_can_be_repeated_with_the_same_source(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"one")
    assert store.put_file(KEY, source, consume=True)
    if source.exists():
        assert not store.put_file(KEY, source, consume=True)
    assert store.read(KEY, limit_bytes=10) == b"one"


def test_put_file_refuses_what_is_no_regular_file(store: Store, tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"x")
    (tmp_path / "link").symlink_to("target")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo", "."):
        with pytest.raises(InvalidInput):
            store.put_file(KEY, tmp_path / name, consume=True)
    with pytest.raises(NotFound):
        store.put_file(KEY, tmp_path / "absent")
    assert store.stat(KEY) is None


@pytest.mark.parametrize("consume", [False, True])
@pytest.mark.parametrize("data_at", [0, 4 << 20, (24 << 20) - 5, None])
def test_content_with_holes_is_kept(store: Store, tmp_path: Path, consume: bool, data_at: int | None) -> None:
    source = tmp_path / "source"
    with source.open("wb") as file:
        file.truncate(24 << 20)
        if data_at is not None:
            file.seek(data_at)
            file.write(b"data!")
    store.put_file(KEY, source, consume=consume)
    info = store.stat(KEY)
    assert info is not None and info.size_bytes == 24 << 20
    if data_at is not None:
        assert store.read_range(KEY, data_at, 5) == b"data!"
    if (path := store.local_path(KEY)) is not None:
        assert path.stat().st_blocks * 512 < 1 << 20


def test_one_key_is_never_the_directory_of_another(store: Store, tmp_path: Path) -> None:
    if isinstance(store, S3Store):
        pytest.skip("a bucket has no directories")
    source = tmp_path / "source"
    source.write_bytes(b"x")
    store.put_new(StoreKey("a/b"), b"1")
    for call in (
        lambda: store.put_new(StoreKey("a/b/c"), b"2"),
        lambda: store.put_new(StoreKey("a"), b"2"),
        lambda: store.swap(StoreKey("a"), b"2", expected=None),
        lambda: store.put_file(StoreKey("a"), source),
        lambda: store.put_file(StoreKey("a/b/c"), source, consume=True),
    ):
        with pytest.raises(Conflict):
            call()
    assert [info.key for info in store.list("")] == ["a/b"]
    assert store.stat(StoreKey("a")) is None and store.stat(StoreKey("a/b/c")) is None
    for absent in ("a", "a/b/c"):
        with pytest.raises(NotFound):
            store.read(StoreKey(absent), limit_bytes=1)
        store.delete(StoreKey(absent))


# Swapping


def test_swap_writes_only_over_what_was_expected(store: Store) -> None:
    assert not store.swap(KEY, b"1", expected=b"0")
    assert store.stat(KEY) is None
    assert store.swap(KEY, b"1", expected=None)
    assert not store.swap(KEY, b"2", expected=None)
    assert not store.swap(KEY, b"2", expected=b"")
    assert not store.swap(KEY, b"2", expected=b"11")
    assert store.swap(KEY, b"2", expected=b"1")
    assert store.read(KEY, limit_bytes=10) == b"2"


@pytest.mark.parametrize("expected", [None, b"start"])
def test_swap_has_one_winner(store: Store, expected: bytes | None) -> None:
    if expected is not None:
        store.put_new(KEY, expected)
    won = at_once(AT_ONCE, lambda index: store.swap(KEY, b"%d" % index, expected=expected))
    assert won.count(True) == 1
    assert store.read(KEY, limit_bytes=10) == b"%d" % won.index(True)


def test_swaps_of_many_threads_lose_no_update(store: Store) -> None:
    store.put_new(KEY, b"0")

    def add_five(_: int) -> bool:
        done = 0
        while done < 5:
            present = store.read(KEY, limit_bytes=10)
            done += store.swap(KEY, b"%d" % (int(present) + 1), expected=present)
        return True

    at_once(6, add_five)
    assert store.read(KEY, limit_bytes=10) == b"30"


# Reading


def test_readers_see_old_or_new_never_a_part(store: Store) -> None:
    values = [bytes([65 + index]) * (200_000 + index) for index in range(2)]
    store.put_new(KEY, values[0])
    stop = threading.Event()
    seen: list[bytes] = []

    def reader() -> None:
        while not stop.is_set():
            seen.append(store.read(KEY, limit_bytes=1 << 20))

    threads = [threading.Thread(target=reader) for _ in range(2)]
    for thread in threads:
        thread.start()
    for index in range(30):
        assert store.swap(KEY, values[(index + 1) % 2], expected=values[index % 2])
    stop.set()
    for thread in threads:
        thread.join()
    assert seen and all(data in values for data in seen)


def test_an_open_reader_keeps_its_bytes(store: Store) -> None:
    store.put_new(KEY, b"old bytes")
    with store.open(KEY) as file:
        assert file.read(3) == b"old"
        store.swap(KEY, b"new", expected=b"old bytes")
        store.delete(KEY)
        assert file.read() == b" bytes"
        assert file.read() == b""


def test_listing_shows_no_object_before_it_is_whole(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(8 << 20))
    done = threading.Event()

    def write() -> None:
        store.put_file(KEY, source)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not done.is_set():
        assert all(info.size_bytes == 8 << 20 for info in store.list(""))
    thread.join()
    assert [info.key for info in store.list("")] == [KEY]


def test_missing_keys(store: Store) -> None:
    assert store.stat(KEY) is None
    assert store.local_path(KEY) is None
    assert list(store.list("")) == []
    assert list(store.strays()) == []
    store.delete(KEY)
    with pytest.raises(NotFound, match="abcdef"):
        store.read(KEY, limit_bytes=10)
    with pytest.raises(NotFound):
        store.read_range(KEY, 0, 1)
    with pytest.raises(NotFound), store.open(KEY):
        pass


def test_read_is_bounded(store: Store) -> None:
    store.put_new(KEY, b"12345")
    assert store.read(KEY, limit_bytes=5) == b"12345"
    with pytest.raises(CorruptData, match="abcdef"):
        store.read(KEY, limit_bytes=4)
    assert store.put_new(StoreKey("empty"), b"")
    assert store.read(StoreKey("empty"), limit_bytes=0) == b""


def test_read_range_is_exact(store: Store) -> None:
    store.put_new(KEY, b"0123456789")
    assert store.read_range(KEY, 0, 10) == b"0123456789"
    assert store.read_range(KEY, 3, 4) == b"3456"
    assert store.read_range(KEY, 10, 0) == b""
    for offset, length in ((0, 11), (9, 2), (100, 1)):
        with pytest.raises(CorruptData, match="abcdef"):
            store.read_range(KEY, offset, length)
    for offset, length in ((-1, 1), (0, -1)):
        with pytest.raises(InvalidInput):
            store.read_range(KEY, offset, length)


def test_stat_has_size_and_time(store: Store) -> None:
    store.put_new(KEY, b"12345")
    info = store.stat(KEY)
    assert info is not None
    assert (info.key, info.size_bytes) == (KEY, 5)
    assert abs(info.modified_s - time.time()) < 60
    assert list(store.list("blobs/")) == [info]


def test_delete(store: Store) -> None:
    store.put_new(KEY, b"1")
    store.put_new(StoreKey("blobs/sha256/ab/other"), b"2")
    store.delete(KEY)
    store.delete(KEY)
    assert store.stat(KEY) is None
    assert [info.key for info in store.list("")] == ["blobs/sha256/ab/other"]
    assert store.put_new(KEY, b"3")


def test_only_unfinished_writes_can_be_cleared(store: Store) -> None:
    store.put_new(KEY, b"1")
    for stray in (Stray("foreign", KEY, ""), Stray("foreign", "x?uploadId=y", ""), Stray("foreign", ".tmp/x", "")):
        with pytest.raises(InvalidInput):
            store.clear(stray)
    assert store.read(KEY, limit_bytes=1) == b"1"


def test_a_local_path_has_the_bytes(store: Store) -> None:
    store.put_new(KEY, b"12345")
    path = store.local_path(KEY)
    assert path is None or path.read_bytes() == b"12345"


# Keys and lists


@pytest.mark.parametrize(
    "text",
    ["", "/", "/a", "a/", "a//b", ".", "..", "a/..", "../a", "a/./b", ".tmp/x", "a/.b", "a\0", "a b", "a\n"],
)
def test_bad_keys_are_refused_before_any_store_sees_them(text: str) -> None:
    with pytest.raises(InvalidInput):
        StoreKey(text)


@pytest.mark.parametrize("text", ["ä", "a\\b", "-a", "a" * 129, "/".join("abcdefghi")])
def test_keys_outside_the_alphabet_or_too_long_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        StoreKey(text)


@pytest.mark.parametrize("prefix", ["..", "../", "/", "/etc", ".tmp", ".lock", "a/../b", "\0"])
def test_a_prefix_is_text_and_leads_nowhere(store: Store, prefix: str) -> None:
    store.put_new(StoreKey("a/b"), b"1")
    store.swap(StoreKey("a/b"), b"2", expected=b"1")
    assert list(store.list(prefix)) == []


PARTS = st.sampled_from(["a", "a-", "a.b", "a0", "ab", "b", "B", "_"])
KEYS = st.lists(PARTS, min_size=1, max_size=3).map("/".join)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys=st.sets(KEYS, max_size=8), prefix=st.one_of(KEYS, st.just(""), KEYS.map(lambda key: key + "/")))
def test_list_is_in_order_of_key_and_by_prefix(make: Make, keys: set[str], prefix: str) -> None:
    store = make()
    stored = set()
    for key in sorted(keys):
        try:
            store.put_new(StoreKey(key), b"x")
            stored.add(key)
        except Conflict:
            continue
    assert [info.key for info in store.list(prefix)] == sorted(k for k in stored if k.startswith(prefix))


BYTES = st.binary(max_size=2)
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "swap", "delete"]), st.sampled_from("abc"), BYTES, BYTES), max_size=20
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS)
def test_any_sequence_gives_the_same_as_a_dictionary(
    make: Make, operations: list[tuple[str, str, bytes, bytes]]
) -> None:
    store = make()
    model: dict[str, bytes] = {}
    for verb, name, data, expected in operations:
        key = StoreKey(f"k/{name}")
        if verb == "put":
            assert store.put_new(key, data) is (name not in model)
            model.setdefault(name, data)
        elif verb == "swap":
            fits = model.get(name) == (expected or None)
            assert store.swap(key, data, expected=expected or None) is fits
            if fits:
                model[name] = data
        else:
            store.delete(key)
            model.pop(name, None)
    content = {info.key[2:]: store.read(info.key, limit_bytes=10) for info in store.list("")}
    assert content == model
