"""Chunks that are fetched once, kept, dropped and found again; and a store that is slow, dead or lies."""

from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv_run.blocks.chunk_file import ChunkFile, lacking_bytes, reserve_bytes
from aenv_run.blocks.served_blob import AHEAD_CHUNKS, runs
from aenv_run.cache_limit import trim, usage
from aenv_run.errors import CorruptData, NotFound, StoreUnavailable
from tests.small_file_system import small_file_system
from tests.unit.block_site import CHUNK, SmallTable, content, serve

DATA = content(20.5, zeros=(3, 4))


async def test_only_what_is_touched_is_fetched_and_only_once(tmp_path: Path) -> None:
    served = serve(tmp_path / "data", DATA)
    assert await served.blob.read(5 * CHUNK + 10, 100) == DATA[5 * CHUNK + 10 : 5 * CHUNK + 110]
    assert await served.blob.read(5 * CHUNK, 2 * CHUNK) == DATA[5 * CHUNK : 7 * CHUNK]
    assert served.blob.now(5 * CHUNK + 1, CHUNK) == DATA[5 * CHUNK + 1 : 6 * CHUNK + 1]
    assert served.shelf.fetched()[5] == 1 and 0 not in served.shelf.fetched()
    assert served.blob.now(3 * CHUNK, 2 * CHUNK) == bytes(2 * CHUNK)  # zeros are never fetched
    assert served.fetcher.counters.fetched_bytes == sum(served.shelf.fetched().values()) * CHUNK
    await served.blob.close()


async def test_sixteen_readers_share_one_fetch(tmp_path: Path) -> None:
    served = serve(tmp_path / "data", DATA)
    served.shelf.gate.clear()
    readers = [asyncio.create_task(served.blob.read(8 * CHUNK + n, CHUNK)) for n in range(16)]
    await asyncio.sleep(0)
    served.shelf.gate.set()
    assert await asyncio.gather(*readers) == [DATA[8 * CHUNK + n : 9 * CHUNK + n] for n in range(16)]
    fetched = served.shelf.fetched()
    assert fetched[8] == fetched[9] == 1
    first, count = served.shelf.reads[0]
    assert first == 8 and count >= 2  # neighbours in one read
    await served.blob.close()


async def test_a_reader_that_goes_on_is_read_ahead_of(tmp_path: Path) -> None:
    data = content(200)
    served = serve(tmp_path / "data", data)
    for index in range(40):
        assert await served.blob.read(index * CHUNK, CHUNK) == data[index * CHUNK : (index + 1) * CHUNK]
    counters = served.fetcher.counters
    assert counters.misses < 5 and counters.read_ahead > 30
    assert max(served.shelf.fetched()) <= 40 + AHEAD_CHUNKS
    assert set(served.shelf.fetched().values()) == {1}
    await served.blob.close()


async def test_one_that_jumps_is_not(tmp_path: Path) -> None:
    data = content(200)
    served = serve(tmp_path / "data", data)
    for index in range(0, 200, 7):
        await served.blob.read(index * CHUNK, CHUNK)
    assert served.fetcher.counters.read_ahead == 0
    await served.blob.close()


async def test_what_was_fetched_is_there_for_the_next_server_but_is_not_believed(tmp_path: Path) -> None:
    first = serve(tmp_path / "data", DATA)
    await first.blob.fill()
    await first.blob.close()
    with (tmp_path / "data").open("r+b") as file:  # as a torn write leaves it
        file.seek(7 * CHUNK + 100)
        file.write(b"something else")
    second = serve(tmp_path / "data", DATA)
    assert await second.blob.read(0, len(DATA)) == DATA
    assert set(second.shelf.fetched()) == {7}
    await second.blob.close()


def test_a_file_of_another_size_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x" * 10)
    file = ChunkFile(tmp_path / "data", SmallTable(DATA))
    assert [index for index in range(file.count) if file.has(index)] == [3, 4]
    file.close()


async def test_a_lie_is_an_error_for_those_who_want_it_and_for_nobody_else(tmp_path: Path) -> None:
    served = serve(tmp_path / "data", DATA)
    served.shelf.damaged = {6}
    good, bad = await asyncio.gather(
        served.blob.read(5 * CHUNK, 10), served.blob.read(6 * CHUNK, 10), return_exceptions=True
    )
    assert good == DATA[5 * CHUNK : 5 * CHUNK + 10]
    assert isinstance(bad, CorruptData) and "chunk 6" in bad.message
    assert any(isinstance(one, CorruptData) for one in served.told)
    assert not served.blob.file.has(6)
    served.shelf.damaged = set()
    assert await served.blob.read(6 * CHUNK, 10) == DATA[6 * CHUNK : 6 * CHUNK + 10]
    assert served.told[-1] is None
    await served.blob.close()


async def test_a_store_that_hangs_is_an_error_too(tmp_path: Path) -> None:
    served = serve(tmp_path / "data", DATA, patience_s=0.1)
    served.shelf.gate.clear()
    with pytest.raises(StoreUnavailable, match="did not answer"):
        await served.blob.read(0, 10)
    served.shelf.gate.set()
    await served.blob.close()


