"""The packed form: what it holds, what a reader refuses, and that either form is the blob."""

from __future__ import annotations

import random
import struct
import tracemalloc
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aenv_run.blobs import MIN_SAVED, packed_file
from aenv_run.cache import BlobCache
from aenv_run.catalog import Catalog
from aenv_run.catalog.export import export
from aenv_run.catalog.intake import take_in
from aenv_run.check import check
from aenv_run.chunks import CHUNK_BYTES, ChunkReader
from aenv_run.describe import describe
from aenv_run.errors import CorruptData
from aenv_run.packed import HEADER_BYTES, PackedIndex, index_bytes
from aenv_run.repository import Repository
from aenv_run.snapshot import Blob
from aenv_run.store.memory import MemoryStore
from aenv_run.store.posix import PosixStore
from aenv_run.store.s3 import S3Store
from aenv_run.types import Name
from tests.bytes_half import capture, commit, draft
from tests.s3.server import Server
from tests.small_file_system import fill, small_file_system
from tests.style.source import ROOT

RANDOM = random.Random(2)
TEXT = b"".join(b"%d lines of text\n" % number for number in range(100_000))
#: Text, zeros, what does not compress, text, a part of a chunk.
CONTENT = (
    TEXT[:CHUNK_BYTES]
    + bytes(CHUNK_BYTES)
    + RANDOM.randbytes(CHUNK_BYTES)
    + TEXT[CHUNK_BYTES : 2 * CHUNK_BYTES + 99]
)


class Wire:
    """A repository over a wire with one packed blob, and the bytes of that."""

    def __init__(self, scratch: Path) -> None:
        self.store = MemoryStore()
        self.repository = Repository(self.store)
        self.snapshot = commit(self.repository, scratch, CONTENT)
        self.blob = self.snapshot.disk[0]
        self.key = self.repository.blobs.packed_key(self.blob.digest)
        self.data = self.store.read(self.key, limit_bytes=1 << 22)

    def read(self) -> bytes:
        with self.repository.open_blob(self.blob.digest) as reader:
            return reader.read()


@pytest.fixture
def wire(tmp_path: Path) -> Wire:
    return Wire(tmp_path)


def frames(data: bytes) -> list[bytes]:
    index = PackedIndex.parse(data[: index_bytes(len(CONTENT))], "it")
    return [data[index.offsets[number] : index.offsets[number + 1]] for number in range(index.count)]


def test_the_documented_example(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "snapshot-format.md").read_text()
    after = text.split("A blob of 262144 zeros and `aenv chunk` has the table", 1)[1].split("```")
    table, packed = (bytes.fromhex("".join(after[number].split())) for number in (1, 3))
    path = tmp_path / "blob"
    path.write_bytes(bytes(262144) + b"aenv chunk")
    (one,) = describe([path])
    assert one.table is not None and one.table.encoded() == table
    with packed_file(path, tmp_path, one.blob, one.table) as made:
        assert made is not None and made.read_bytes() == packed and len(packed) == 50


def test_the_bytes_are_as_documented(wire: Wire) -> None:
    assert struct.unpack("<8sQQQ", wire.data[:HEADER_BYTES]) == (b"aenvpack", 1, CHUNK_BYTES, len(CONTENT))
    lengths = struct.unpack("<5I", wire.data[HEADER_BYTES : HEADER_BYTES + 20])
    assert len(wire.data) == HEADER_BYTES + 20 + sum(lengths)
    assert lengths[1] == 0 and lengths[2] == CHUNK_BYTES and lengths[4] < 99
    unpacked = [
        zstandard.decompress(frame) for number, frame in enumerate(frames(wire.data)) if number in (0, 3, 4)
    ]
    assert unpacked == [
        CONTENT[:CHUNK_BYTES],
        CONTENT[3 * CHUNK_BYTES : 4 * CHUNK_BYTES],
        CONTENT[4 * CHUNK_BYTES :],
    ]
    assert frames(wire.data)[2] == CONTENT[2 * CHUNK_BYTES : 3 * CHUNK_BYTES]


def test_a_packed_blob_is_the_blob(wire: Wire, tmp_path: Path) -> None:
    repository = wire.repository
    assert repository.store.stat(repository.blob_key(wire.blob.digest)) is None
    assert wire.read() == CONTENT
    repository.require_blob(wire.blob)
    repository.verify_blob(wire.blob)
    report = check(repository, deep=True)
    assert report.ok and report.counts["packed_blobs"] == 1 and report.counts["blobs"] == 2
    path = BlobCache(tmp_path / "cache", repository).path(wire.blob)
    assert path.read_bytes() == CONTENT
    found = path.stat()
    assert found.st_blocks * 512 <= found.st_size - CHUNK_BYTES + 8192, "zeros are a hole"
    catalog = Catalog(repository, by="x")
    catalog.publish(Name("task"), wire.snapshot.id)
    export(catalog, "task", tmp_path / "layout")
    ours = Catalog(Repository(PosixStore(tmp_path / "ours")), by="y")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert take_in(ours, tmp_path / "layout", scratch).snapshot_id == wire.snapshot.id
    assert check(ours.repository, deep=True).ok
    back = Repository(MemoryStore())
    take_in(Catalog(back, by="z"), tmp_path / "layout", scratch)
    assert check(back, deep=True).counts["packed_blobs"] == 1


