"""What a sandbox promises its user, whatever the driver: node, SDK, daemon and engine together.

The promises of a machine alone are in test_driver_contract.py. Where drivers differ, the difference is data.
"""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from aenv_run import AsyncSandbox
from aenv_run.drivers.gvisor_level import VARIABLE
from aenv_run.errors import (
    AenvError,
    CommandNotFound,
    CommandTimeout,
    Conflict,
    InvalidInput,
    NoSpace,
    NotFound,
    SandboxDead,
    TimeOver,
)
from aenv_run.guest import Command, Ended, Guest, Output, PtySize
from aenv_run.lifecycle import State
from aenv_run.node_client import NodeClient
from aenv_run.node_wire import PoolRequest
from aenv_run.paths import Home
from aenv_run.sdk_commands import AsyncCommandHandle
from tests.contracts.machines import DRIVERS, need_runsc
from tests.e2e.conftest import ROOT, environment, node_home
from tests.e2e.tiny import make_tiny

PAUSES = 10
ODD_NAMES = ("with space", "new\nline", "-dash", "ünï-日本", "quo'te\"d", "*?[a]", "back\\slash", "n" * 255)
#: Prints a number again and again from memory: that it goes on shows that memory came back.
COUNT = "n=0; while :; do n=$((n+1)); echo $n >/dev/shm/.n; busybox mv /dev/shm/.n /dev/shm/n; sleep 0.1; done"
#: As much as the kernel grants at all, more than is free, and every page of it is written.
MOST = "busybox awk '/MemTotal/ {print int($2 * 0.95)}' /proc/meminfo"
TOO_MUCH = f"exec dd if=/dev/zero of=/dev/null count=1 bs=$({MOST})K"


@dataclass(frozen=True)
class Seed:
    """A snapshot with memory of one driver.

    ``own_kernel``: limits meet processes of the guest, not all of it. ``limited``: there are limits of memory and
    disk, which at the lower levels of gVisor there are not.
    """

    driver: str
    snapshot: str
    own_kernel: bool
    limited: bool
    home: Home

    async def start(self, *, max_seconds: float | None = None) -> AsyncSandbox:
        """A sandbox of it."""
        made = await AsyncSandbox.create(self.snapshot, home=self.home, timeout=900, max_seconds=max_seconds)
        assert (await made.get_info()).driver == self.driver
        return made


@pytest.fixture(scope="module", params=DRIVERS)
def own_home(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Home]]:
    """With a node of its own, for one of ``DRIVERS``."""
    name = str(request.param)
    if name != "qemu":
        need_runsc()
    with pytest.MonkeyPatch.context() as environment_of_node:
        if level := name.partition("-")[2]:
            environment_of_node.setenv(VARIABLE, level)
        with node_home(tmp_path_factory.getbasetemp()) as home:
            yield name, home


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def seed(own_home: tuple[str, Home]) -> Seed:
    name, home = own_home
    driver = name.partition("-")[0]
    scratch = home.root / "scratch"
    scratch.mkdir()
    await make_tiny(home, scratch, driver=driver, name=f"tiny-{driver}")
    return Seed(driver, f"tiny-{driver}", driver == "qemu", "-" not in name, home)


@pytest_asyncio.fixture
async def sandbox(seed: Seed) -> AsyncIterator[AsyncSandbox]:
    """One for the test."""
    async with await seed.start() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_id(seed: Seed) -> AsyncIterator[str]:
    """One for all tests that only run commands in it."""
    made = await seed.start()
    yield made.sandbox_id
    await made.kill()


@pytest_asyncio.fixture
async def shared(seed: Seed, shared_id: str) -> AsyncIterator[AsyncSandbox]:
    """The same, for the event loop of one test."""
    found = await AsyncSandbox.connect(shared_id, home=seed.home)
    yield found
    await found.close()


async def output(sandbox: AsyncSandbox, script: str) -> str:
    result = await sandbox.commands.run(script, timeout=120)
    assert result.exit_code == 0, result
    return result.stdout


async def said_something(handle: AsyncCommandHandle) -> None:
    for _ in range(3000):
        if handle.stdout:
            return
        await asyncio.sleep(0.01)
    pytest.fail("no output in 30 s")


async def raw(sandbox: AsyncSandbox, command: Command, data: bytes | None = None) -> bytes:
    """What it prints, byte for byte."""
    result = await sandbox.call(lambda guest: guest.run(command, stdin=data, timeout_s=120))
    assert result.exit_code == 0, result
    return result.stdout


