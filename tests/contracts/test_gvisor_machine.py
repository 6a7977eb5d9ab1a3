"""What only the gVisor driver has to hold: its mounts, limits and traps, and disks shared with the others."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from aenv_run import disk
from aenv_run.drivers.gvisor_cgroup import directories, is_unified, name_of
from aenv_run.drivers.protocol import DriverName, Machine, MachineState, NetworkSlot
from aenv_run.drivers.select import select
from aenv_run.errors import AenvError, BootFailed, Conflict, CorruptData, SandboxDead, Unsupported
from aenv_run.guest import Command, Guest, open_port
from aenv_run.network.addressing import DNS
from aenv_run.paths import Home
from tests.contracts.machines import (
    MACHINE,
    Bench,
    make_bench,
    make_driver,
    make_tree,
    need_runsc,
    prepare_capture,
    processes_in,
    sh,
)
from tests.small_file_system import fill, small_file_system

SUBNET = "10.213.77"
NUMBERS = itertools.count()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gvisor(home: Home, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A captured machine of the gVisor driver."""
    need_runsc()
    return await make_bench(make_driver("gvisor", home), home, tmp_path_factory.mktemp("gvisor"), "gvisor")


async def start_process(machine: Machine, script: str) -> None:
    async with Guest(machine.endpoint) as guest, guest.start(Command(("/bin/sh", "-c", script))):
        pass


def convert(form: str, source: Path, target: Path) -> None:
    subprocess.run(["qemu-img", "convert", "-O", form, str(source), str(target)], check=True)


def traces(directory: Path) -> list[str]:
    """What a machine may leave outside its directory."""
    loops = [path.read_text().strip() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(directory) in line]
    groups = [str(path) for path in directories(name_of(directory)) if path.exists()]
    running = [f"process {pid}" for pid in processes_in(directory)]
    return [*(loop for loop in loops if str(directory) in loop), *mounts, *groups, *running]


async def no_traces(directory: Path) -> None:
    """The kernel frees the last mounts a moment after the last process."""
    for _ in range(100):
        if not traces(directory):
            return
        await asyncio.sleep(0.02)
    assert traces(directory) == []


# --- disks -----------------------------------------------------------------------------------------------------


async def test_a_disk_built_under_one_driver_boots_under_the_other(gvisor: Bench, home: Home) -> None:
    qemu = dataclasses.replace(gvisor, driver=(await select(DriverName.QEMU, home)).driver)
    async with gvisor.child() as machine:
        await sh(machine, "echo gvisor >/by; mkdir /tmp/d; echo kept >/tmp/d/f; ln /by /tmp/same; sync")
        first = await machine.capture(gvisor.capture_directory(), memory=False)
    async with qemu.running(qemu.cold(gvisor.seed, first)) as machine:
        assert await sh(machine, "cat /seed /by /tmp/d/f /tmp/same") == "seed\ngvisor\nkept\ngvisor"
        await sh(machine, "echo qemu >>/by; rm /tmp/d/f; sync")
        await prepare_capture(machine)
        second = await machine.capture(qemu.capture_directory(), memory=False)
    async with gvisor.running(gvisor.cold(gvisor.seed, first, second)) as machine:
        assert await sh(machine, "cat /by /tmp/same; ls /tmp/d") == "gvisor\nqemu\ngvisor\nqemu"


