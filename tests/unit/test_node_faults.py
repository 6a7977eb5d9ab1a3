"""Operations that fail at any step leave the sandbox as it was, and work when they are asked for again.

The faults are real: a file system that is full, or a file where a directory should be.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from aenv_run.errors import AenvError
from aenv_run.lifecycle import State
from aenv_run.node_core import Node
from aenv_run.node_wire import ForkRequest, SnapshotRequest
from aenv_run.sandbox import HostedSandbox
from aenv_run.sandbox_log import LOG_NAME
from aenv_run.sandbox_record import RECORD_NAME
from tests.small_file_system import small_file_system
from tests.unit.node_site import Site, launch, make_site

Operate = Callable[[Node, HostedSandbox], Awaitable[object]]


@pytest.fixture
def small_site(tmp_path: Path) -> Iterator[Site]:
    """A home on a file system of its own with few files."""
    with small_file_system(tmp_path / "small", 4 << 20, files=200) as place:
        yield make_site(place / "home", tmp_path / "seed")


def leave_room_for(place: Path, files: int) -> Path:
    """Use up the file system's files but so many; the directory to remove to have them again."""
    fillers = place / "fillers"
    fillers.mkdir()
    number = 0
    while os.statvfs(place).f_ffree > files:
        (fillers / str(number)).touch()
        number += 1
    return fillers


async def pause(node: Node, sandbox: HostedSandbox) -> None:
    await node.pause(sandbox)


async def fork(node: Node, sandbox: HostedSandbox) -> None:
    lines = [line async for line in node.fork(sandbox, ForkRequest(count=2))]
    for line in lines[1:]:
        if error := getattr(line, "error", None):
            raise error.error()


async def snapshot(node: Node, sandbox: HostedSandbox) -> None:
    await node.snapshot(sandbox, SnapshotRequest())


def contents(sandbox: HostedSandbox) -> dict[str, bytes]:
    """Every file of the sandbox but its log, and those of its machine, which seals a layer at every capture."""
    root = sandbox.directory.root
    files = [path for path in root.rglob("*") if path.is_file() and "machine" not in path.relative_to(root).parts]
    return {str(path.relative_to(root)): path.read_bytes() for path in files if path.name != LOG_NAME}


def assert_as_before(site: Site, sandbox: HostedSandbox, before: dict[str, bytes]) -> None:
    machine = site.machine(sandbox)
    assert sandbox.state is State.RUNNING and machine.running and machine.token == sandbox.record.access_token
    assert contents(sandbox) == before
    assert sandbox.directory.read() == sandbox.record


@pytest.mark.parametrize("operate", [pause, fork, snapshot])
async def test_a_file_system_that_is_full_at_any_step(small_site: Site, operate: Operate) -> None:
    site = small_site
    node = site.node()
    failures = 0
    for room in range(100):
        sandbox = await launch(node, timeout_s=3600)
        before = contents(sandbox)
        fillers = leave_room_for(site.home.root.parent, room)
        try:
            await operate(node, sandbox)
        except (AenvError, OSError):
            failures += 1
        else:
            break
        finally:
            shutil.rmtree(fillers)
        assert_as_before(site, sandbox, before)
        if operate is not fork:  # of a fork's children those that could be had may be there
            assert site.directories() == [sandbox.id]
        await operate(node, sandbox)  # nothing of the first attempt is in the way
        if operate is pause:
            await node.resume(sandbox, timeout_s=60, cold=False)
        await node.kill_live()
        assert site.clean()
    else:
        pytest.fail("it never had room enough")
    assert failures >= 3
    await node.kill(sandbox)
    await node.kill_live()
    assert site.clean()


@pytest.mark.parametrize("operate", [pause, fork, snapshot])
@pytest.mark.parametrize("obstacle", ["capturing", "memory", f"{RECORD_NAME}.tmp"])
async def test_a_directory_or_file_in_the_way(site: Site, operate: Operate, obstacle: str) -> None:
    node = site.node()
    sandbox = await launch(node, cold=True)
    place = sandbox.directory.root / obstacle
    if place.exists():
        place.rmdir()
    if obstacle.startswith(RECORD_NAME):
        place.mkdir()
    else:
        place.write_text("in the way")
    before = contents(sandbox)
    if (operate, obstacle) not in {(fork, "memory"), (fork, f"{RECORD_NAME}.tmp"), (snapshot, "memory")}:
        for _ in range(2):  # a repeat fails in the same way, not for what the first one left
            with pytest.raises((AenvError, OSError)):
                await operate(node, sandbox)
            assert_as_before(site, sandbox, before)
    place.rmdir() if place.is_dir() else place.unlink()
    if obstacle == "memory":
        place.mkdir()
    await operate(node, sandbox)
    if operate is pause:
        await node.resume(sandbox, timeout_s=60, cold=False)
    await node.kill_live()
    assert site.clean()


async def test_a_pause_that_is_cancelled_once_it_is_written_still_lets_its_machine_go(site: Site) -> None:
    node = site.node()
    sandbox = await launch(node)
    for step in range(8):
        pausing = asyncio.create_task(sandbox.pause())
        while sandbox.record.state is not State.PAUSED:  # noqa: ASYNC110 - each turn of the loop counts
            await asyncio.sleep(0)
        for _ in range(step):
            await asyncio.sleep(0)
        pausing.cancel()
        await asyncio.gather(pausing, return_exceptions=True)
        await sandbox.freed()
        assert not site.engine.machines and not sandbox.directory.capturing.exists()
        await node.resume(sandbox, timeout_s=60, cold=False)
    await node.kill(sandbox)
    assert site.clean()


async def test_a_pause_that_is_cancelled_at_any_time_is_undone_or_done(site: Site) -> None:
    node = site.node()
    sandbox = await launch(node)
    for step in range(60):
        pausing = asyncio.create_task(sandbox.pause())
        for _ in range(step):
            await asyncio.sleep(0)
        pausing.cancel()
        await asyncio.gather(pausing, return_exceptions=True)
        if sandbox.state is State.PAUSED:
            await sandbox.freed()
            assert not site.engine.machines, "a pause that is done has let its machine go"
        assert sandbox.directory.read() == sandbox.record and not sandbox.directory.capturing.exists()
        if sandbox.state is State.PAUSED:
            await node.resume(sandbox, timeout_s=60, cold=False)
        machine = site.machine(sandbox)
        assert sandbox.state is State.RUNNING and machine.running
        assert machine.token == sandbox.record.access_token
    await node.kill(sandbox)
    assert site.clean()