async def test_what_is_gone_for_good_is_not_tried_again(tmp_path: Path) -> None:
    served = serve(tmp_path / "data", DATA)
    served.shelf.fails = NotFound("no such blob")
    with pytest.raises(NotFound):
        await served.blob.read(0, 10)
    assert len(served.shelf.reads) == 1
    await served.blob.close()


def test_runs_are_of_neighbours() -> None:
    assert runs([1, 2, 3, 5, 9, 10], 2) == [(1, 2), (3, 1), (5, 1), (9, 2)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("read"), st.integers(0, len(DATA) - 1), st.integers(1, 6 * CHUNK)),
            st.tuples(st.just("shrink"), st.integers(0, 21 * CHUNK), st.just(0)),
            st.tuples(st.just("again"), st.just(0), st.just(0)),
            st.tuples(st.just("tear"), st.integers(0, len(DATA) - 200), st.integers(1, 200)),
        ),
        max_size=12,
    )
)
def test_every_read_is_the_blob_whatever_is_dropped_torn_or_restarted(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    path = tmp_path_factory.mktemp("model") / "data"

    async def walk() -> None:
        served = serve(path, DATA)
        for what, at, size in steps:
            if what == "read":
                size = min(size, len(DATA) - at)
                assert await served.blob.read(at, size) == DATA[at : at + size]
                now = served.blob.now(at, size)
                assert now is None or now == DATA[at : at + size]
            elif what == "shrink":
                before = len(served.blob.file.stored())
                freed = served.budget.shrink(at)
                assert freed >= min(at, before * CHUNK - CHUNK // 2 if before else 0)
            else:
                await served.blob.close()
                if what == "tear":
                    with path.open("r+b") as file:
                        file.seek(at)
                        file.write(b"\xee" * size)
                served = serve(path, DATA)
        await served.blob.close()

    asyncio.run(walk())


async def test_dropped_chunks_give_their_space_back(tmp_path: Path) -> None:
    served = serve(tmp_path / "data", DATA)
    await served.blob.fill()
    before = (tmp_path / "data").stat().st_blocks
    assert served.budget.shrink(10 * CHUNK) == 10 * CHUNK
    assert (tmp_path / "data").stat().st_blocks < before
    assert await served.blob.read(0, len(DATA)) == DATA
    await served.blob.close()


@pytest.mark.parametrize("how", ["cut", "edited"])
async def test_a_file_that_others_write_while_it_is_served_is_not_believed(tmp_path: Path, how: str) -> None:
    data = content(6)
    served = serve(tmp_path / "data", data)
    assert await served.blob.read(0, len(data)) == data
    with (tmp_path / "data").open("r+b") as file:
        if how == "cut":
            file.truncate(CHUNK)
        else:
            file.seek(2 * CHUNK)
            file.write(b"somebody else's")
    assert served.blob.now(0, len(data)) is None
    assert await served.blob.read(0, len(data)) == data
    assert served.blob.now(0, len(data)) == data
    again = {index for index, times in served.shelf.fetched().items() if times == 2}
    assert again == ({1, 2, 3, 4, 5} if how == "cut" else {2})
    await served.blob.close()


async def test_a_file_that_cannot_be_written_costs_a_fetch_and_no_reader_waits_for_ever(tmp_path: Path) -> None:
    data = content(6)
    served = serve(tmp_path / "data", data)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * CHUNK, before[1]))
    try:
        assert await served.blob.read(0, len(data)) == data
        assert await asyncio.wait_for(served.blob.read(4 * CHUNK, CHUNK), 10) == data[4 * CHUNK : 5 * CHUNK]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert served.shelf.fetched()[0] == 1 and served.shelf.fetched()[4] == 2
    assert await served.blob.read(0, len(data)) == data and served.blob.now(0, len(data)) == data
    await served.blob.close()


async def test_some_of_the_disk_stays_free(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", 8 << 20) as place:
        data = content(2048)  # all of the disk
        served = serve(place / "data", data)
        try:
            for offset in range(0, len(data), 64 * CHUNK):
                assert await served.blob.read(offset, 64 * CHUNK) == data[offset : offset + 64 * CHUNK]
            left = lacking_bytes(place), reserve_bytes(place), len(served.blob.file.stored())
        finally:
            await served.blob.close()
        assert left[0] * 2 <= left[1] + CHUNK and left[2] > 1024


async def test_a_whole_one_that_is_still_served_counts_and_goes_when_it_is_not(tmp_path: Path) -> None:
    data = content(6)
    partial, blobs = tmp_path / "partial", tmp_path / "blobs" / "ab"
    partial.mkdir()
    blobs.mkdir(parents=True)
    served = serve(partial / "x.data", data)
    assert await served.blob.read(0, len(data)) == data
    os.link(partial / "x.data", blobs / "abcd")
    used = usage(tmp_path)
    assert (used.blobs, used.partial_blobs, used.own_bytes, used.shared_bytes) == (1, 0, 6 * CHUNK, 0)
    assert trim(tmp_path, 0, grace_s=0).left.own_bytes == 6 * CHUNK  # it is read
    await served.blob.close()
    done = trim(tmp_path, 0, grace_s=0)
    assert (done.removed, done.freed_bytes, done.left.own_bytes) == (1, 6 * CHUNK, 0)
    assert not list(partial.iterdir()) and not list(blobs.iterdir())