async def forked(sandbox: AsyncSandbox, count: int) -> list[AsyncSandbox]:
    children = await sandbox.fork(count, timeout=900)
    assert not [child for child in children if isinstance(child, AenvError)], children
    return [child for child in children if isinstance(child, AsyncSandbox)]


# --- its life --------------------------------------------------------------------------------------------------


async def test_states_and_what_each_refuses(seed: Seed) -> None:
    sandbox = await seed.start()
    assert (await sandbox.get_info()).state is State.RUNNING
    with pytest.raises(Conflict, match="running"):
        await sandbox.resume()
    await sandbox.pause()
    assert (await sandbox.get_info()).state is State.PAUSED
    for use in (sandbox.pause(), sandbox.fork(1), sandbox.commands.run("true")):
        with pytest.raises(Conflict, match="paused"):
            await use
    await sandbox.resume()
    assert (await sandbox.get_info()).state is State.RUNNING
    assert await sandbox.kill() and not await sandbox.kill()
    with pytest.raises(NotFound):
        await sandbox.get_info()
    assert not (seed.home.sandboxes / sandbox.sandbox_id).exists()


@pytest.mark.long("gvisor-none")
async def test_ten_pauses_lose_nothing(sandbox: AsyncSandbox) -> None:
    await sandbox.commands.run(COUNT, background=True, timeout=None)
    await output(sandbox, "until [ -e /dev/shm/n ]; do sleep 0.1; done")
    seen = 0
    for number in range(PAUSES):
        await sandbox.files.write(f"/srv/{number}", f"disk {number}")
        await sandbox.files.write(f"/dev/shm/{number}", f"memory {number}")
        await sandbox.pause()
        await sandbox.resume()
        count = int(await sandbox.files.read("/dev/shm/n"))
        assert count >= seen
        seen = count
    for place, what in (("/srv", "disk"), ("/dev/shm", "memory")):
        expected = [f"{what} {number}" for number in range(PAUSES)]
        assert [await sandbox.files.read(f"{place}/{number}") for number in range(PAUSES)] == expected
    deadline = time.monotonic() + 60
    while int(await sandbox.files.read("/dev/shm/n")) == seen:
        assert time.monotonic() < deadline, "the loop does not go on"
        await asyncio.sleep(0.05)


async def test_a_pause_under_traffic(sandbox: AsyncSandbox) -> None:
    printing = await sandbox.commands.run("while :; do echo x; sleep 0.01; done", background=True, timeout=None)
    upload = asyncio.create_task(sandbox.files.write("/srv/upload", bytes(24 << 20)))
    await said_something(printing)
    await sandbox.pause()
    with pytest.raises(AenvError):
        await printing.wait()
    await asyncio.gather(upload, return_exceptions=True)  # it may have been quicker
    await sandbox.resume()
    again = await sandbox.commands.connect(printing.pid)
    await said_something(again)
    assert await again.kill()
    assert await output(sandbox, "echo on") == "on\n"


async def test_clock_and_entropy_after_a_restore(seed: Seed, shared: AsyncSandbox) -> None:
    ask = (
        "touch /dev/shm/now; dd if=/dev/urandom bs=32 count=1 2>/dev/null | busybox sha256sum; cat /etc/machine-id"
    )
    ask += "; cat /proc/sys/kernel/random/boot_id; hostname"
    answers = []
    async with await seed.start() as other:
        for one in (shared, other):
            before_s = time.time()
            answers.append((await output(one, ask)).split())
            touched = (await one.files.get_info("/dev/shm/now")).modified_time
            assert touched[:13] == time.strftime("%Y-%m-%dT%H", time.gmtime(before_s)) or time.time() % 3600 < 60
            seconds = float(await output(one, "date +%s"))
            assert before_s - 1.5 < seconds < time.time() + 0.5
    for mine, theirs in zip(*answers, strict=True):
        assert mine != theirs or mine == "-"


