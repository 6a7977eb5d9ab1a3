"""The node process: it dies and comes back, engines die, it ends when idle."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from aenv_run import Sandbox
from aenv_run.errors import AenvError, Conflict, SandboxDead
from aenv_run.lifecycle import State
from aenv_run.node_client import NodeClient
from aenv_run.paths import Home
from aenv_run.process import read_start_ticks
from tests.e2e.conftest import without_slots


def node_pid(home: Home) -> int:
    health = asyncio.run(NodeClient(home).health())
    assert health is not None
    return health.pid


def engine_pid(home: Home, sandbox_id: str) -> int:
    """The process whose working directory is the machine's."""
    directory = home.sandboxes / sandbox_id / "machine"
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink() == directory:
                return int(entry.name)
        except OSError:
            continue
    raise AssertionError(f"no engine in {directory}")


def test_a_killed_node_loses_nothing(home: Home) -> None:
    with Sandbox.create("tiny", home=home) as running, Sandbox.create("tiny", home=home) as paused:
        running.files.write("/dev/shm/x", "kept")
        paused.files.write("/dev/shm/x", "kept too")
        paused.pause()
        old = node_pid(home)
        os.kill(old, signal.SIGKILL)
        assert {info.state for info in Sandbox.list(home=home)} == {State.RUNNING, State.PAUSED}
        assert node_pid(home) != old
        assert running.files.read("/dev/shm/x") == "kept"
        running.set_timeout(300)
        paused.resume()
        assert paused.files.read("/dev/shm/x") == "kept too"


def test_sigterm_leaves_machines_running(sandbox: Sandbox, home: Home) -> None:
    os.kill(node_pid(home), signal.SIGTERM)
    assert sandbox.commands.run("echo still here").stdout == "still here\n"
    assert sandbox.get_info().state is State.RUNNING  # a new node


def test_a_dead_engine_is_no_exit_code(sandbox: Sandbox, home: Home) -> None:
    assert sandbox.commands.run("kill -9 $$").error == "signal: killed"  # a command's end
    handle = sandbox.commands.run("sleep 60", background=True)
    os.kill(engine_pid(home, sandbox.sandbox_id), signal.SIGKILL)
    with pytest.raises(SandboxDead):
        handle.wait()
    with pytest.raises(SandboxDead):
        sandbox.commands.run("true")
    deadline = time.monotonic() + 10
    while (info := sandbox.get_info()).state is not State.DEAD and time.monotonic() < deadline:
        time.sleep(0.05)
    assert info.state is State.DEAD and info.reason
    with pytest.raises(SandboxDead):
        sandbox.pause()


@pytest.mark.parametrize("damaged", ["machine/machine.json", "sandbox.json"])
def test_no_engine_outlives_its_record(home: Home, damaged: str) -> None:
    made = Sandbox.create("tiny", home=home)
    engine = engine_pid(home, made.sandbox_id)
    assert asyncio.run(NodeClient(home).shutdown())
    (home.sandboxes / made.sandbox_id / damaged).write_text("{")
    deadline = time.monotonic() + 30
    while (info := Sandbox.connect(made.sandbox_id, home=home).get_info()).state is not State.DEAD:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert damaged.rpartition("/")[2] in info.reason and not alive(engine)
    made.kill()
    assert not (home.sandboxes / made.sandbox_id).exists()


def alive(pid: int) -> bool:
    """Whether it still runs (a zombie does not)."""
    return read_start_ticks(pid) is not None


def test_a_start_that_fails_is_told_to_every_caller(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.root.mkdir()
    without_slots(home)
    home.sandboxes.symlink_to(tmp_path / "absent" / "sandboxes")
    client = NodeClient(home)

    async def scenario() -> list[object]:
        async with asyncio.timeout(60):
            return list(await asyncio.gather(*(client.list() for _ in range(3)), return_exceptions=True))

    for result in asyncio.run(scenario()):
        assert isinstance(result, AenvError) and "sandboxes" in result.message, result


def test_a_node_is_the_same_wherever_it_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENV_NODE_IDLE_S", "60")
    home = Home(tmp_path / "home")
    home.root.mkdir()
    without_slots(home)
    client = NodeClient(home)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AENV_REPOSITORY", "mine")
    try:
        asyncio.run(client.list())
        health = asyncio.run(client.health())
        assert health is not None and health.repository == str(tmp_path / "mine")
        monkeypatch.chdir(tmp_path / "elsewhere")
        with pytest.raises(Conflict, match="elsewhere/mine"):
            asyncio.run(client.list())
        monkeypatch.setenv("AENV_REPOSITORY", str(tmp_path / "elsewhere" / ".." / "mine"))
        asyncio.run(client.list())
        monkeypatch.delenv("AENV_REPOSITORY")
        with pytest.raises(Conflict, match="home/repository"):
            asyncio.run(client.list())
    finally:
        node = node_pid(home)
        assert asyncio.run(client.shutdown())
        assert not alive(node)  # at once: its files are closed, and its home could be unmounted


def test_an_idle_node_ends_and_a_deep_home_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENV_NODE_IDLE_S", "0.5")
    deep = Home(tmp_path / ("d" * 100) / ("e" * 100))  # a socket path holds 107 bytes
    deep.root.mkdir(mode=0o700, parents=True)
    without_slots(deep)
    client = NodeClient(deep)

    async def scenario() -> None:
        await asyncio.gather(*(client.list() for _ in range(5)))  # five callers, one node
        assert (await client.health()) is not None
        deadline = time.monotonic() + 20
        while await client.health() is not None and time.monotonic() < deadline:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.1)
        assert await client.health() is None and not await client.shutdown()

    asyncio.run(scenario())
    assert deep.node_log.read_text().count("ready:") == 1
    assert deep.root.stat().st_mode & 0o777 == 0o700
