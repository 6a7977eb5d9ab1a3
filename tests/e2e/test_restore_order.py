"""No instruction of a user's process runs in a copy before the copy has its own entropy, clock and names."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from itertools import takewhile

import pytest

from aenv_run import AsyncSandbox
from aenv_run.guest import Command, Guest, Identity
from aenv_run.paths import Home
from tests.e2e.conftest import tiny_home

LOOP = (
    "while :; do read boot </proc/sys/kernel/random/boot_id; "
    'echo "$boot $(date +%s) $(busybox od -An -tx8 -N8 /dev/urandom)" >>/dev/shm/log; done'
)
GROWN = 20  # lines


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A home whose machines are QEMU's: those of gVisor have no cgroups inside."""
    before = os.environ.get("AENV_DRIVER")
    os.environ["AENV_DRIVER"] = "qemu"
    try:
        with tiny_home(tmp_path_factory.getbasetemp()) as found:
            yield found
    finally:
        os.environ.pop("AENV_DRIVER")
        os.environ.update({} if before is None else {"AENV_DRIVER": before})


async def _lines(sandbox: AsyncSandbox, least: int = 0, *, since: str = "") -> list[list[str]]:
    """What the loop logged, when it is at least so much; ``since``: not counting what was logged in that boot."""
    deadline = time.monotonic() + 60
    while True:
        text = await sandbox.files.read("/dev/shm/log") if await sandbox.files.exists("/dev/shm/log") else ""
        lines = [line.split() for line in text.rpartition("\n")[0].splitlines()]
        if sum(not since or line[0] != since for line in lines if line) >= least:
            return lines
        assert time.monotonic() < deadline, f"only {len(lines)} lines"
        await asyncio.sleep(0.05)


async def test_children_run_nothing_before_their_identity(home: Home) -> None:
    async with await AsyncSandbox.create("tiny", home=home) as parent:
        await parent.commands.run(["/bin/sh", "-c", LOOP], background=True, timeout=None)
        before = len(await _lines(parent, GROWN))
        parents_boot = (await _lines(parent))[0][0]
        fork_at_s = time.time()
        children = [child for child in await parent.fork(2) if isinstance(child, AsyncSandbox)]
        assert len(children) == 2
        try:
            logs = [await _lines(child, GROWN, since=parents_boot) for child in children]
        finally:
            await asyncio.gather(*(child.kill() for child in children))
        # Each copy starts with the same lines, those of before the fork.
        common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(*logs, strict=False))))
        assert common >= before
        # The line that was half made at the fork holds what was read before it; every later one is its own.
        own = [log[common + 1 :] for log in logs]
        assert all(len(lines) > 5 for lines in own)
        boots = [{boot for boot, _, _ in lines} for lines in own]
        assert all(len(boot) == 1 for boot in boots) and len(boots[0] | boots[1] | {parents_boot}) == 3
        assert min(float(clock) for lines in own for _, clock, _ in lines) >= int(fork_at_s)
        random = [{value for _, _, value in log[common:]} for log in logs]
        assert not random[0] & random[1]
        after = await _lines(parent, before + 2 * GROWN)  # it goes on too, as itself
        assert not {value for _, _, value in after[common:]} & (random[0] | random[1])


async def test_from_detach_to_init_processes_stand_still(home: Home) -> None:
    async with await AsyncSandbox.create("tiny", home=home) as sandbox:
        handle = await sandbox.commands.run(["/bin/sh", "-c", LOOP], background=True, timeout=None)
        doomed = await sandbox.commands.run("sleep 600; true", background=True, timeout=None)
        await _lines(sandbox, 5)
        token = (await sandbox.get_info()).access_token
        assert token is not None

        async def detached(guest: Guest) -> None:
            assert (await guest.info()).freezes
            for _ in range(2):  # again changes nothing
                await guest.detach()
            waiting = asyncio.create_task(guest.run(Command(("/bin/echo", "went on"))))
            count = len(await guest.read_file("/dev/shm/log"))
            await asyncio.sleep(1)
            assert len(await guest.read_file("/dev/shm/log")) == count
            assert not waiting.done()
            assert await guest.kill(doomed.pid)  # also while it stands still
            assert (await asyncio.wait_for(doomed.wait(), 10)).error == "signal: killed"
            await guest.initialise(
                Identity(token, sandbox.sandbox_id, "ab" * 16, "0" * 8 + "-0000-4000-8000-" + "0" * 12, b"x" * 64)
            )
            assert (await asyncio.wait_for(waiting, 20)).stdout == b"went on\n"

        await sandbox.call(detached)
        await _lines(sandbox, len(await _lines(sandbox)) + 5)
        assert handle.pid in [process.pid for process in await sandbox.commands.list()]  # its stream was not cut
        await handle.kill()


async def test_a_removed_cgroup_is_made_again_and_settle_thaws(home: Home) -> None:
    async with await AsyncSandbox.create("tiny", home=home) as sandbox:
        await sandbox.commands.run("busybox rmdir /sys/fs/cgroup/user; busybox rmdir /sys/fs/cgroup/user")
        script = "p=$$; echo $p >/sys/fs/cgroup/cgroup.procs; busybox rmdir /sys/fs/cgroup/user"
        assert (await sandbox.commands.run(["/bin/sh", "-c", script])).exit_code in (0, 1)
        assert (await sandbox.commands.run(["/bin/cat", "/proc/self/cgroup"])).stdout == "0::/user\n"

        async def settled(guest: Guest) -> None:
            async with guest.start(Command(("/bin/sleep", "600"))) as process:
                await guest.detach()
                await guest.settle()
                assert not await guest.kill(process.pid)

        await sandbox.call(settled)
