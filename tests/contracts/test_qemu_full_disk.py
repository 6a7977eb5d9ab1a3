"""A virtual machine whose host's disk is full stands still, and goes on when there is room."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from aenv_run.drivers.protocol import Machine, MachineState
from aenv_run.paths import Home
from tests.contracts.machines import Bench, make_bench, make_driver, sh
from tests.small_file_system import fill, small_file_system

WRITE = "dd if=/dev/urandom of=/big bs=1M count=12 && sync && echo written"
WRITTEN_BYTES = 12 << 20
#: Leaves the size of /big in $5.
SIZE = "set -- $(ls -l /big)"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def qemu(home: Home, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A captured machine of the QEMU driver."""
    return await make_bench(make_driver("qemu", home), home, tmp_path_factory.mktemp("qemu"), "qemu")


async def stands_still(machine: Machine) -> None:
    """Between two attempts at the write it is stopped."""
    while await machine.state() is not MachineState.PAUSED:  # noqa: ASYNC110 - another process, no event
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def on_a_full_disk(qemu: Bench, place: Path) -> AsyncIterator[tuple[Machine, asyncio.Task[str], Path]]:
    """A machine that writes more than its host has room for, and the file that takes the room."""
    with small_file_system(place, 32 << 20) as small:
        spec = dataclasses.replace(qemu.restored(), directory=small / "machine")
        spec.directory.mkdir()
        async with qemu.running(spec) as machine:
            await sh(machine, "sync")
            filler = fill(small)
            writing = asyncio.create_task(sh(machine, WRITE))
            try:
                await stands_still(machine)
                yield machine, writing, filler
            finally:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)


async def test_a_machine_goes_on_when_its_host_has_room_again(qemu: Bench, tmp_path: Path) -> None:
    async with on_a_full_disk(qemu, tmp_path / "small") as (machine, writing, filler):
        filler.unlink()
        assert await writing == "written"
        assert await machine.state() is MachineState.RUNNING
        capture = await machine.capture(qemu.capture_directory(), memory=True)
    async with qemu.child(qemu.seed, capture) as machine:
        assert await sh(machine, f"{SIZE}; echo $5") == str(WRITTEN_BYTES)


async def test_a_machine_that_is_held_meanwhile_stays_so(qemu: Bench, tmp_path: Path) -> None:
    async with on_a_full_disk(qemu, tmp_path / "small") as (machine, writing, filler):
        await machine.pause()
        filler.unlink()
        await asyncio.sleep(1.5)  # it would have gone on
        assert await machine.state() is MachineState.PAUSED
        capture = await machine.capture(qemu.capture_directory(), memory=True)
        assert await machine.state() is MachineState.PAUSED
        await machine.resume()
        assert await writing == "written"
    async with qemu.child(qemu.seed, capture) as machine:  # the write that had no room is a part of the image
        await sh(machine, f"while {SIZE}; [ $5 != {WRITTEN_BYTES} ]; do sleep 0.1; done; sync")
