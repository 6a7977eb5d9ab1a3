"""A home with a snapshot, a pretended engine, and nodes of it that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from aenv_run.cache import BlobCache
from aenv_run.catalog import Catalog
from aenv_run.drivers.protocol import Endpoint
from aenv_run.guest import Guest
from aenv_run.node_core import Node
from aenv_run.node_reaper import Limits
from aenv_run.node_wire import CreateRequest, ForkEntry, ForkRequest, ForkStart
from aenv_run.paths import Home
from aenv_run.repository import Draft, Repository
from aenv_run.sandbox import HostedSandbox
from aenv_run.sandbox_tools import Tools
from aenv_run.store.posix import PosixStore
from aenv_run.types import Architecture, Context, MachineSpec, Name, Tag
from tests.unit.pretend_engine import PretendEngine, PretendMachine, seed_files


@dataclass
class Site:
    """A home, an engine, and nodes of it that come and go."""

    home: Home
    engine: PretendEngine
    tools: Tools

    def node(self, limits: Limits | None = None) -> Node:
        return Node(self.home, self.tools, limits=limits)

    def with_driver(self, driver: PretendEngine, *others: PretendEngine) -> Site:
        """The same home, as a node with other drivers sees it."""
        engines = (driver, *others)

        def guest(endpoint: Endpoint, token: str | None) -> Guest:
            engine = next((one for one in engines if endpoint.port in one.machines), driver)
            return engine.guest(endpoint, token)

        known = {one.name: one for one in others}
        return Site(self.home, driver, replace(self.tools, driver=driver, others=known, guests=guest))

    def machine(self, sandbox: HostedSandbox) -> PretendMachine:
        (found,) = [m for m in self.engine.machines.values() if m.directory == sandbox.directory.machine]
        return found

    def directories(self) -> list[str]:
        return sorted(path.name for path in self.home.sandboxes.glob("*"))

    def clean(self) -> bool:
        return not self.engine.machines and not self.directories()


def make_site(root: Path, seed: Path, user: str = "app") -> Site:
    """A home in ``root`` with ``tiny:1``, which is for ``user``; ``seed`` is scratch."""
    home = Home(root)
    repository = Repository(PosixStore(home.repository))
    draft = Draft(
        architecture=Architecture("amd64"), machine=MachineSpec(), context=Context(env={"A": "image"}, user=user)
    )
    snapshot = repository.commit(seed_files(seed), draft)
    catalog = Catalog(repository)
    catalog.publish(Name("tiny"), snapshot.id, [Tag("latest")])
    engine = PretendEngine()
    cache = BlobCache(home.cache, repository)
    return Site(home, engine, Tools(engine, "tcg", repository, catalog, cache, engine.guest))


async def launch(node: Node, **settings: object) -> HostedSandbox:
    info = await node.create(CreateRequest.model_validate({"snapshot": "tiny", **settings}))
    return node.find(info.sandbox_id)


async def fork(node: Node, parent: HostedSandbox, count: int) -> list[ForkEntry]:
    """All entries, by index."""
    start, *entries = [line async for line in node.fork(parent, ForkRequest(count=count))]
    assert isinstance(start, ForkStart) and start.stopped_ms == 1.0
    found = [entry for entry in entries if isinstance(entry, ForkEntry)]
    assert sorted(entry.index for entry in found) == list(range(count))
    return sorted(found, key=lambda entry: entry.index)


async def until(true: Callable[[], bool]) -> None:
    """Wait at most 10 s."""
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
