"""Stores that fail, a cache that goes away, peers that take nothing: what is here is given all the same."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from aenv_run import nbd
from aenv_run.blocks.exports import Export, Exports
from aenv_run.blocks.fetch import Fetcher
from aenv_run.blocks.in_flight import Room, Unsent
from aenv_run.blocks.opening import Repositories
from aenv_run.blocks.server import BlockServer
from aenv_run.blocks.starting import BlockServerProcess
from aenv_run.cache_limit import trim
from aenv_run.chunk_table import CHUNK_BYTES
from aenv_run.config import open_repository
from aenv_run.errors import NotFound, StoreUnavailable
from aenv_run.nbd import ServedLayer
from aenv_run.nbd_client import connected, read
from aenv_run.node_socket import listen
from aenv_run.paths import Home
from aenv_run.repository import Repository
from aenv_run.store.memory import MemoryStore
from aenv_run.store.posix import PosixStore
from aenv_run.store.protocol import StoreKey
from tests.bytes_half import commit
from tests.small_file_system import small_file_system
from tests.unit.test_store_other import Ranges

DATA = random.Random(4).randbytes(24 * CHUNK_BYTES + 1000)


class GatedStore(MemoryStore):
    """Hangs while its gate is closed, and refuses while it is ``dead``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.dead = False
        self.ranges = 0

    def read_range(self, key: StoreKey, offset: int, length: int) -> bytes:
        self.ranges += 1
        self.gate.wait()
        if self.dead:
            raise StoreUnavailable("connection refused")
        return super().read_range(key, offset, length)


class Site:
    """A home whose block server reads one blob from two repositories."""

    def __init__(self, home: Path, cache: Path | None = None, patience_s: float = 0.3) -> None:
        self.home = Home(home)
        home.mkdir()
        if cache is not None:
            self.home.cache.symlink_to(cache)
        self.stores = {"one": GatedStore(), "two": GatedStore()}
        self.repositories = {name: Repository(store) for name, store in self.stores.items()}
        for name, repository in self.repositories.items():
            self.blob = commit(repository, home / f"captures-{name}", DATA).disk[0]
        self.clients = ThreadPoolExecutor(32)
        self.patience_s = patience_s
        self.server = self.new_server()

    def new_server(self) -> BlockServer:
        opening = Repositories(self.home, dict(self.repositories))
        return BlockServer(
            root=self.home.cache,
            opened=opening.opened,
            limit_bytes=1 << 30,
            fetcher=Fetcher(patience_s=self.patience_s),
            take_in=opening.take_in,
            holders=lambda: self.home.root.glob("*.served"),
            housekeeping_s=0.05,
        )

    def layer(self, repository: str) -> ServedLayer:
        export = Export(blob=self.blob, repository=repository)
        Exports(self.home.cache).add(export, self.home.root / f"{time.monotonic_ns()}.served")
        return ServedLayer(socket=self.home.block_socket, export=export.name, size_bytes=self.blob.size_bytes)

    async def read(self, layer: ServedLayer, offset: int, length: int) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(self.clients, partial(read, layer, offset, length))

    async def again(self) -> None:
        """The next server."""
        await self.server.close()
        self.server = self.new_server()
        await self.server.serve(listen(self.home.block_socket))


@asynccontextmanager
async def site(home: Path, cache: Path | None = None, patience_s: float = 0.3) -> AsyncIterator[Site]:
    made = Site(home, cache, patience_s)
    await made.server.serve(listen(made.home.block_socket))
    try:
        yield made
    finally:
        for store in made.stores.values():
            store.gate.set()
        made.clients.shutdown()
        await made.server.close()


async def test_a_repository_that_dies_costs_those_nothing_who_have_the_same_layer_from_another(
    tmp_path: Path,
) -> None:
    async with site(tmp_path / "home") as s:
        one, two = s.layer("one"), s.layer("two")
        assert await s.read(one, 0, 10) == DATA[:10]
        s.stores["one"].dead = True
        assert await s.read(two, 5 * CHUNK_BYTES, 10) == DATA[5 * CHUNK_BYTES : 5 * CHUNK_BYTES + 10]
        assert await s.read(one, 0, len(DATA)) == DATA  # of what can be had, whoever has it
        assert s.server.exports.trouble(one.export) is None


async def test_what_is_here_is_given_at_once_while_a_store_hangs(tmp_path: Path) -> None:
    async with site(tmp_path / "home", patience_s=60.0) as s:
        layer = s.layer("one")
        assert await s.read(layer, 0, 3 * CHUNK_BYTES) == DATA[: 3 * CHUNK_BYTES]
        s.stores["one"].gate.clear()
        far = [asyncio.create_task(s.read(layer, n * CHUNK_BYTES, 10)) for n in range(12, 24)]
        spanning = asyncio.create_task(s.read(layer, 2 * CHUNK_BYTES, 12 * CHUNK_BYTES))
        for _ in range(3):
            assert await s.read(layer, CHUNK_BYTES, CHUNK_BYTES) == DATA[CHUNK_BYTES : 2 * CHUNK_BYTES]
        with connected(layer.socket, 60.0) as engine:  # and on one connection
            await asyncio.to_thread(opened, engine, layer)
            for handle, offset in ((1, 20 * CHUNK_BYTES), (2, 21 * CHUNK_BYTES), (3, 0)):
                ask(engine, handle, offset, 8)
            assert await asyncio.to_thread(answer, engine, 8) == (3, 0, DATA[:8])
        assert not any(one.done() for one in (*far, spanning))
        s.stores["one"].gate.set()
        assert await spanning == DATA[2 * CHUNK_BYTES : 14 * CHUNK_BYTES]
        await asyncio.gather(*far)