async def test_a_machine_that_stood_ready_is_a_sandbox_as_any_other(seed: Seed) -> None:
    node = NodeClient(seed.home)
    await node.set_pool(PoolRequest(snapshot=seed.snapshot, low=1, high=1))
    try:
        for _ in range(600):
            if (await node.pools())[0].ready:
                break
            await asyncio.sleep(0.1)
        async with await seed.start() as sandbox:
            assert (await node.pools())[0].taken == 1
            seconds = float(await output(sandbox, "date +%s"))
            assert time.time() - 30 < seconds < time.time() + 0.5
            assert await output(sandbox, "hostname") == f"{sandbox.sandbox_id}\n"
            await sandbox.files.write("/srv/of-the-episode", "x")
            before = sandbox.sandbox_id
            await sandbox.reset()
            assert sandbox.sandbox_id != before and not await sandbox.files.exists("/srv/of-the-episode")
            assert await output(sandbox, "hostname") == f"{sandbox.sandbox_id}\n"
            await sandbox.pause()
            await sandbox.resume()
            assert await output(sandbox, "echo on") == "on\n"
    finally:
        await node.remove_pool(seed.snapshot)


async def test_the_second_launch_of_a_disk_restores_what_the_first_boot_left(seed: Seed) -> None:
    async with await seed.start() as maker:
        await maker.files.write("/srv/kept", "on disk")
        reply = await maker.snapshot(memory=False)
    async with await AsyncSandbox.create(reply.snapshot_id, home=seed.home) as first:
        assert (await first.get_info()).origin == "booted"
        await first.files.write("/srv/mine", "of the first")
    for _ in range(600):
        if list((seed.home.cache / "warm").glob(f"{reply.snapshot_id}-*/image.json")):
            break
        await asyncio.sleep(0.1)
    async with await AsyncSandbox.create(reply.snapshot_id, home=seed.home) as second:
        assert (await second.get_info()).origin == "restored"
        assert await output(second, "cat /srv/kept; ls /srv; hostname") == f"on diskkept\n{second.sandbox_id}\n"
        await second.pause()
        await second.resume()
        assert (await second.snapshot()).snapshot_id != reply.snapshot_id


# --- forks -----------------------------------------------------------------------------------------------------


async def test_siblings_have_the_unsynced_writes_and_do_not_see_each_other(sandbox: AsyncSandbox) -> None:
    expected = await output(
        sandbox,
        "dd if=/dev/urandom of=/srv/data bs=1M count=8 2>/dev/null; busybox sha256sum </srv/data",
    )
    await sandbox.commands.run(
        "cp /srv/data /srv/more 2>/dev/null || busybox cp /srv/data /srv/more"
    )  # not synced
    family = [sandbox, *await forked(sandbox, 2)]
    try:
        for number, one in enumerate(family):
            assert await output(one, "busybox sha256sum </srv/more") == expected
            await one.commands.run(f"echo {number} >/srv/mine; echo {number} >/dev/shm/mine")
        for number, one in enumerate(family):
            assert await output(one, "cat /srv/mine /dev/shm/mine") == f"{number}\n{number}\n"
    finally:
        await asyncio.gather(*(child.kill() for child in family[1:]))


async def test_a_child_that_does_not_start_is_told_and_the_others_run(sandbox: AsyncSandbox, seed: Seed) -> None:
    """Its memory is damaged between the fork's capture and its own launch: whichever child is caught."""
    before = set(seed.home.sandboxes.iterdir())
    damaged: list[Path] = []

    async def damage_one() -> None:
        while not damaged:
            for directory in set(seed.home.sandboxes.iterdir()) - before:
                files = sorted((directory / "memory").glob("*"), key=lambda path: path.stat().st_size)
                if not (directory / "sandbox.json").exists() or not files:
                    continue
                for path in files:
                    path.unlink()  # a link of its own: the siblings' stay
                    path.write_bytes(b"no image")
                damaged.append(directory)
                return
            await asyncio.sleep(0)

    culprit = asyncio.create_task(damage_one())
    children = await sandbox.fork(3, timeout=900)
    await culprit
    good = [child for child in children if isinstance(child, AsyncSandbox)]
    bad = [child for child in children if isinstance(child, AenvError)]
    try:
        assert (len(good), len(bad)) == (2, 1), children
        for one in (sandbox, *good):
            assert await output(one, "echo fine") == "fine\n"
        assert not damaged[0].exists()
    finally:
        await asyncio.gather(*(child.kill() for child in good))


# --- commands --------------------------------------------------------------------------------------------------


