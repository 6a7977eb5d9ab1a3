"""The node's HTTP API: the real application on a real unix socket, over a pretended engine."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvicorn

from aenv_run.cache import BlobCache
from aenv_run.catalog import Catalog
from aenv_run.drivers.select import Selected
from aenv_run.errors import (
    AenvError,
    Conflict,
    DriverUnavailable,
    InvalidInput,
    NodeUnavailable,
    NoSpace,
    NotFound,
)
from aenv_run.lifecycle import State
from aenv_run.node import keep_time
from aenv_run.node_api import Service, make_app
from aenv_run.node_client import NodeClient
from aenv_run.node_core import Node
from aenv_run.node_socket import FileLock, listen, short_path
from aenv_run.node_wire import CreateRequest, ForkRequest, ResumeRequest, SnapshotRequest, TimeoutRequest
from aenv_run.paths import Home
from aenv_run.repository import Draft, Repository
from aenv_run.sandbox_tools import Tools
from aenv_run.sdk_async import AsyncSandbox
from aenv_run.store.posix import PosixStore
from aenv_run.types import Architecture, MachineSpec, Name
from tests.unit.pretend_engine import PretendEngine, seed_files


@asynccontextmanager
async def serving(home: Home) -> AsyncIterator[tuple[Service, NodeClient]]:
    """The application on the home's socket."""
    home.root.mkdir(parents=True, exist_ok=True)
    service = Service(home, lambda: None)
    server = uvicorn.Server(uvicorn.Config(make_app(service), log_config=None, lifespan="off"))
    task = asyncio.create_task(server._serve([listen(home.node_socket)]))  # without taking the signals
    try:
        yield service, NodeClient(home)
    finally:
        server.should_exit = True
        await task


def make_node(home: Home, engine: PretendEngine, seed: Path) -> Node:
    """A node with ``tiny:1``."""
    repository = Repository(PosixStore(home.repository))
    catalog = Catalog(repository)
    draft = Draft(architecture=Architecture("amd64"), machine=MachineSpec())
    catalog.publish(Name("tiny"), repository.commit(seed_files(seed), draft).id)
    tools = Tools(engine, "tcg", repository, catalog, BlobCache(home.cache, repository), engine.guest)
    return Node(home, tools)


async def test_every_call_over_the_socket(tmp_path: Path) -> None:
    home, engine = Home(tmp_path / ("h" * 120)), PretendEngine()  # deeper than a socket path may be
    async with serving(home) as (service, client):
        assert (health := await client.health()) is not None and not health.ready
        waiting = asyncio.create_task(client.driver())
        service.begin(
            make_node(home, engine, tmp_path / "seed"), Selected(engine, await engine.probe(), "because")
        )
        assert (await waiting).why == "because"
        made = await client.create(CreateRequest(snapshot="tiny"))
        assert (await client.get(made.sandbox_id[:6])).access_token == made.access_token
        assert (await client.pause(made.sandbox_id)).state is State.PAUSED
        assert (await client.resume(made.sandbox_id, ResumeRequest())).state is State.RUNNING
        assert (await client.set_timeout(made.sandbox_id, TimeoutRequest(timeout_s=9))).expires_at_s
        (entry,) = (await client.fork(made.sandbox_id, ForkRequest())).children
        assert entry.sandbox is not None and entry.sandbox.parent == made.sandbox_id
        reply = await client.snapshot(made.sandbox_id, SnapshotRequest(name=Name("kept")))
        assert (reply.name, reply.version) == ("kept", 1)
        assert len(await client.list()) == 2
        for info in await client.list():
            await client.kill(info.sandbox_id)
        with pytest.raises(NotFound, match="aenv ls -a"):
            await client.get(made.sandbox_id)
    assert not engine.machines and home.node_socket.stat().st_mode & 0o777 == 0o600


async def test_errors_keep_their_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path / "home")
    async with serving(home) as (service, client):
        with pytest.raises(InvalidInput, match="timeout_s"):
            wrong = CreateRequest.model_construct(snapshot="x", timeout_s=-1).model_dump_json()
            await client.transport.request("POST", "/sandboxes", wrong)
        with monkeypatch.context() as patch:
            patch.setenv("AENV_REPOSITORY", "/elsewhere")
            with pytest.raises(Conflict, match="/elsewhere"):
                await client.list()
        service.fail(DriverUnavailable("nothing works here", fix="run `aenv doctor`"))
        with pytest.raises(DriverUnavailable, match="nothing works") as caught:
            await client.list()
        assert caught.value.fix == "run `aenv doctor`"
        assert service.in_flight == 0


