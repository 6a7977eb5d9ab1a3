"""A store that fails, hangs and comes back: one outage for all who read, and nobody waits for a dead one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from aenv_run.blocks.fetch import Supply
from aenv_run.blocks.supplier import AT_ONCE
from aenv_run.errors import CorruptData, NotFound, StoreUnavailable
from tests.unit.block_site import CHUNK, Served, Shelf, content, serve

DATA = content(40)
GONE = StoreUnavailable("it is gone")


async def until_back(served: Served) -> None:
    """Until a probe has found that the store answers."""
    while served.fetcher.supplier("shelf").dead is not None:  # noqa: ASYNC110 - a state, not an event
        await asyncio.sleep(0.01)


def tries(served: Served) -> int:
    """Of reads: without probes."""
    return len(served.shelf.reads) - served.fetcher.supplier("shelf").probes


@pytest.mark.parametrize("how", ["refuses", "hangs"])
async def test_all_readers_have_their_error_together_and_later_ones_ask_nothing(tmp_path: Path, how: str) -> None:
    served = serve(tmp_path / "data", DATA, patience_s=0.3)
    if how == "refuses":
        served.shelf.fails = GONE
    else:
        served.shelf.gate.clear()
    readers = [asyncio.create_task(served.blob.read(7 * n * CHUNK, 10)) for n in range(5)]
    await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
    for _ in range(10):  # turns of the loop, not time
        await asyncio.sleep(0)
    assert all(isinstance(one.exception(), StoreUnavailable) for one in readers if one.done())
    assert all(one.done() for one in readers)
    before = tries(served)
    for n in range(20):
        with pytest.raises(StoreUnavailable):
            await served.blob.read(n * CHUNK, 10)
    assert tries(served) == before
    assert served.told[-1] is not None
    served.shelf.fails = None
    served.shelf.gate.set()
    await until_back(served)
    served.blob.recovered()
    assert served.told[-1] is None
    assert await served.blob.read(0, len(DATA)) == DATA
    await served.blob.close()
    served.fetcher.close()


async def test_what_is_here_needs_no_store(tmp_path: Path) -> None:
    served = serve(tmp_path / "data", DATA)
    assert await served.blob.read(3 * CHUNK, 2 * CHUNK) == DATA[3 * CHUNK : 5 * CHUNK]
    served.shelf.gate.clear()
    far = [asyncio.create_task(served.blob.read((10 + n) * CHUNK, 10)) for n in range(3 * AT_ONCE)]
    spanning = asyncio.create_task(served.blob.read(3 * CHUNK, 3 * CHUNK))
    for _ in range(5):
        assert served.blob.now(3 * CHUNK + 5, CHUNK) == DATA[3 * CHUNK + 5 : 4 * CHUNK + 5]
        assert await served.blob.read(3 * CHUNK, 2 * CHUNK) == DATA[3 * CHUNK : 5 * CHUNK]
    assert not spanning.done() and not any(one.done() for one in far)
    served.shelf.gate.set()
    assert await spanning == DATA[3 * CHUNK : 6 * CHUNK]
    await asyncio.gather(*far)
    await served.blob.close()


async def test_another_source_of_the_same_bytes_is_asked_where_one_fails(tmp_path: Path) -> None:
    for error in (GONE, NotFound("no such blob"), CorruptData("it lies")):
        served = serve(tmp_path / error.code, DATA)
        second = Shelf(served.shelf.table)
        served.blob.supplies.append(Supply(served.fetcher.supplier("second"), second))
        served.shelf.fails = error
        assert await served.blob.read(0, len(DATA)) == DATA
        assert second.reads and served.fetcher.supplier("second").dead is None
        assert not [one for one in served.told if one is not None]
        await served.blob.close()
        served.fetcher.close()


async def test_a_dead_source_holds_up_no_other(tmp_path: Path) -> None:
    served = serve(tmp_path / "data", DATA, patience_s=0.2)
    served.shelf.gate.clear()
    with pytest.raises(StoreUnavailable):
        await served.blob.read(0, 10)
    other = Shelf(served.shelf.table)
    served.blob.supplies.append(Supply(served.fetcher.supplier("second"), other))
    before = tries(served)
    assert await served.blob.read(0, len(DATA)) == DATA
    assert tries(served) == before  # one that is known to be dead is not asked
    served.shelf.gate.set()
    await served.blob.close()
    served.fetcher.close()


async def test_a_store_that_hangs_for_a_while_is_not_waited_for_where_another_has_it(tmp_path: Path) -> None:
    served = serve(tmp_path / "data", DATA, patience_s=60.0)
    served.fetcher.others_limit_s = 0.5
    other = Shelf(served.shelf.table)
    served.blob.supplies.append(Supply(served.fetcher.supplier("second"), other))
    served.shelf.gate.clear()
    assert await served.blob.read(0, 10) == DATA[:10]
    assert len(served.shelf.reads) == 1
    assert await served.blob.read(20 * CHUNK, 10) == DATA[20 * CHUNK : 20 * CHUNK + 10]
    assert len(served.shelf.reads) == 1  # the one that answered goes first
    served.shelf.gate.set()
    await served.blob.close()
    served.fetcher.close()


async def test_an_answer_to_anybody_begins_the_patience_anew(tmp_path: Path) -> None:
    """As long as a store answers somebody it is not dead, however long one read takes."""
    served = serve(tmp_path / "data", DATA, patience_s=60.0)
    supplier = served.fetcher.supplier("shelf")
    assert supplier.dies_at_s is None
    served.shelf.gate.clear()
    slow = asyncio.create_task(served.blob.read(0, 10))
    while (first_s := supplier.dies_at_s) is None:  # noqa: ASYNC110 - a state, not an event
        await asyncio.sleep(0)
    with pytest.raises(NotFound):
        await supplier.ask(_no_such_blob)
    assert supplier.dies_at_s is not None and supplier.dies_at_s > first_s
    served.shelf.gate.set()
    assert await slow == DATA[:10]
    assert supplier.dies_at_s is None and not supplier.is_failing
    await served.blob.close()


def _no_such_blob() -> bytes:
    raise NotFound("no such blob")