async def test_exit_codes_and_errors_of_a_start(shared: AsyncSandbox) -> None:
    for code in (0, 1, 3, 255):
        assert (await shared.commands.run(f"exit {code}")).exit_code == code
    with pytest.raises(CommandNotFound):
        await shared.commands.run(["nonesuch"])
    with pytest.raises(InvalidInput, match="/none"):
        await shared.commands.run(["/bin/true"], cwd="/none")
    with pytest.raises(AenvError, match="nobody-here"):
        await shared.commands.run(["/bin/true"], user="nobody-here")


async def test_signals(shared: AsyncSandbox) -> None:
    caught = await shared.commands.run("trap 'exit 7' TERM; kill -TERM $$; sleep 60")
    assert caught.exit_code == 7
    ended = await shared.commands.run(["/bin/sh", "-c", "kill -KILL $$"])
    assert ended.error == "signal: killed"
    with pytest.raises(CommandTimeout):
        await shared.commands.run("sleep 4711 & sleep 4711; true", timeout=0.5)
    deadline = time.monotonic() + 30
    while "sleep 4711" in (await shared.commands.run(["/bin/ps"])).stdout:
        assert time.monotonic() < deadline, "the time-out left processes"
        await asyncio.sleep(0.1)


async def test_output_arrives_byte_for_byte(shared: AsyncSandbox) -> None:
    big = await raw(
        shared, Command(("/bin/sh", "-c", "dd if=/dev/urandom bs=1M count=8 2>/dev/null | busybox tee /dev/shm/r"))
    )
    expected = (await output(shared, "busybox sha256sum </dev/shm/r; rm /dev/shm/r")).split()[0]
    assert len(big) == 8 << 20 and hashlib.sha256(big).hexdigest() == expected
    split = await raw(shared, Command(("/bin/sh", "-c", r"printf '\342\202'; sleep 0.3; printf '\254\377'")))
    assert split == "€".encode() + b"\xff"


async def test_input_of_every_kind(shared: AsyncSandbox, seed: Seed) -> None:
    data = bytes(range(256)) * 8192
    assert await raw(shared, Command(("/bin/cat",), stdin=True), data) == data
    assert await raw(shared, Command(("/bin/cat",))) == b""  # none: it ends at once
    argv = [sys.executable, "-m", "aenv_run.cli", "exec", "-i", shared.sandbox_id, "--", "cat"]
    done = await asyncio.to_thread(
        subprocess.run, argv, input=data, capture_output=True, timeout=120, cwd=ROOT, env=environment(seed.home)
    )
    assert done.returncode == 0 and done.stdout == data, done.stderr


async def test_a_terminal(shared: AsyncSandbox) -> None:
    async def talk(guest: Guest) -> tuple[str, Ended | None]:
        said, ended = b"", None
        command = Command(
            ("/bin/sh", "-c", "stty size; read a; stty size; echo got $a; exit 5"), pty=PtySize(97, 31)
        )
        async with guest.start(command, timeout_s=60) as process:
            async for event in process.events():
                if isinstance(event, Output):
                    said += event.data
                    if said.count(b"\n") == 1 and b"31 97" in said:
                        await process.resize(80, 24)
                        await process.send_input(b"word\n")
                else:
                    ended = event
        return said.decode(), ended

    said, ended = await shared.call(talk)
    assert ended is not None and ended.exit_code == 5
    assert [line for line in said.split("\r\n") if line] == ["31 97", "word", "24 80", "got word"]


async def test_a_background_child_does_not_hold_the_call(shared: AsyncSandbox) -> None:
    started_s = time.monotonic()
    assert (await shared.commands.run("sleep 4712 & echo done")).stdout == "done\n"
    assert time.monotonic() - started_s < 60
    await shared.commands.run(["/bin/busybox", "pkill", "-f", "sleep 4712"])


@pytest.mark.long("gvisor")
async def test_a_thousand_orphans_leave_no_zombie(shared: AsyncSandbox, seed: Seed) -> None:
    count = 1000 if seed.limited else 100  # the levels of gVisor share their kernel
    script = f"i=0; while [ $i -lt {count} ]; do (true &); i=$((i+1)); done"
    assert (await shared.commands.run(script, timeout=300)).exit_code == 0
    zombies = "busybox grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l; true"
    deadline = time.monotonic() + 60
    while int(await output(shared, zombies)):
        assert time.monotonic() < deadline, "zombies stay"
        await asyncio.sleep(0.2)