async def test_a_layer_of_a_dead_store_is_opened_if_its_table_is_here(tmp_path: Path) -> None:
    async with site(tmp_path / "home") as s:
        layer = s.layer("one")
        assert await s.read(layer, 0, CHUNK_BYTES) == DATA[:CHUNK_BYTES]
        s.stores["one"].dead = True
        with pytest.raises(StoreUnavailable):
            await s.read(layer, 9 * CHUNK_BYTES, 10)
        await s.again()
        assert await s.read(layer, 0, CHUNK_BYTES) == DATA[:CHUNK_BYTES]


async def test_a_cache_that_is_emptied_while_it_is_used_is_filled_anew(tmp_path: Path) -> None:
    async with site(tmp_path / "home") as s:
        layer = s.layer("one")
        assert await s.read(layer, 0, CHUNK_BYTES) == DATA[:CHUNK_BYTES]
        shutil.rmtree(s.home.cache)
        assert await s.read(layer, 0, 8 * CHUNK_BYTES) == DATA[: 8 * CHUNK_BYTES]
        path = s.server.exports.data(s.server.blobs()[0].export)
        while not path.exists():  # noqa: ASYNC110 - another task does it
            await asyncio.sleep(0.01)
        assert await s.read(layer, 0, len(DATA)) == DATA
        assert path.stat().st_blocks * 512 >= len(DATA)
        shutil.rmtree(s.home.cache)
        await s.again()
        assert await s.read(layer, 0, len(DATA)) == DATA  # its users still name it
        for holder in s.home.root.glob("*.served"):
            holder.unlink()
        shutil.rmtree(s.home.cache)
        await s.again()
        with pytest.raises(StoreUnavailable, match="nothing is served"):
            await s.read(layer, 0, 10)