async def test_a_caller_who_hangs_up_takes_the_launch_with_him(tmp_path: Path) -> None:
    home, engine = Home(tmp_path / "home"), PretendEngine()
    async with serving(home) as (service, client):
        service.begin(make_node(home, engine, tmp_path / "seed"), Selected(engine, await engine.probe(), ""))
        engine.boot_gate = asyncio.Event()
        call = asyncio.create_task(client.create(CreateRequest(snapshot="tiny")))
        async with asyncio.timeout(10):
            while not await client.list():  # noqa: ASYNC110 - it is another process's state
                await asyncio.sleep(0.01)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            while await client.list():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not list(home.sandboxes.iterdir()) and not engine.machines


async def test_a_fork_streams_its_children_and_a_caller_who_hangs_up_takes_them_back(tmp_path: Path) -> None:
    home, engine = Home(tmp_path / "home"), PretendEngine()
    async with serving(home) as (service, client), asyncio.timeout(20):
        service.begin(make_node(home, engine, tmp_path / "seed"), Selected(engine, await engine.probe(), ""))
        parent = await AsyncSandbox.create("tiny", home=home)
        with pytest.raises(NotFound):  # an error before the first line is as everywhere
            await client.fork("sbx", ForkRequest())
        await parent.pause()
        with pytest.raises(Conflict):
            await parent.fork(2)
        await parent.resume()
        engine.fail_launches = {3}
        entries = (await client.fork(parent.sandbox_id, ForkRequest(count=3))).children
        assert [entry.index for entry in entries] == [0, 1, 2] and sum(
            entry.error is not None for entry in entries
        ) == 1
        assert len(await client.list()) == 3
        engine.hold_launches = {5, 7}
        async for child in parent.fork_each(3):
            assert isinstance(child, AsyncSandbox) and len(await client.list()) == 6
            break
        while len(await client.list()) != 3 or service.in_flight:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        async for _ in parent.fork_each(1):
            break  # who stops at the last one keeps all
        assert len(await client.list()) == 4 == len(engine.machines) and service.in_flight == 0
        for info in await client.list():
            await client.kill(info.sandbox_id)
    assert not engine.machines


async def test_a_node_that_goes_away_is_no_dead_sandbox(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.root.mkdir()
    listener = listen(home.node_socket)

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    async with await asyncio.start_unix_server(hang_up, sock=listener):
        with pytest.raises(NodeUnavailable, match="went away"):
            await NodeClient(home).health()


async def test_keep_time_returns_when_nothing_is_live_and_nobody_asks(tmp_path: Path) -> None:
    home, engine = Home(tmp_path / "home"), PretendEngine()
    node = make_node(home, engine, tmp_path / "seed")
    asked = [True]
    await node.create(CreateRequest(snapshot="tiny", timeout_s=0.2))
    keeping = asyncio.create_task(keep_time(node, lambda: asked[0], idle_s=0.1))
    await asyncio.sleep(0.5)
    assert not node.infos() and not keeping.done()  # expired, but a request is being answered
    asked[0] = False
    await asyncio.wait_for(keeping, 5)


def test_one_lock_one_holder(tmp_path: Path) -> None:
    one, two = FileLock(tmp_path / "locks" / "x"), FileLock(tmp_path / "locks" / "x")
    assert one.acquire() and not two.acquire()
    one.release()
    assert two.acquire()
    two.release()


def test_a_socket_path_is_short_wherever_it_is(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 200)
    deep.mkdir()
    (deep / "x").write_text("here")
    with short_path(deep / "x") as short:
        assert len(short) < 40 and Path(short).read_text() == "here"


async def test_a_full_disk_is_told_as_such(tmp_path: Path) -> None:
    home, engine = Home(tmp_path / "home"), PretendEngine()
    async with serving(home) as (service, client):
        service.begin(make_node(home, engine, tmp_path / "seed"), Selected(engine, await engine.probe(), ""))
        made = await client.create(CreateRequest(snapshot="tiny"))
        engine.fail_capture = OSError(errno.ENOSPC, "No space left on device")
        with pytest.raises(NoSpace):
            await client.pause(made.sandbox_id)
        engine.fail_capture = RuntimeError("a bug")
        with pytest.raises(AenvError, match="a bug"):
            await client.pause(made.sandbox_id)
        assert (await client.get(made.sandbox_id)).state is State.RUNNING
        await client.kill(made.sandbox_id)