async def test_files_with_odd_names(shared: AsyncSandbox) -> None:
    for name in ODD_NAMES:
        await shared.files.write(f"/srv/odd/{name}", f"in {name}")
    assert {entry.name for entry in await shared.files.list("/srv/odd")} == set(ODD_NAMES)
    for name in ODD_NAMES:
        assert await shared.files.read(f"/srv/odd/{name}") == f"in {name}"
        assert await raw(shared, Command(("/bin/cat", f"/srv/odd/{name}"))) == f"in {name}".encode()
    await shared.files.remove("/srv/odd")
    assert not await shared.files.exists("/srv/odd")


# --- limits ----------------------------------------------------------------------------------------------------


async def test_a_full_disk_is_the_command_s_error(sandbox: AsyncSandbox, seed: Seed) -> None:
    if not seed.limited:
        await output(sandbox, "dd if=/dev/urandom of=/srv/big bs=1M count=150")
        with pytest.raises(NoSpace, match="do not fit on its disk"):
            await sandbox.pause()
        await output(sandbox, "rm /srv/big")
        await sandbox.pause()
        return
    result = await sandbox.commands.run("dd if=/dev/zero of=/srv/big bs=1M count=500", timeout=120)
    assert result.exit_code == 1 and "No space left on device" in result.stderr
    assert await output(sandbox, "rm /srv/big; sync; echo x >/srv/small && cat /srv/small") == "x\n"


async def test_out_of_memory(sandbox: AsyncSandbox, seed: Seed) -> None:
    if seed.own_kernel:
        result = await sandbox.commands.run(TOO_MUCH, timeout=120)
        assert result.error == "signal: killed" and result.exit_code != 0, result
        assert await output(sandbox, "echo fine") == "fine\n"
        return
    if not seed.limited:
        pytest.skip("at this level of gVisor the host's memory is the only limit: docs/limits.md")
    with pytest.raises(SandboxDead):
        await sandbox.commands.run("dd if=/dev/zero of=/dev/shm/x bs=1M count=600; sleep 60", timeout=120)
    info = await sandbox.get_info()
    assert info.state is State.DEAD and "out of memory" in info.reason


async def test_too_many_processes(sandbox: AsyncSandbox, seed: Seed) -> None:
    """gVisor's own limit, on the sandbox as a whole, is met in test_gvisor_machine.py: here it holds many."""
    if seed.own_kernel:  # a daemon that cannot start a thread ends, and the sandbox with it: some are kept for it
        text = await output(sandbox, "cat /proc/sys/kernel/threads-max /sys/fs/cgroup/user/pids.max")
        of_kernel, of_users = (int(word) for word in text.split())
        assert of_kernel // 2 <= of_users <= of_kernel - 256
    limit, count = ("echo 150 >/sys/fs/cgroup/user/pids.max; ", 300) if seed.own_kernel else ("", 100)
    script = f"{limit}i=0; while [ $i -lt {count} ]; do sleep 60 & i=$((i+1)); done"
    result = await sandbox.commands.run(script, timeout=120)
    if seed.own_kernel:
        assert result.exit_code != 0 and "Resource temporarily unavailable" in result.stderr, result
    else:
        assert result.exit_code == 0, result
    await sandbox.commands.run(["/bin/busybox", "killall", "sleep"])
    assert await output(sandbox, "echo fine") == "fine\n"


async def test_time_over(seed: Seed) -> None:
    async with await seed.start(max_seconds=4) as sandbox:
        with pytest.raises(TimeOver, match="4 s"):
            await sandbox.commands.run("sleep 60")
        info = await sandbox.get_info()
        assert (info.state, info.ended_by) == (State.DEAD, "time_over")
        for use in (sandbox.pause(), sandbox.files.read("/etc/passwd")):
            with pytest.raises(TimeOver):
                await use


async def test_another_size_needs_a_cold_start(seed: Seed) -> None:
    with pytest.raises(InvalidInput, match="memory_mib"):
        await AsyncSandbox.create(seed.snapshot, home=seed.home, memory_mib=256)
    async with await AsyncSandbox.create(seed.snapshot, home=seed.home, cold=True, memory_mib=256) as sandbox:
        total_kib = int(await output(sandbox, "busybox awk '/MemTotal/ {print $2}' /proc/meminfo"))
        assert total_kib > 200 << 10
        assert (await sandbox.get_info()).machine.memory_mib == 256
