"""Chunk tables: what a commit makes of files, and what a reader of parts believes."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from aenv_run.check import check
from aenv_run.chunk_table import has_table, table_bytes
from aenv_run.chunks import CHUNK_BYTES, MAX_READ_CHUNKS, ChunkReader, ChunkTable
from aenv_run.describe import describe
from aenv_run.digest import canonical_json
from aenv_run.errors import CorruptData, InvalidInput, NotFound
from aenv_run.repository import Repository
from aenv_run.snapshot import Blob, Snapshot
from aenv_run.store.memory import MemoryStore
from aenv_run.store.posix import PosixStore
from tests.bytes_half import ZERO_DIGEST, capture, commit, draft

BLOB_BYTES = 2 * CHUNK_BYTES + 100
DENSE = random.Random(1).randbytes(BLOB_BYTES)
#: Data, zeros, zeros, data, a part of a chunk.
TEXT = b"".join(b"line %d of a text\n" % number for number in range(40_000))
TEXT_MIXED = TEXT[:CHUNK_BYTES] + bytes(2 * CHUNK_BYTES) + TEXT[-CHUNK_BYTES - 77 :]
MIXED = DENSE[:CHUNK_BYTES] + bytes(2 * CHUNK_BYTES) + DENSE[: CHUNK_BYTES + 77]


@pytest.fixture(params=["posix", "memory"])
def repository(request: pytest.FixtureRequest, tmp_path: Path) -> Repository:
    return Repository(PosixStore(tmp_path / "store") if request.param == "posix" else MemoryStore())


def stored_as(form: str, store: MemoryStore, scratch: Path, content: bytes) -> tuple[Repository, Blob]:
    """A repository over a wire that has a blob in this form."""
    repository = Repository(store)
    blob = commit(repository, scratch, content).disk[0]
    if form == "raw" and store.stat(repository.blobs.packed_key(blob.digest)) is not None:
        store.delete(repository.blobs.packed_key(blob.digest))
        store.put_new(repository.blob_key(blob.digest), content)
    stored = repository.blobs.require(blob)
    assert stored.packed == (form == "packed")
    return repository, blob


def read_all(reader: ChunkReader, blob: Blob) -> bytes:
    table = reader.table(blob)
    assert table is not None
    return b"".join(reader.read(blob, table, 0, table.count))


# -- what a commit makes ---------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.integers(0, 5 * CHUNK_BYTES),
    runs=st.lists(st.tuples(st.integers(0, 5 * CHUNK_BYTES), st.integers(1, 300_000)), max_size=4),
)
def test_one_pass_gives_what_two_would(tmp_path: Path, size: int, runs: list[tuple[int, int]]) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        for offset, length in runs:
            file.seek(min(offset, size))
            file.write(b"x" * min(length, size - min(offset, size)))
        file.truncate(size)
    content = path.read_bytes()
    (one,) = describe([path])
    assert one.blob.digest.hex == hashlib.sha256(content).hexdigest() and one.blob.size_bytes == size
    assert (one.table is not None) == has_table(size)
    if one.table is not None:
        chunks = [content[at : at + CHUNK_BYTES] for at in range(0, size, CHUNK_BYTES)]
        assert one.table.digests == b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)
        assert [one.table.is_zero(index) for index in range(one.table.count)] == [not any(c) for c in chunks]
        assert ChunkTable.parse(one.table.encoded(), size, "it") == one.table


def test_a_large_sparse_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "ram").open("wb") as file:
        file.truncate(1 << 28)
        file.seek(100 << 20)
        file.write(b"data")
    (one,) = describe([tmp_path / "ram"])
    assert one.table is not None and one.table.count == 1024
    assert [index for index in range(1024) if not one.table.is_zero(index)] == [400]


def test_a_snapshot_with_tables_is_of_format_4_and_needs_them(repository: Repository, tmp_path: Path) -> None:
    snapshot = repository.commit(capture(tmp_path, b"small", MIXED, ram=DENSE), draft())
    assert snapshot.format == "aenv.snapshot/4"
    small, large = snapshot.disk
    assert small.chunks is None and large.chunks is not None and large.table is not None
    assert large.table in snapshot.blobs() and len(snapshot.blobs()) == 6
    assert large.table.size_bytes == table_bytes(large.size_bytes)
    again = Snapshot.model_validate_json(canonical_json(snapshot))
    assert again == snapshot and again.id == snapshot.id
    assert b'{"digest":"' + small.digest.encode() + b'","size_bytes":5}' in canonical_json(snapshot)
    assert check(repository, deep=True).ok
    repository.store.delete(repository.blob_key(large.chunks))
    report = check(repository)
    assert [(problem.kind, large.chunks.hex in problem.key) for problem in report.problems] == [
        ("missing_blob", True)
    ]
    with pytest.raises(CorruptData, match="missing"):
        commit(repository, tmp_path, b"more", parent=snapshot)


def test_a_format_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    repository = Repository(MemoryStore())
    value = json.loads(canonical_json(commit(repository, tmp_path, MIXED)))
    for format in ("aenv.snapshot/1", "aenv.snapshot/2", "aenv.snapshot/3"):
        with pytest.raises(ValidationError):
            Snapshot.model_validate(value | {"format": format})
    plain = json.loads(canonical_json(commit(repository, tmp_path, b"small")))
    assert plain["format"] == "aenv.snapshot/1"
    with pytest.raises(ValidationError):
        Snapshot.model_validate(plain | {"format": "aenv.snapshot/4"})
    with pytest.raises(ValidationError):
        Blob(digest=ZERO_DIGEST, size_bytes=CHUNK_BYTES, chunks=ZERO_DIGEST)


def test_what_is_below_may_be_older_and_have_no_tables(repository: Repository, tmp_path: Path) -> None:
    base = commit(repository, tmp_path, MIXED)
    before = base.disk[0].model_copy(update={"chunks": None})
    child = repository.commit(capture(tmp_path, DENSE), draft(base, below=(before,)))
    assert child.format == "aenv.snapshot/4" and child.disk[0].chunks is None
    assert ChunkReader(repository).table(child.disk[0]) is None
    assert repository.snapshot(child.id) == child and check(repository, deep=True).ok


def test_equal_layers_and_their_tables_are_stored_once(repository: Repository, tmp_path: Path) -> None:
    commit(repository, tmp_path, MIXED)
    before = [info for kind in ("blobs/", "packed/") for info in repository.store.list(kind)]
    snapshot = repository.commit(capture(tmp_path, MIXED), draft(other="label"))
    assert [info for kind in ("blobs/", "packed/") for info in repository.store.list(kind)] == before
    assert len(before) == 2
    assert snapshot.disk[0].table is not None


# -- what a reader of parts believes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b"", b"small", bytes(CHUNK_BYTES), MIXED, TEXT_MIXED, DENSE, bytes(3 * CHUNK_BYTES)]
)
def test_chunks_add_up(repository: Repository, tmp_path: Path, content: bytes) -> None:
    blob = commit(repository, tmp_path, b"base", content).disk[1]
    reader = ChunkReader(repository)
    assert read_all(reader, blob) == content
    table = reader.table(blob)
    assert table is not None
    for first in range(table.count):
        assert reader.read(blob, table, first, 1) == [content[first * CHUNK_BYTES : (first + 1) * CHUNK_BYTES]]
    with pytest.raises(InvalidInput):
        reader.read(blob, table, 1, table.count)


@pytest.mark.parametrize("form", ["raw", "packed"])
def test_neighbours_are_one_read_and_zeros_none(tmp_path: Path, form: str) -> None:
    store = MemoryStore()
    repository, blob = stored_as(form, store, tmp_path, TEXT_MIXED)
    reader = ChunkReader(repository)
    table = reader.table(blob)
    assert table is not None and table.count == 5
    reader.read(blob, table, 0, 1)  # finds it
    for first, count, reads in ((0, 1, 1), (1, 2, 0), (3, 2, 1), (0, 5, 2)):
        before = store.operations
        reader.read(blob, table, first, count)
        assert store.operations - before == reads


def test_damage_is_found_in_the_chunk_that_has_it(tmp_path: Path) -> None:
    store = MemoryStore()
    repository, blob = stored_as("raw", store, tmp_path, DENSE)
    key = repository.blob_key(blob.digest)
    reader = ChunkReader(repository)
    table = reader.table(blob)
    assert table is not None
    bad = bytearray(DENSE)
    bad[CHUNK_BYTES + 5] ^= 1
    store.damage(key, bytes(bad))
    assert reader.read(blob, table, 0, 1) == [DENSE[:CHUNK_BYTES]]
    with pytest.raises(CorruptData, match=f"chunk 1 of blob {blob.digest}"):
        reader.read(blob, table, 0, 3)
    store.damage(key, DENSE[: CHUNK_BYTES + 5])
    with pytest.raises(CorruptData):
        reader.read(blob, table, 1, 1)
    store.delete(key)
    with pytest.raises(NotFound):
        reader.read(blob, table, 1, 1)


def test_a_reader_follows_a_blob_that_is_packed_meanwhile(tmp_path: Path) -> None:
    store = MemoryStore()
    repository, blob = stored_as("raw", store, tmp_path, TEXT_MIXED)
    packed = Repository(MemoryStore())
    commit(packed, tmp_path, TEXT_MIXED)
    reader = ChunkReader(repository)
    table = reader.table(blob)
    assert table is not None
    reader.read(blob, table, 0, 1)
    key = repository.blobs.packed_key(blob.digest)
    data = packed.store.read(key, limit_bytes=1 << 20)
    assert store.put_new(key, data)
    store.delete(repository.blob_key(blob.digest))
    assert b"".join(reader.read(blob, table, 0, 5)) == TEXT_MIXED
    # Another packed form of the same blob: its index is another, too.
    level = zstandard.ZstdCompressor(level=19)
    pieces = [TEXT_MIXED[at : at + CHUNK_BYTES] for at in range(0, len(TEXT_MIXED), CHUNK_BYTES)]
    frames = [level.compress(piece) if any(piece) else b"" for piece in pieces]
    lengths = b"".join(len(frame).to_bytes(4, "little") for frame in frames)
    other = data[:32] + lengths + b"".join(frames)
    assert len(other) != len(data)
    store.damage(key, other)
    assert b"".join(reader.read(blob, table, 0, 5)) == TEXT_MIXED


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_table_that_was_altered_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    store = MemoryStore()
    repository = Repository(store)
    blob = commit(repository, tmp_path, DENSE).disk[0]
    assert blob.chunks is not None
    key = repository.blob_key(blob.chunks)
    good = store.read(key, limit_bytes=1000)
    bad = data.draw(st.one_of(st.binary(max_size=300), st.binary(max_size=300).map(lambda more: good + more),
                              st.integers(0, len(good) - 1).map(lambda end: good[:end])))  # fmt: skip
    if bad != good:
        store.damage(key, bad)
        with pytest.raises(CorruptData):
            ChunkReader(repository).table(blob)


@given(table=st.binary(max_size=300), size=st.integers(0, 1 << 60))
def test_bytes_are_a_table_of_the_right_form_or_refused(table: bytes, size: int) -> None:
    """Also those that a lying manifest names by their true digest."""
    with pytest.raises(CorruptData):
        ChunkTable.parse(table, size, "it")


def test_an_import_takes_no_table_of_another_blob(tmp_path: Path) -> None:
    theirs, ours = Repository(MemoryStore()), Repository(PosixStore(tmp_path / "ours"))
    good = commit(theirs, tmp_path, MIXED)
    other = commit(theirs, tmp_path, MIXED[::-1])
    lie = good.model_copy(update={"disk": (good.disk[0].model_copy(update={"chunks": other.disk[0].chunks}),)})
    files = {}
    for blob in lie.blobs():
        files[blob.digest] = tmp_path / blob.digest.hex
        with theirs.open_blob(blob.digest) as reader:
            files[blob.digest].write_bytes(reader.read())
    with pytest.raises(CorruptData, match="of another blob"):
        ours.adopt(lie, files)
    assert not list(ours.store.list(""))
    assert all(path.exists() for path in files.values())
    # The blob is here already, without a table as of old: now the table comes alone.
    old = good.model_copy(
        update={"disk": (good.disk[0].model_copy(update={"chunks": None}),), "format": "aenv.snapshot/1"}
    )
    ours.adopt(old, {good.disk[0].digest: files.pop(good.disk[0].digest)})
    with pytest.raises(CorruptData, match="not that of its table"):
        ours.adopt(lie, files)
    with theirs.open_blob(good.disk[0].table or good.disk[0]) as reader:
        (tmp_path / "table").write_bytes(reader.read())
    assert good.disk[0].chunks is not None
    ours.adopt(good, {good.disk[0].chunks: tmp_path / "table"})
    assert check(ours, deep=True).ok and set(ours.ids()) == {old.id, good.id}


def test_a_read_is_bounded(tmp_path: Path) -> None:
    repository = Repository(MemoryStore())
    table = ChunkTable(CHUNK_BYTES, (1 << 10) * CHUNK_BYTES, bytes(32 << 10))
    with pytest.raises(InvalidInput):
        ChunkReader(repository).read(
            Blob(digest=ZERO_DIGEST, size_bytes=table.blob_bytes), table, 0, MAX_READ_CHUNKS + 1
        )