def test_a_commit_over_a_wire_leaves_no_scratch_and_sends_nothing_twice(tmp_path: Path) -> None:
    store = MemoryStore()
    repository = Repository(store)
    first = repository.commit(capture(tmp_path, CONTENT, ram=TEXT), draft())
    before = {info.key: info.modified_s for info in store.list("") if not info.key.startswith("snapshots/")}
    captured = capture(tmp_path, CONTENT, ram=TEXT)
    second = repository.commit(captured, draft(suite="other"))
    after = {info.key: info.modified_s for info in store.list("") if not info.key.startswith("snapshots/")}
    assert second.id != first.id and second.blobs() == first.blobs()
    assert after == before and not captured.directory.exists()


def test_over_s3_a_second_snapshot_sends_only_what_is_new(s3_server: Server, tmp_path: Path) -> None:
    """And what is read comes in ranges, in order, whole."""
    repository = Repository(S3Store(s3_server.place(uuid4().hex), lock=tmp_path / "lock"))
    layer = TEXT + RANDOM.randbytes(CHUNK_BYTES) + bytes(10 * CHUNK_BYTES) + TEXT
    first = commit(repository, tmp_path, layer, CONTENT)
    sent = {info.key: info for kind in ("blobs/", "packed/") for info in repository.store.list(kind)}
    assert sorted(sent.values(), key=lambda info: info.size_bytes)[-1].size_bytes < len(layer) / 2
    second = repository.commit(capture(tmp_path, layer, CONTENT), draft(suite="other"))
    grown = commit(repository, tmp_path, b"more", parent=first)
    after = {info.key: info for kind in ("blobs/", "packed/") for info in repository.store.list(kind)}
    assert second.disk == first.disk and sent.items() <= after.items()
    assert after.keys() - sent.keys() == {repository.blob_key(grown.disk[2].digest)}
    assert BlobCache(tmp_path / "cache", repository).path(first.disk[0]).read_bytes() == layer
    reader = ChunkReader(repository)
    table = reader.table(first.disk[0])
    assert table is not None
    assert b"".join(reader.read(first.disk[0], table, 3, 20)) == layer[3 * CHUNK_BYTES : 23 * CHUNK_BYTES]


def test_what_does_not_shrink_stays_raw(tmp_path: Path) -> None:
    store = MemoryStore()
    repository = Repository(store)
    noise = RANDOM.randbytes(20 * CHUNK_BYTES)
    blob = commit(repository, tmp_path, noise).disk[0]
    assert [info.key for info in store.list("packed/")] == []
    assert store.stat(repository.blob_key(blob.digest)) is not None
    with repository.open_blob(blob.digest) as reader:
        assert reader.read() == noise
    shrinks = noise[: int(len(noise) * (1 - MIN_SAVED)) - CHUNK_BYTES] + bytes(2 * CHUNK_BYTES)
    commit(repository, tmp_path, shrinks)
    assert len(list(store.list("packed/"))) == 1


def test_where_there_is_no_room_to_pack_it_is_sent_raw(tmp_path: Path) -> None:
    store = MemoryStore()
    repository = Repository(store)
    with small_file_system(tmp_path / "small", 4 << 20) as place:
        captured = capture(place, CONTENT)
        fill(place)
        blob = repository.commit(captured, draft()).disk[0]
    assert [one.packed for one in repository.blobs.forms(blob.digest)] == [False]
    assert check(repository, deep=True).ok


@pytest.mark.parametrize("form", ["raw", "packed"])
def test_a_layer_is_stored_once_in_whatever_form(tmp_path: Path, wire: Wire, form: str) -> None:
    repository = Repository(PosixStore(tmp_path / "store"))
    if form == "packed":  # as a packer leaves it
        repository.store.put_new(wire.key, wire.data)
    else:
        commit(repository, tmp_path, CONTENT)
    snapshot = repository.commit(capture(tmp_path, CONTENT), draft(other="label"))
    stored = repository.blobs.forms(snapshot.disk[0].digest)
    assert [one.packed for one in stored] == [form == "packed"]
    assert check(repository, deep=True).ok


def test_a_file_that_changes_before_it_is_sent_is_not(tmp_path: Path) -> None:
    repository = Repository(MemoryStore())
    path = tmp_path / "layer"
    path.write_bytes(CONTENT)
    (one,) = describe([path])
    path.write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(CorruptData, match=one.blob.digest):
        repository.blobs.put(path, one.blob, one.table)
    assert not list(repository.store.list("")) and [each.name for each in tmp_path.iterdir()] == ["layer"]


# -- what a reader refuses ---------------------------------------------------------------------------------------