async def test_links_of_an_image_do_not_lead_out_of_it(gvisor: Bench, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    tree = make_tree(tmp_path / "tree")
    for name in ("tmp", "run", "sys"):
        if (tree / name).exists():
            (tree / name).rmdir()
        (tree / name).symlink_to(outside)
    image = tmp_path / "links.qcow2"
    await disk.make_image(tree, gvisor.machine.disk_mib, image)
    async with gvisor.running(dataclasses.replace(gvisor.cold(), disk=(image,))) as machine:
        assert await sh(machine, "echo in >/tmp/in; ls /tmp") == "in"
    assert list(outside.iterdir()) == []


async def test_a_damaged_file_system_is_not_mounted(gvisor: Bench, tmp_path: Path) -> None:
    raw, bad = tmp_path / "raw", tmp_path / "bad.qcow2"
    convert("raw", gvisor.disk[0], raw)
    with raw.open("r+b") as file:  # the block bitmaps and inode tables of the first group
        file.seek(64 << 10)
        file.write(os.urandom(2 << 20))
    convert("qcow2", raw, bad)
    spec = dataclasses.replace(gvisor.cold(), disk=(bad,))
    with pytest.raises(CorruptData, match="file system"):
        await gvisor.driver.boot(spec)
    await no_traces(spec.directory)


# --- memory ----------------------------------------------------------------------------------------------------


async def test_an_open_deleted_file_fails_the_capture_by_name(gvisor: Bench) -> None:
    async with gvisor.child() as machine:
        await start_process(machine, "exec 3>'/odd name'; rm '/odd name'; while :; do sleep 1; done")
        await sh(machine, "while [ -e '/odd name' ]; do sleep 0.05; done")
        await prepare_capture(machine)
        directory = gvisor.capture_directory()
        with pytest.raises(Conflict, match="/odd name") as failed:
            await machine.capture(directory, memory=True)
        assert failed.value.fix
        assert not directory.exists()
        assert await machine.state() is MachineState.RUNNING
        capture = await machine.capture(directory, memory=False)
        assert len(capture.disk) == 1


async def test_a_stream_in_flight_does_not_spoil_the_image(gvisor: Bench) -> None:
    async with gvisor.child() as machine, Guest(machine.endpoint) as guest:
        async with guest.start(Command(("/bin/sh", "-c", "while :; do echo x; sleep 0.05; done"))) as process:
            await guest.detach()
            capture = await machine.capture(gvisor.capture_directory(), memory=True)
            with pytest.raises(SandboxDead):
                async for _ in process.events():
                    pass
        assert await sh(machine, "echo on") == "on"
    async with gvisor.child(gvisor.seed, capture) as machine:
        assert await sh(machine, "cat /seed") == "seed"


@pytest.mark.parametrize("network", ["bridge", "slot"])
async def test_connections_of_before_and_during_a_pause_do_not_spoil_the_image(
    gvisor: Bench, network: str, request: pytest.FixtureRequest
) -> None:
    start = (
        gvisor.child() if network == "bridge" else in_slot(gvisor, request.getfixturevalue("slot"), gvisor.seed)
    )
    endless = Command(("/bin/sh", "-c", "while :; do echo x; sleep 0.05; done"))
    async with start as machine, Guest(machine.endpoint) as before, before.start(endless):
        await sh(machine, "busybox httpd -p 127.0.0.1:8000 -h /")
        _, tunnel = await open_port(machine.endpoint, 8000, access_token=None)
        await machine.pause()
        async with Guest(machine.endpoint) as during:
            assert not await during.healthy(0.3)
            capture = await machine.capture(gvisor.capture_directory(), memory=True)
        assert await machine.state() is MachineState.PAUSED
        await machine.resume()
        assert await sh(machine, "echo on") == "on"
        tunnel.close()
    async with gvisor.child(gvisor.seed, capture) as machine:
        assert await sh(machine, "cat /seed") == "seed"
        reader, writer = await open_port(machine.endpoint, 8000, access_token=None)
        writer.write(b"GET /seed HTTP/1.0\r\n\r\n")
        assert (await reader.read()).endswith(b"seed\n")
        writer.close()


@pytest.mark.parametrize("network", ["bridge", "slot"])
async def test_connections_that_come_during_captures_do_not_spoil_an_image(
    gvisor: Bench, network: str, request: pytest.FixtureRequest
) -> None:
    async def knock(machine: Machine) -> None:
        while True:
            async with Guest(machine.endpoint) as guest:
                await guest.healthy(0.2)

    start = (
        gvisor.child() if network == "bridge" else in_slot(gvisor, request.getfixturevalue("slot"), gvisor.seed)
    )
    async with start as machine:
        knocking = [asyncio.create_task(knock(machine)) for _ in range(2)]
        captures = [await machine.capture(gvisor.capture_directory(), memory=True) for _ in range(3)]
        for task in knocking:
            task.cancel()
        await asyncio.gather(*knocking, return_exceptions=True)
    for capture in captures:
        async with gvisor.child(gvisor.seed, capture) as machine:
            assert await sh(machine, "cat /seed") == "seed"


async def test_a_broken_image_leaves_nothing(gvisor: Bench) -> None:
    for role, path in gvisor.seed.memory.items():
        spec = gvisor.restored()
        broken = spec.directory / "broken"
        broken.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
        with pytest.raises(BootFailed, match="memory snapshot") as failed:
            await gvisor.driver.restore(
                dataclasses.replace(spec, memory={**spec.memory, role: broken}, timeout_s=15.0)
            )
        assert "goroutine" not in failed.value.message  # runsc's reason, not its stacks
        await no_traces(spec.directory)


# --- limits and the end ----------------------------------------------------------------------------------------


async def test_its_own_kernel_has_memory_beside_the_guest_s(gvisor: Bench) -> None:
    """It grows by what comes and goes in the guest, which is told of its own memory alone."""
    async with gvisor.child() as machine:
        total_kib = int(await sh(machine, "busybox awk '/MemTotal/ {print $2}' /proc/meminfo"))
        assert total_kib <= MACHINE.memory_mib << 10
        name = "memory.max" if is_unified() else "memory.limit_in_bytes"
        (limit,) = (int((group / name).read_text()) for group in groups_of(machine) if (group / name).exists())
        assert limit >= (MACHINE.memory_mib + 166) << 20


def groups_of(machine: Machine) -> tuple[Path, ...]:
    return directories(name_of(machine.directory.absolute()))


async def test_out_of_memory_ends_the_sandbox_and_says_so(gvisor: Bench) -> None:
    spec = gvisor.restored()
    async with gvisor.running(spec) as machine:
        waiting = asyncio.create_task(machine.wait())
        with contextlib.suppress(AenvError):
            await sh(machine, "dd if=/dev/zero of=/dev/shm/x bs=1M count=600; sleep 60")
        assert "out of memory" in (await asyncio.wait_for(waiting, 30)).reason
        assert await machine.state() is MachineState.DEAD
    await no_traces(spec.directory)


async def test_too_many_processes_end_the_sandbox_and_it_says_so(gvisor: Bench) -> None:
    spec = gvisor.restored()
    async with gvisor.running(spec) as machine:
        (group,) = [path for path in directories(name_of(spec.directory)) if "pids" in str(path) or is_unified()]
        (group / "pids.max").write_text("150")
        waiting = asyncio.create_task(machine.wait())
        with pytest.raises(SandboxDead):
            await sh(machine, "i=0; while [ $i -lt 400 ]; do sleep 600 & i=$((i+1)); done; sleep 60")
        assert "too many processes" in (await asyncio.wait_for(waiting, 30)).reason
    await no_traces(spec.directory)


@contextlib.asynccontextmanager
async def on_a_full_disk(gvisor: Bench, place: Path) -> AsyncIterator[tuple[Machine, Path]]:
    """A machine that wrote more than its host had room for, and the file that takes the room."""
    with small_file_system(place, 24 << 20) as small:
        spec = dataclasses.replace(gvisor.restored(), directory=small / "machine")
        spec.directory.mkdir()
        async with gvisor.running(spec) as machine:
            await sh(machine, "sync")
            filler = fill(small)
            with contextlib.suppress(SandboxDead):  # as soon as it is noticed
                await sh(machine, "dd if=/dev/zero of=/big bs=1M count=20; sync; true")
            yield machine, filler
        await no_traces(spec.directory)


async def test_a_full_disk_of_the_host_ends_the_sandbox_and_it_says_so(gvisor: Bench, tmp_path: Path) -> None:
    async with on_a_full_disk(gvisor, tmp_path / "small") as (machine, _):
        assert "the host's disk is full" in (await asyncio.wait_for(machine.wait(), 30)).reason
        assert await machine.state() is MachineState.DEAD
        with pytest.raises(SandboxDead, match="the host's disk is full"):
            await machine.capture(gvisor.capture_directory(), memory=True)
    async with gvisor.child() as another:  # what was sealed is intact
        assert await sh(another, "cat /seed") == "seed"


@pytest.mark.parametrize("memory", [False, True])
async def test_nothing_is_captured_without_what_the_host_could_not_keep(
    gvisor: Bench, tmp_path: Path, memory: bool
) -> None:
    async with on_a_full_disk(gvisor, tmp_path / "small") as (machine, filler):
        filler.unlink()  # room again does not bring it back
        directory = gvisor.capture_directory()
        with pytest.raises(SandboxDead, match="what it wrote to its disk was lost"):
            await machine.capture(directory, memory=memory)
        assert not directory.exists()
        assert "what it wrote to its disk was lost" in (await asyncio.wait_for(machine.wait(), 30)).reason


async def test_killed_while_it_writes_nothing_is_left(gvisor: Bench) -> None:
    spec = gvisor.restored(ephemeral=False)
    machine = await gvisor.driver.restore(spec)
    await start_process(machine, "while :; do dd if=/dev/zero of=/x bs=1M count=40; sync; done 2>/dev/null")
    await asyncio.sleep(0.5)
    for pid in processes_in(spec.directory):  # everything at once, as a power cut of the node's own would
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert (await asyncio.wait_for(machine.wait(), 20)).reason
    await no_traces(spec.directory)
    assert await gvisor.driver.attach(spec.directory) is None


async def test_internet_without_a_network_is_refused(gvisor: Bench) -> None:
    spec = dataclasses.replace(gvisor.cold(), internet=True)
    with pytest.raises(Unsupported, match="network slot"):
        await gvisor.driver.boot(spec)
    assert list(spec.directory.iterdir()) == []


# --- network ---------------------------------------------------------------------------------------------------


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def slot() -> Iterator[NetworkSlot]:
    """A namespace with one end of a veth pair, the other on the host; the addresses are not set."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a network namespace needs root (run the tests as root) and ip(8) (make setup brings it)")
    number = next(NUMBERS)  # the kernel frees the names of a deleted namespace's links a moment later
    name, link = f"aenv-test-{os.getpid()}-{number}", f"aet{os.getpid() % 100000}x{number}"
    ip("netns", "add", name)
    try:
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("addr", "add", f"{SUBNET}.1/24", "dev", link)
        ip("link", "set", link, "up")
        yield NetworkSlot(
            "veth", Path("/proc/self/ns/net"), Path("/run/netns") / name, "eth0", "", f"{SUBNET}.2", f"{SUBNET}.1",
            DNS, f"{SUBNET}.2",
        )  # fmt: skip
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextlib.asynccontextmanager
async def in_slot(bench: Bench, slot: NetworkSlot, *captures: object) -> AsyncIterator[Machine]:
    spec = bench.cold() if not captures else bench.restored(*captures)  # type: ignore[arg-type]
    async with bench.running(dataclasses.replace(spec, network=slot, internet=True)) as machine:
        yield machine


async def test_a_slot_is_used_again_by_boot_and_restore(gvisor: Bench, slot: NetworkSlot) -> None:
    async with in_slot(gvisor, slot) as machine:
        assert machine.endpoint.host == slot.host_address
        await sh(machine, "echo net >/net")
        assert await sh(machine, "cat /etc/resolv.conf") == f"nameserver {slot.dns}"
        async with Guest(machine.endpoint) as guest, guest.start(Command(("/bin/sh", "-c", "sleep 600"))):
            await guest.detach()
            capture = await machine.capture(gvisor.capture_directory(), memory=True)
        assert await sh(machine, "echo on") == "on"
    for _ in range(2):
        async with in_slot(gvisor, slot, capture) as machine:
            assert await sh(machine, "cat /net") == "net"
    async with gvisor.running(gvisor.restored(capture)) as machine:  # without any network
        assert await sh(machine, "cat /net") == "net"


async def test_a_sandbox_keeps_no_namespace_of_others_alive(gvisor: Bench, slot: NetworkSlot) -> None:
    assert slot.guest_netns is not None
    links = list(Path("/sys/class/net").glob(f"aet{os.getpid() % 100000}x*"))
    async with gvisor.child():
        ip("netns", "del", slot.guest_netns.name)
        for _ in range(100):
            if not any(link.exists() for link in links):
                return
            await asyncio.sleep(0.02)
        pytest.fail("the deleted namespace lives on in the mounts of another sandbox")


# --- what machines are copied from -----------------------------------------------------------------------------


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


async def test_machines_outlive_what_they_are_copied_from(gvisor: Bench) -> None:
    lasting = gvisor.restored(ephemeral=False)
    machine = await gvisor.driver.restore(lasting)
    try:
        async with gvisor.child() as ephemeral:
            template = parent(parent(ephemeral.pid))  # beyond the process that waits for the supervisor
            assert b"gvisor_template" in Path(f"/proc/{template}/cmdline").read_bytes()
            os.kill(template, signal.SIGKILL)
            assert "its process ended" in (await asyncio.wait_for(ephemeral.wait(), 20)).reason
        assert await sh(machine, "cat /seed") == "seed"
        async with gvisor.child() as another:  # and there is a new one to copy
            assert await sh(another, "cat /seed") == "seed"
    finally:
        await machine.kill()
    await no_traces(lasting.directory)


async def test_a_version_of_which_nothing_is_known_works_too(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What we know of some versions saves time; with any other its commands are run one after another."""
    need_runsc()
    programs = tmp_path / "bin"
    programs.mkdir()
    runsc = programs / "runsc"
    lines = ("#!/bin/sh", '[ "$1" = --version ] && exec echo "runsc version of-tomorrow"')
    runsc.write_text("\n".join((*lines, f'exec {shutil.which("runsc")} "$@"', "")))
    runsc.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    bench = await make_bench(make_driver("gvisor", home), home, tmp_path, "gvisor-other")
    async with bench.child() as machine:
        assert (await bench.driver.facts(MACHINE)).vmm_version == "of-tomorrow"
        assert await sh(machine, "cat /seed") == "seed"
