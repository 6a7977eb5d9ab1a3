"""The block server over a repository: right bytes or a typed reason, whatever store, bound or a kill do."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from aenv_run.blocks.budget import read_counters
from aenv_run.blocks.exports import Export, Exports
from aenv_run.blocks.fetch import Fetcher
from aenv_run.blocks.opening import Repositories
from aenv_run.blocks.server import BlockServer
from aenv_run.blocks.starting import BlockServerProcess
from aenv_run.cache import BlobCache
from aenv_run.cache_limit import trim, usage
from aenv_run.chunk_table import CHUNK_BYTES
from aenv_run.errors import CorruptData, StoreUnavailable
from aenv_run.nbd import ServedLayer
from aenv_run.nbd_client import read
from aenv_run.node_socket import listen
from aenv_run.paths import Home
from aenv_run.repository import Repository
from aenv_run.snapshot import Blob
from aenv_run.store.memory import MemoryStore
from aenv_run.store.posix import PosixStore
from tests.bytes_half import commit

DATA = random.Random(3).randbytes(40 * CHUNK_BYTES + 1000)
URL = "memory"


class World:
    """A home with a block server over a store in memory that has one blob."""

    def __init__(self, home: Path, **settings: float) -> None:
        self.home = Home(home)
        self.store = MemoryStore()
        self.repository = Repository(self.store)
        home.mkdir()
        self.blob = commit(self.repository, home / "captures", DATA).disk[0]
        self.exports = Exports(self.home.cache)
        self.clients = ThreadPoolExecutor(16)
        repositories = Repositories(self.home, {URL: self.repository})
        self.server = BlockServer(
            root=self.home.cache,
            opened=repositories.opened,
            limit_bytes=int(settings.get("limit_bytes", 1 << 30)),
            fetcher=Fetcher(patience_s=settings.get("patience_s", 5.0)),
            take_in=repositories.take_in,
            fill_idle=bool(settings.get("fill_idle", False)),
            housekeeping_s=settings.get("housekeeping_s", 0.05),
        )

    def layer(self) -> ServedLayer:
        """The blob as a served layer, held by the home itself."""
        export = Export(blob=self.blob, repository=URL)
        self.exports.add(export, self.home.root / f"holder-{time.monotonic_ns()}")
        return ServedLayer(socket=self.home.block_socket, export=export.name, size_bytes=self.blob.size_bytes)

    async def read(self, layer: ServedLayer, offset: int, length: int) -> bytes:
        """From a thread that the server does not need itself."""
        return await asyncio.get_running_loop().run_in_executor(self.clients, partial(read, layer, offset, length))


@asynccontextmanager
async def world(home: Path, **settings: float) -> AsyncIterator[World]:
    made = World(home, **settings)
    await made.server.serve(listen(made.home.block_socket))
    try:
        yield made
    finally:
        made.clients.shutdown()
        await made.server.close()


async def test_a_layer_is_read_by_range(tmp_path: Path) -> None:
    async with world(tmp_path / "home") as w:
        layer = w.layer()
        for offset, length in ((0, 112), (CHUNK_BYTES - 5, 10), (len(DATA) - 1, 1), (3 * CHUNK_BYTES, 1 << 20)):
            assert await w.read(layer, offset, length) == DATA[offset : offset + length]
        assert w.server.fetcher.counters.fetched_bytes < len(DATA) // 2
        assert (w.home.block_socket.stat().st_mode & 0o777) == 0o600


async def test_sixteen_connections_fetch_each_chunk_once(tmp_path: Path) -> None:
    async with world(tmp_path / "home") as w:
        layer = w.layer()
        await w.read(layer, 0, 1)
        before = w.store.operations
        parts = await asyncio.gather(*(w.read(layer, 10 * CHUNK_BYTES, CHUNK_BYTES) for _ in range(16)))
        assert set(parts) == {DATA[10 * CHUNK_BYTES : 11 * CHUNK_BYTES]}
        assert w.store.operations - before == 1


async def test_only_what_was_registered_is_served(tmp_path: Path) -> None:
    async with world(tmp_path / "home") as w:
        for name in ("", "nothing", "../../etc/passwd", w.layer().export[:-1], "x" * 4000):
            layer = ServedLayer(socket=w.home.block_socket, export=name, size_bytes=1)
            with pytest.raises(StoreUnavailable, match="nothing is served"):
                await w.read(layer, 0, 1)


async def test_a_damaged_chunk_is_an_error_with_its_name_and_nothing_else_is(tmp_path: Path) -> None:
    async with world(tmp_path / "home") as w:
        layer = w.layer()
        key = w.repository.blob_key(w.blob.digest)
        w.store.damage(key, DATA[: 5 * CHUNK_BYTES] + b"!" + DATA[5 * CHUNK_BYTES + 1 :])
        with pytest.raises(StoreUnavailable, match="Input/output error"):
            await w.read(layer, 5 * CHUNK_BYTES, 10)
        trouble = w.exports.trouble(layer.export)
        assert trouble is not None and isinstance(trouble.error(), CorruptData)
        assert "chunk 5" in trouble.message and w.blob.digest in trouble.message
        assert await w.read(layer, 0, 100) == DATA[:100]
        w.store.damage(key, DATA)
        assert await w.read(layer, 5 * CHUNK_BYTES, 10) == DATA[5 * CHUNK_BYTES : 5 * CHUNK_BYTES + 10]
        assert w.exports.trouble(layer.export) is None


async def test_a_blob_that_is_gone_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    async with world(tmp_path / "home", patience_s=0.2) as w:
        layer = w.layer()
        table = w.blob.table
        assert table is not None
        w.store.delete(w.repository.blob_key(table.digest))
        with pytest.raises(StoreUnavailable):
            await w.read(layer, 0, 10)
        assert w.exports.trouble(layer.export) is not None


async def test_a_whole_one_becomes_a_file_of_the_cache(tmp_path: Path) -> None:
    async with world(tmp_path / "home", fill_idle=True) as w:
        cache = BlobCache(w.home.cache, w.repository)
        layer = w.layer()
        assert not cache.holds(w.blob)
        assert await w.read(layer, 0, 10) == DATA[:10]
        while not cache.holds(w.blob):  # noqa: ASYNC110 - another task does it
            await asyncio.sleep(0.02)
        before = w.store.operations
        assert cache.path(w.blob).read_bytes() == DATA
        assert w.store.operations == before
        assert await w.read(layer, 0, len(DATA)) == DATA


async def test_a_blob_that_its_table_belies_never_becomes_a_file(tmp_path: Path) -> None:
    """A manifest may name a blob with another one's table: what is read by it is that manifest's own fault."""
    async with world(tmp_path / "home", fill_idle=True) as w:
        other = commit(w.repository, tmp_path / "other", DATA[::-1]).disk[0]
        w.blob = Blob(digest=other.digest, size_bytes=w.blob.size_bytes, chunks=w.blob.chunks)
        w.store.damage(w.repository.blob_key(other.digest), DATA)
        assert await w.read(w.layer(), 0, len(DATA)) == DATA
        while not any(blob.is_false for blob in w.server.blobs()):  # noqa: ASYNC110 - another task does it
            await asyncio.sleep(0.02)
        assert not BlobCache(w.home.cache, w.repository).holds(w.blob)


async def test_a_bound_smaller_than_the_blob_is_kept(tmp_path: Path) -> None:
    limit = 8 * CHUNK_BYTES
    async with world(tmp_path / "home", limit_bytes=limit, housekeeping_s=60.0) as w:
        layer = w.layer()
        for at in (*range(0, len(DATA) - CHUNK_BYTES, 3 * CHUNK_BYTES), 0, CHUNK_BYTES):
            assert await w.read(layer, at, CHUNK_BYTES) == DATA[at : at + CHUNK_BYTES]
        await w.server.shrink()
        found = usage(w.home.cache)
        assert found.partial_blobs == 1 and 0 < found.partial_bytes <= limit
        assert w.server.fetcher.counters.dropped_bytes > 0
        assert trim(w.home.cache, 0).removed == 0  # it is in use
        assert await w.read(layer, 0, len(DATA)) == DATA


async def test_what_nobody_uses_any_more_is_trimmed(tmp_path: Path) -> None:
    async with world(tmp_path / "home") as w:
        layer = w.layer()
        await w.read(layer, 0, CHUNK_BYTES)
    long_ago = time.time() - 10_000
    os.utime(w.exports.directory / f"{layer.export}.json", (long_ago, long_ago))
    assert trim(w.home.cache, 0).removed == 1  # the bytes; whoever holds it may go on reading
    assert w.exports.find(layer.export).blob == w.blob
    for holder in w.home.root.glob("holder-*"):
        holder.unlink()
    trim(w.home.cache, 0)
    assert list(w.exports.directory.iterdir()) == []


def test_a_server_that_is_killed_is_followed_by_another_and_nothing_is_lost_or_wrong(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.root.mkdir()
    store = PosixStore(tmp_path / "store")
    blob = commit(Repository(store), tmp_path / "captures", DATA).disk[0]
    export = Export(blob=blob, repository=str(tmp_path / "store"))
    Exports(home.cache).add(export, home.root / "holder")
    layer = ServedLayer(socket=home.block_socket, export=export.name, size_bytes=blob.size_bytes)
    server = BlockServerProcess(home)
    server.hold()
    pids = []
    try:
        for round in range(3):
            at = round * 10 * CHUNK_BYTES
            assert patient_read(layer, at, 2 << 20) == DATA[at : at + (2 << 20)]
            pids.append(server.pid())
            os.kill(pids[-1], signal.SIGKILL)
        assert patient_read(layer, 0, len(DATA)) == DATA
        assert len({*pids, server.pid()}) == 4
    finally:
        server.stop()
    fetched = read_counters(home.cache).fetched_bytes
    assert fetched < len(DATA)  # what the killed ones had fetched was there
    assert not home.block_socket.exists()


def patient_read(layer: ServedLayer, offset: int, length: int) -> bytes:
    """As an engine reads: it waits for the next server."""
    deadline_s = time.monotonic() + 60
    while True:
        try:
            return read(layer, offset, length)
        except StoreUnavailable:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)