def reads(wire: Wire, data: bytes) -> list[bytes]:
    """What each way to read the blob makes of these bytes; nothing of those that refuse them."""
    wire.store.damage(wire.key, data)
    repository = Repository(wire.store)
    reader = ChunkReader(repository)
    table = reader.table(wire.blob)
    assert table is not None
    found: list[bytes] = []
    with suppress(CorruptData):
        found.append(b"".join(reader.read(wire.blob, table, 0, table.count)))
    with suppress(CorruptData), repository.open_blob(wire.blob.digest) as opened:
        found.append(opened.read())
    with suppress(CorruptData):
        repository.verify_blob(wire.blob)
        found.append(CONTENT)
    report = check(repository, deep=True)
    assert [problem.key for problem in report.problems] == ([] if found else [wire.key])
    return found


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_altered_bytes_are_refused(wire: Wire, data: st.DataObject) -> None:
    good = wire.data
    cut = st.integers(0, len(good) - 1).map(lambda end: good[:end])
    grown = st.binary(min_size=1, max_size=50).map(lambda more: good + more)
    assert reads(wire, data.draw(st.one_of(st.binary(max_size=100), cut, grown))) == []
    places = st.one_of(st.integers(0, index_bytes(len(CONTENT)) - 1), st.integers(0, len(good) - 1))
    found = reads(wire, flip(good, data.draw(places), data.draw(st.integers(1, 255))))
    assert found in ([], [CONTENT] * 3), "a bit of a frame may mean nothing"


def flip(data: bytes, at: int, bits: int) -> bytes:
    return data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :]


@given(
    data=st.binary(max_size=200), blob_bytes=st.integers(0, 1 << 62), chunk=st.sampled_from([CHUNK_BYTES, 1, 0])
)
def test_any_index_is_parsed_or_refused(data: bytes, blob_bytes: int, chunk: int) -> None:
    header = struct.pack("<8sQQQ", b"aenvpack", 1, chunk, blob_bytes)
    for whole in (data, header + data):
        try:
            index = PackedIndex.parse(whole, "it")
        except CorruptData:
            continue
        assert index_bytes(index.blob_bytes) == len(whole) and index.blob_bytes == blob_bytes


def test_no_frame_makes_more_than_its_chunk(wire: Wire) -> None:
    """Bombs: of a header that lies, of much from little, of two frames, of none."""
    bomb = zstandard.compress(bytes(1 << 28))
    streamed = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(CHUNK_BYTES))
    text = frames(wire.data)[0]
    lies = bytearray(zstandard.compress(CONTENT[:CHUNK_BYTES]))
    assert zstandard.get_frame_parameters(bytes(lies)).content_size == CHUNK_BYTES
    huge = struct.pack("<IBQ", 0xFD2FB528, 0xE0, 1 << 60) + bytes(20)
    skippable = struct.pack("<II", 0x184D2A50, 4) + b"skip"
    index = PackedIndex.parse(wire.data[: index_bytes(len(CONTENT))], "it")
    tracemalloc.start()
    try:
        for stored in (
            bomb,
            streamed,
            text + text,
            text + b"x",
            text[:-1],
            huge,
            skippable + text,
            b"\0",
            text[4:],
        ):
            with pytest.raises(CorruptData, match="does not unpack"):
                index.unpack(0, stored)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_an_index_that_is_larger_than_the_object_reserves_nothing(tmp_path: Path, wire: Wire) -> None:
    lie = struct.pack("<8sQQQ", b"aenvpack", 1, CHUNK_BYTES, 1 << 40)
    wire.store.damage(wire.key, lie)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptData):
            wire.read()
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_packed_form_of_more_than_the_blob_is_not_read_on(tmp_path: Path, wire: Wire) -> None:
    """64 GiB of zeros take a megabyte: whoever knows the blob's size stops there."""
    bomb = struct.pack("<8sQQQ", b"aenvpack", 1, CHUNK_BYTES, 1 << 36) + bytes(4 << 18)
    wire.store.damage(wire.key, bomb)
    with pytest.raises(CorruptData, match="bytes instead of"):
        BlobCache(tmp_path / "cache", wire.repository).path(wire.blob)
    with pytest.raises(CorruptData, match="its first"), wire.repository.open_blob(wire.blob) as reader:
        while reader.read(CHUNK_BYTES):
            pass
    assert [problem.kind for problem in check(wire.repository, deep=True).problems] == ["wrong_size"]


def test_packing_again_is_possible_beside_what_was_left(tmp_path: Path) -> None:
    path = tmp_path / "layer"
    path.write_bytes(CONTENT)
    (one,) = describe([path])
    told: list[int] = []
    with packed_file(path, tmp_path, one.blob, one.table, told.append) as packed:
        assert packed is not None and packed.parent == tmp_path and packed.stat().st_size < len(CONTENT)
    assert told == sorted(told) and told[-1] == len(CONTENT)
    assert [each.name for each in tmp_path.iterdir()] == ["layer"]
    wrong = Blob(digest=one.blob.digest, size_bytes=len(CONTENT) + 1)
    with pytest.raises(CorruptData), packed_file(path, tmp_path, wrong, None):
        pass
