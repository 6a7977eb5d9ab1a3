"""Chunks that are fetched once, kept, dropped and found again; and a store that is slow, dead or lies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv_run.blocks.chunk_file import ChunkFile
from aenv_run.blocks.served_blob import AHEAD_CHUNKS, runs
from aenv_run.errors import CorruptData, NotFound, StoreUnavailable
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


async def test_a_dead_store_is_an_error_and_then_a_quick_one(tmp_path: Path) -> None:
    served = serve(tmp_path / "data", DATA, patience_s=0.2)
    served.shelf.fails = StoreUnavailable("it is gone")
    with pytest.raises(StoreUnavailable):
        await served.blob.read(0, 10)
    tries = len(served.shelf.reads)
    assert tries > 1  # it was patient
    with pytest.raises(StoreUnavailable):
        await served.blob.read(CHUNK, 10)
    assert len(served.shelf.reads) == tries + 1  # and gives up at once now
    served.shelf.fails = None
    assert await served.blob.read(0, 10) == DATA[:10]
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
