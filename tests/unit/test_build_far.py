"""Builds on layers that are far: what came of an I/O error is never kept, and is made again."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from aenv_run import nbd_client
from aenv_run.blocks.exports import Exports
from aenv_run.blocks.layers import Layers
from aenv_run.cache import BlobCache
from aenv_run.catalog import Catalog
from aenv_run.chunk_table import CHUNK_BYTES
from aenv_run.config import PATIENCE_VARIABLE
from aenv_run.errors import AenvError, CorruptData, StoreUnavailable
from aenv_run.nbd import ServedLayer
from aenv_run.repository import Draft, Repository
from aenv_run.types import Architecture, Context, MachineSpec, Name
from tests.bytes_half import capture
from tests.unit.build_site import HEAD, BuildSite
from tests.unit.node_site import Site
from tests.unit.test_block_sources import http_site
from tests.unit.test_node_on_demand import FarStore

DATA = random.Random(12).randbytes(20 * CHUNK_BYTES)
FIRST = DATA[10 * CHUNK_BYTES : 10 * CHUNK_BYTES + 4]
RUN = HEAD + "steps:\n  - {id: one, run: one || true}\n"
VERIFY = HEAD + "steps:\n  - {id: one, verify: one || true}\n"


@dataclass
class Far:
    """A home whose repository is served from ``port``, as its layers are read; it has ``tiny``, large and far."""

    build: BuildSite
    layers: Layers
    www: Path
    port: int
    serving: AsyncExitStack

    async def up(self) -> None:
        await self.serving.aclose()
        self.serving.enter_context(http_site(self.www, self.port))

    async def down(self) -> None:
        """Nobody listens, and nobody else takes the port."""
        await self.serving.aclose()
        kept = self.serving.enter_context(socket.socket())
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", self.port))

    async def read(self) -> bytes:
        """As the machine that was started last reads what nobody has read yet."""
        layer = self.build.engine.disks[-1][0]
        assert isinstance(layer, ServedLayer)
        return await asyncio.to_thread(nbd_client.read, layer, 10 * CHUNK_BYTES, 4)

    def spoil(self, data: bytes) -> None:
        """Chunk 10 in the store begins with that."""
        for path in (self.www / "repo").rglob("*"):
            if path.is_file() and path.stat().st_size >= len(DATA):
                path.chmod(0o600)
                with path.open("r+b") as file:
                    file.seek(10 * CHUNK_BYTES)
                    file.write(data)

    async def through_an_error(self, recipe: str, command: str) -> AenvError:
        """Build, with a read in ``command`` that fails; all is well again before it ends, with any exit code."""
        self.build.engine.command_gate = gate = asyncio.Event()
        building = asyncio.create_task(self.build.build(recipe, layers=self.layers))
        while command not in self.build.commands and not building.done():  # noqa: ASYNC110 - seen by its traces
            await asyncio.sleep(0.02)
        self.spoil(bytes(4))
        with pytest.raises(StoreUnavailable):
            await self.read()
        self.spoil(FIRST)
        assert await self.read() == FIRST
        layer = self.build.engine.disks[-1][0]
        assert isinstance(layer, ServedLayer)
        assert Exports(self.build.home.cache).trouble(layer.export) is None
        gate.set()
        self.build.engine.command_gate = None
        with pytest.raises(AenvError) as failed:
            await building
        return failed.value


@asynccontextmanager
async def far_site(folder: Path) -> AsyncIterator[Far]:
    build = BuildSite.make(folder)
    repository = Repository(FarStore(folder / "www" / "repo"))
    draft = Draft(architecture=Architecture("amd64"), machine=MachineSpec(), context=Context())
    snapshot = repository.commit(capture(folder / "captures", DATA), draft)
    catalog = Catalog(repository)
    catalog.publish(Name("tiny"), snapshot.id, [])
    cache = BlobCache(build.home.cache, repository)
    async with AsyncExitStack() as serving:
        port = serving.enter_context(http_site(folder / "www"))
        layers = Layers.of(build.home, cache, f"http://127.0.0.1:{port}/repo", on_demand=True)
        tools = replace(build.site.tools, repository=repository, catalog=catalog, cache=cache, layers=layers)
        build.site = Site(build.home, build.engine, tools)
        try:
            yield Far(build, layers, folder / "www", port, serving)
        finally:
            layers.server.stop()


@pytest.mark.parametrize(("recipe", "code"), [(RUN, 0), (RUN, 1), (VERIFY, 0)], ids=["run", "failed", "verify"])
async def test_a_step_during_which_its_disk_could_not_be_read_is_not_kept(
    recipe: str, code: int, tmp_path: Path
) -> None:
    async with far_site(tmp_path) as far:
        far.build.engine.first_outcomes["one || true"] = [code]
        error = await far.through_an_error(recipe, "one || true")
        assert isinstance(error, CorruptData)
        assert "step 'one' is not kept, since its disk could not be read: chunk 10 " in error.message
        assert far.build.clean()
        result = await far.build.build(recipe, layers=far.layers)
        assert (result.hits, result.misses) == (1, 1) and far.build.commands == ["one || true"] * 2
        assert (await far.build.build(recipe, layers=far.layers)).misses == 0


async def test_a_build_while_the_store_of_its_base_is_dead_says_so_and_builds_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PATIENCE_VARIABLE, "6")
    async with far_site(tmp_path) as far:
        await far.down()
        with pytest.raises(StoreUnavailable, match="the disk cannot be read: "):
            await far.build.build(RUN, layers=far.layers)
        assert far.build.clean() and far.build.commands == []
        await far.up()
        for _ in range(200):  # a probe finds out
            try:
                result = await far.build.build(RUN, layers=far.layers)
                break
            except StoreUnavailable:
                await asyncio.sleep(0.1)
        assert (result.hits, result.misses) == (1, 1)
        assert (await far.build.build(RUN, layers=far.layers)).misses == 0