async def test_a_cache_on_another_file_system_serves_all_the_same(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", 64 << 20) as place:
        async with site(tmp_path / "home", cache=place) as s:
            layer = s.layer("one")
            assert await s.read(layer, 0, CHUNK_BYTES) == DATA[:CHUNK_BYTES]
            for path in (place / "partial").glob("*.json"):
                os.utime(path, (1, 1))
            trim(s.home.cache, 0)
            assert not list((place / "partial").glob("*.json"))
            await s.again()
            assert await s.read(layer, 0, len(DATA)) == DATA


def test_a_server_that_is_killed_is_started_again_without_a_node(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.root.mkdir()
    blob = commit(Repository(PosixStore(tmp_path / "store")), tmp_path / "captures", DATA).disk[0]
    export = Export(blob=blob, repository=str(tmp_path / "store"))
    Exports(home.cache).add(export, home.root / "holder")
    layer = ServedLayer(socket=home.block_socket, export=export.name, size_bytes=blob.size_bytes)
    server = BlockServerProcess(home)
    server.ensure()
    try:
        first = server.pid()
        os.kill(first, signal.SIGKILL)
        while server.pid() in (0, first):  # nobody asks for it
            time.sleep(0.01)
        assert read(layer, 0, len(DATA)) == DATA
    finally:
        server.stop()
    assert server.pid() == 0


async def test_room_is_given_in_turn_and_nobody_takes_all_of_it() -> None:
    room = Room(limit_bytes=10, share_bytes=6)
    order: list[str] = []
    hold = asyncio.Event()

    async def one(owner: str, size_bytes: int, name: str) -> None:
        async with room.held(owner, size_bytes):
            order.append(name)
            await hold.wait()

    tasks = [asyncio.create_task(one(*what)) for what in (("a", 4, "a1"), ("a", 4, "a2"), ("b", 6, "b1"))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == ["a1", "b1"] and room.used_bytes == 10  # a has its share
    waits = asyncio.create_task(one("b", 1, "b2"))
    await asyncio.sleep(0)
    waits.cancel()
    hold.set()
    await asyncio.gather(*tasks, waits, return_exceptions=True)
    assert order == ["a1", "b1", "a2"] and room.used_bytes == 0 and room.most_bytes == 10
    async with room.held("a", 1000):  # larger than all: alone
        assert room.used_bytes == 1000
    assert room.used_bytes == 0


async def test_peers_that_take_nothing_do_not_fill_the_memory_nor_hold_up_others(tmp_path: Path) -> None:
    async with site(tmp_path / "home") as s:
        s.server.unsent = Unsent(limit_bytes=4 << 20, stall_s=0.3)
        layer = s.layer("one")
        assert await s.read(layer, 0, len(DATA)) == DATA
        with ExitStack() as stack:
            engines = [stack.enter_context(connected(layer.socket, 60.0)) for _ in range(6)]
            for engine in engines:
                await asyncio.to_thread(opened, engine, layer)
                for handle in range(8):
                    ask(engine, handle, 0, 2 << 20)
            most = 0
            wanted = asyncio.create_task(s.read(layer, 5, 1 << 20))
            while not wanted.done():
                most = max(most, s.server.unsent.used_bytes)
                await asyncio.sleep(0.01)
            assert await wanted == DATA[5 : 5 + (1 << 20)]
            assert 0 < most < (4 << 20) + (2 << 20) + 100
        while s.server.connections:  # noqa: ASYNC110 - they end by themselves
            await asyncio.sleep(0.01)
        assert s.server.unsent.used_bytes == 0


async def test_far_reads_of_many_connections_gather_no_more_than_there_is_room_for(tmp_path: Path) -> None:
    async with site(tmp_path / "home") as s:
        s.server.room = Room(limit_bytes=3 << 20, share_bytes=2 << 20)
        layer = s.layer("one")
        size = 4 * CHUNK_BYTES
        offsets = list(range(0, 24 * CHUNK_BYTES, size)) * 4
        parts = await asyncio.gather(*(s.read(layer, offset, size) for offset in offsets))
        assert parts == [DATA[offset : offset + size] for offset in offsets]
        assert 0 < s.server.room.most_bytes <= 2 << 20
        assert s.server.room.used_bytes == 0


async def test_a_source_that_has_lost_the_blob_is_none(tmp_path: Path) -> None:
    async with site(tmp_path / "home") as s:
        one = s.layer("one")
        assert await s.read(one, 0, 10) == DATA[:10]
        s.stores["one"].delete(s.repositories["one"].blob_key(s.blob.digest))
        with pytest.raises(StoreUnavailable):
            await s.read(one, 20 * CHUNK_BYTES, 10)
        trouble = s.server.exports.trouble(one.export)
        assert trouble is not None and isinstance(trouble.error(), NotFound)
        assert await s.read(s.layer("two"), 20 * CHUNK_BYTES, 10) == DATA[20 * CHUNK_BYTES : 20 * CHUNK_BYTES + 10]
        assert s.server.exports.trouble(one.export) is None


@contextmanager
def http_site(directory: Path, port: int = 0) -> Iterator[int]:
    """A server of those files; its port."""
    server = ThreadingHTTPServer(("127.0.0.1", port), partial(Ranges, directory=str(directory)))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_a_layer_is_read_over_http_through_an_outage(tmp_path: Path) -> None:
    async with site(tmp_path / "home", patience_s=3.0) as s:
        commit(Repository(PosixStore(tmp_path / "www" / "repo")), tmp_path / "captures", DATA)
        with http_site(tmp_path / "www") as port:
            url = f"http://127.0.0.1:{port}/repo"
            s.repositories[url] = open_repository(url, s.home)
            await asyncio.to_thread(s.repositories[url].require_blob, s.blob)  # its libraries are loaded
            await s.again()
            layer = s.layer(url)
            assert await s.read(layer, 0, 2 * CHUNK_BYTES) == DATA[: 2 * CHUNK_BYTES]
        wanted = [s.read(layer, n * CHUNK_BYTES, 10) for n in (9, 12, 15)]
        errors = await asyncio.gather(*wanted, return_exceptions=True)
        assert [type(error) for error in errors] == [StoreUnavailable] * 3
        trouble = s.server.exports.trouble(layer.export)
        assert trouble is not None and isinstance(trouble.error(), StoreUnavailable)
        assert await s.read(layer, 0, CHUNK_BYTES) == DATA[:CHUNK_BYTES]
        with http_site(tmp_path / "www", port):
            while s.server.exports.trouble(layer.export) is not None:  # noqa: ASYNC110 - a probe ends it
                await asyncio.sleep(0.02)
            assert await s.read(layer, 0, len(DATA)) == DATA


def opened(engine: socket.socket, layer: ServedLayer) -> None:
    """As an engine opens an export."""
    name = layer.export.encode()
    exactly(engine, len(nbd.GREETING))
    engine.sendall(struct.pack(">I", 3) + b"IHAVEOPT" + struct.pack(">II", nbd.EXPORT_NAME, len(name)) + name)
    exactly(engine, 10)


def ask(engine: socket.socket, handle: int, offset: int, length: int) -> None:
    engine.sendall(struct.pack(">IHHQQI", 0x25609513, 0, nbd.READ, handle, offset, length))


def answer(engine: socket.socket, length: int) -> tuple[int, int, bytes]:
    """Handle, error and bytes of the next one."""
    _, error, handle = struct.unpack(">IIQ", exactly(engine, 16))
    return handle, error, b"" if error else exactly(engine, length)


def exactly(engine: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = engine.recv(count - len(data))
        assert more
        data += more
    return data
