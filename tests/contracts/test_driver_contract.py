"""What every driver promises (aenv_run/drivers/protocol.py). Capabilities are asked as data, never by name."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aenv_run import disk
from aenv_run.digest import digest_bytes, digest_file
from aenv_run.drivers.protocol import Machine, MachineState, RestoreSpec
from aenv_run.errors import (
    BootFailed,
    Conflict,
    CorruptData,
    InvalidInput,
    NoSpace,
    RestoreIncompatible,
    SandboxDead,
    Unsupported,
)
from aenv_run.guest import Command, Guest
from aenv_run.snapshot import MemoryFacts
from aenv_run.types import MachineSpec
from tests.contracts.machines import Bench, let_go_on, prepare_capture, processes_in, sh
from tests.small_file_system import small_file_system


async def counter_of(machine: Machine) -> tuple[int, int]:
    """The counter's value on disk, and in its process's memory at the same moment or one step later."""
    on_disk = await sh(machine, "p=$(cat /pid); kill -STOP $p; cat /counter; kill -USR1 $p; kill -CONT $p")
    in_memory = await sh(machine, "while [ ! -s /value ]; do sleep 0.05; done; cat /value; rm /value")
    return int(on_disk), int(in_memory)


async def find_counter(machine: Machine) -> None:
    async with Guest(machine.endpoint) as guest:
        (pid,) = [one.pid for one in await guest.processes() if one.tag == "counter"]
    await sh(machine, f"echo {pid} >/pid")


# --- restore ---------------------------------------------------------------------------------------------------


async def test_a_restored_machine_has_memory_and_disk_of_one_instant(bench: Bench) -> None:
    async with bench.child() as machine:
        assert await machine.state() is MachineState.RUNNING
        assert await sh(machine, "cat /seed") == "seed"
        await find_counter(machine)
        on_disk, in_memory = await counter_of(machine)
        assert on_disk <= in_memory <= on_disk + 2


async def test_children_do_not_see_each_other_and_leave_the_shared_files_alone(bench: Bench) -> None:
    files = (*bench.disk, *bench.seed.disk, *bench.seed.memory.values())
    before = [digest_file(path) for path in files]
    async with bench.child() as one, bench.child() as other:
        assert one.endpoint != other.endpoint
        await asyncio.gather(sh(one, "echo one >/mine; sync"), sh(other, "echo other >/mine; sync"))
        assert (await sh(one, "cat /mine"), await sh(other, "cat /mine")) == ("one", "other")
    async with bench.child() as third:
        assert "mine" not in (await sh(third, "ls /")).split()
    assert [digest_file(path) for path in files] == before


async def test_check_restore_names_every_fact_that_differs(bench: Bench) -> None:
    facts = bench.seed.facts
    assert facts is not None
    other: dict[str, object] = {name: f"other {name}" for name in MemoryFacts.model_fields}
    other |= {
        "mode": "ptrace" if facts.mode == "systrap" else "systrap",
        "kernel_digest": digest_bytes(b"k"),
        "envd_digest": digest_bytes(b"e"),
        "tsc_khz": 1,
    }
    spec = bench.restored()
    for name, value in other.items():
        changed = dataclasses.replace(spec, facts=facts.model_copy(update={name: value}))
        with pytest.raises(RestoreIncompatible, match=rf"\n  {name}: .*{value}"):
            await bench.driver.restore(changed)
    with pytest.raises(RestoreIncompatible) as all_of_them:
        await bench.driver.check_restore(dataclasses.replace(spec, facts=facts.model_copy(update=other)))
    assert all(f"  {name}: " in all_of_them.value.message for name in other)
    assert "cold" in all_of_them.value.fix
    assert processes_in(spec.directory) == []


async def test_a_restore_into_another_machine_is_refused(bench: Bench) -> None:
    spec = bench.restored()
    with pytest.raises(RestoreIncompatible, match=r"(?i)ram|memory="):
        await bench.driver.restore(dataclasses.replace(spec, machine=MachineSpec(memory_mib=512, disk_mib=256)))
    with pytest.raises(InvalidInput, match="256 MiB"):
        await bench.driver.restore(
            dataclasses.replace(spec, machine=bench.machine.model_copy(update={"disk_mib": 512}))
        )
    with pytest.raises(InvalidInput, match="|".join(bench.seed.memory)):
        await bench.driver.restore(dataclasses.replace(spec, memory={}))
    assert processes_in(spec.directory) == []


async def test_a_broken_memory_file_fails_and_leaves_no_process(bench: Bench) -> None:
    spec = bench.restored()
    broken = spec.directory / "broken"
    role = bench.smallest_memory_role
    content = bench.seed.memory[role].read_bytes()
    broken.write_bytes(content[: len(content) // 2])
    with pytest.raises(BootFailed, match="memory snapshot"):
        await bench.driver.restore(dataclasses.replace(spec, memory={**spec.memory, role: broken}, timeout_s=10.0))
    assert processes_in(spec.directory) == []


# --- life ------------------------------------------------------------------------------------------------------


async def test_pause_and_resume_are_idempotent(bench: Bench) -> None:
    async with bench.child() as machine:
        for _ in range(2):
            await machine.pause()
            assert await machine.state() is MachineState.PAUSED
        async with Guest(machine.endpoint) as guest:
            assert not await guest.healthy(0.3)
        for _ in range(2):
            await machine.resume()
            assert await machine.state() is MachineState.RUNNING
        assert await sh(machine, "cat /seed") == "seed"


async def test_a_dead_machine_says_so(bench: Bench) -> None:
    async with bench.child() as machine:
        waiting = asyncio.create_task(machine.wait())
        os.kill(machine.pid, signal.SIGKILL)
        assert "process ended" in (await asyncio.wait_for(waiting, 10)).reason
        assert await machine.state() is MachineState.DEAD
        for call in (machine.pause(), machine.resume(), machine.capture(bench.capture_directory(), memory=True)):
            with pytest.raises(SandboxDead):
                await call


async def test_a_guest_that_shuts_down_is_dead_and_its_engine_ends(bench: Bench) -> None:
    async with bench.child() as machine:
        with pytest.raises(SandboxDead):
            await asyncio.wait_for(
                sh(machine, "echo last words >/dev/console; poweroff -f || kill -9 $PPID; sleep 60"), 20
            )
        end = await asyncio.wait_for(machine.wait(), 20)
        assert "shut down" in end.reason
        assert "last words" in end.console
        assert processes_in(machine.directory) == []
        assert await machine.wait() == end


async def test_kill_is_idempotent_and_leaves_nothing(bench: Bench) -> None:
    spec = bench.restored()
    machine = await bench.driver.restore(spec)
    assert machine.pid in processes_in(spec.directory)
    for _ in range(2):
        await machine.kill()
    assert processes_in(spec.directory) == []
    assert await machine.state() is MachineState.DEAD
    assert await bench.driver.attach(spec.directory) is None
    again = await bench.driver.restore(dataclasses.replace(spec, directory=spec.directory))
    await again.kill()


async def test_a_directory_holds_one_living_machine(bench: Bench) -> None:
    spec = bench.restored()
    async with bench.running(spec) as machine:
        with pytest.raises(Conflict, match="lives"):
            await bench.driver.restore(spec)
        assert await sh(machine, "cat /seed") == "seed"


async def test_the_console_is_bounded_and_clean(bench: Bench) -> None:
    async with bench.child() as machine:
        await sh(
            machine,
            "echo start-of-flood >/dev/console; dd if=/dev/zero bs=1k count=100 2>/dev/null | cat >/dev/console",
        )
        await sh(
            machine,
            r"printf '\033[31mred\033[0m \007bell\n' 2>/dev/null >/dev/console || echo red bell >/dev/console",
        )
        text = await machine.console()
        assert len(text) <= 65536
        assert "start-of-flood" not in text
        assert all(character.isprintable() or character in "\n\t" for character in text)


# --- capture ---------------------------------------------------------------------------------------------------


@pytest.mark.long("gvisor-none")
async def test_capture_leaves_the_machine_running_and_generations_add_up(bench: Bench) -> None:
    line = [bench.seed]
    for generation in range(1, 4):
        async with bench.child(*line) as machine:
            await sh(
                machine,
                f"echo {generation} >/tmp/g{generation}; dd if=/dev/urandom of=/blob{generation} bs=64k count=16",
            )
            await prepare_capture(machine)
            capture = await machine.capture(bench.capture_directory(), memory=True)
            assert await machine.state() is MachineState.RUNNING
            assert await sh(machine, f"echo after >/after; cat /tmp/g{generation}") == str(generation)
        assert capture.stopped_ms > 0
        assert len(capture.disk) == 1
        line.append(capture)
    async with bench.child(*line) as machine:
        assert await sh(machine, "cat /tmp/g1 /tmp/g2 /tmp/g3") == "1\n2\n3"
        assert set((await sh(machine, "ls /")).split()) >= {"blob1", "blob2", "blob3"}
        assert "after" not in (await sh(machine, "ls /")).split()
        await find_counter(machine)
        on_disk, in_memory = await counter_of(machine)
        assert on_disk <= in_memory <= on_disk + 2


async def test_a_second_capture_has_the_layers_of_the_first(bench: Bench) -> None:
    async with bench.child() as machine:
        await sh(machine, "echo 1 >/first; sync")
        first = await machine.capture(bench.capture_directory(), memory=True)
        await sh(machine, "echo 2 >/second; sync")
        second = await machine.capture(bench.capture_directory(), memory=True, keep_running=False)
        assert await machine.state() is MachineState.PAUSED
        assert (len(first.disk), len(second.disk)) == (1, 2)
        assert first.disk[0].stat().st_ino == second.disk[0].stat().st_ino
        with pytest.raises(Conflict, match="exists"):
            await machine.capture(second.directory, memory=False)
        await machine.resume()
        # Its parent runs on and holds the same layers open: QEMU's image locks must let the child in.
        async with bench.child(bench.seed, first) as child:
            assert await sh(child, "cat /first") == "1"
            await asyncio.gather(sh(child, "echo c >/mine; sync"), sh(machine, "echo m >/mine; sync"))
            assert (await sh(child, "cat /mine"), await sh(machine, "cat /mine")) == ("c", "m")
            assert "second" not in (await sh(child, "ls /")).split()
        first.discard()
        assert not first.directory.exists()
    async with bench.child(bench.seed, second) as machine:
        assert await sh(machine, "cat /first /second") == "1\n2"


async def test_a_paused_machine_stays_paused(bench: Bench) -> None:
    async with bench.child() as machine:
        await machine.pause()
        capture = await machine.capture(bench.capture_directory(), memory=True)
        assert await machine.state() is MachineState.PAUSED
    async with bench.child(bench.seed, capture) as machine:
        assert await machine.state() is MachineState.RUNNING
        assert await sh(machine, "cat /seed") == "seed"


async def test_a_disk_alone_boots_cold(bench: Bench) -> None:
    async with bench.child() as machine:
        await sh(machine, "echo kept >/kept; sync")
        capture = await machine.capture(bench.capture_directory(), memory=False)
        assert (capture.memory, capture.facts) == ({}, None)
    async with bench.running(bench.cold(bench.seed, capture)) as machine:
        assert await sh(machine, "cat /seed /kept; ls /tmp") == "seed\nkept"
        async with Guest(machine.endpoint) as guest:
            assert [one for one in await guest.processes() if one.tag == "counter"] == []


async def test_captured_files_are_sealed(bench: Bench) -> None:
    for path in (*bench.seed.disk, *bench.seed.memory.values()):
        assert path.parent == bench.seed.directory
        assert path.stat().st_mode & 0o222 == 0
    assert bench.seed.facts == await bench.driver.facts(bench.machine)


@pytest.mark.parametrize("room_bytes", [1 << 20, 10 << 20], ids=["none", "some"])
async def test_a_full_disk_fails_a_capture_and_nothing_else(bench: Bench, tmp_path: Path, room_bytes: int) -> None:
    async with bench.child() as machine:
        await sh(machine, "dd if=/dev/urandom of=/dev/shm/x bs=1M count=20; echo 1 >/one")
        with small_file_system(tmp_path / "small", room_bytes) as small_disk:
            with pytest.raises(NoSpace, match="runs on"):
                await machine.capture(small_disk / "capture", memory=True)
            assert list(small_disk.iterdir()) == []
        assert await machine.state() is MachineState.RUNNING
        capture = await machine.capture(bench.capture_directory(), memory=True)
    async with bench.child(bench.seed, capture) as machine:
        assert await sh(machine, "cat /one") == "1"


# --- cancellation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.02, 0.04, 0.06, 0.1])
async def test_a_cancelled_restore_leaves_no_process(bench: Bench, delay_s: float) -> None:
    spec = bench.restored()
    task = asyncio.create_task(bench.driver.restore(spec))
    await asyncio.sleep(delay_s)
    task.cancel()
    try:
        machine = await task
    except asyncio.CancelledError:
        assert processes_in(spec.directory) == []
        assert await bench.driver.attach(spec.directory) is None
    else:
        await machine.kill()


async def test_a_cancelled_boot_leaves_no_process(bench: Bench) -> None:
    spec = bench.cold()
    task = asyncio.create_task(bench.driver.boot(spec))
    while not processes_in(spec.directory):  # noqa: ASYNC110 - another process, no event
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert processes_in(spec.directory) == []


async def test_a_cancelled_capture_leaves_the_machine_as_it_was(bench: Bench) -> None:
    async with bench.child() as machine:
        await sh(machine, "echo 1 >/one; sync")
        for delay_s in (0.0, 0.005, 0.02, 0.05):
            directory = bench.capture_directory()
            task = asyncio.create_task(machine.capture(directory, memory=True, keep_running=False))
            await asyncio.sleep(delay_s)
            if task.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:  # a fast host had finished it
                assert delay_s > 0
                (await task).discard()
                await machine.resume()
            assert not directory.exists()
            assert await machine.state() is MachineState.RUNNING
        capture = await machine.capture(bench.capture_directory(), memory=True)
    async with bench.child(bench.seed, capture) as machine:
        assert await sh(machine, "cat /one") == "1"


# --- boot that fails -------------------------------------------------------------------------------------------


async def test_a_boot_without_a_file_system_shows_the_console(bench: Bench) -> None:
    empty = bench.root / "empty.qcow2"
    disk.write_overlay(empty, bench.machine.disk_mib << 20)
    spec = dataclasses.replace(bench.cold(), disk=(empty,))
    said = r"(?s)init failed.*aenv-init: FAILED: .*/dev/vda|file system"
    with pytest.raises((BootFailed, CorruptData), match=said) as failed:
        await bench.driver.boot(spec)
    assert "\x1b" not in failed.value.message
    assert processes_in(spec.directory) == []


async def test_a_guest_that_panics_shows_the_console(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest = tmp_path / "guest"
    guest.mkdir()
    (guest / "kernel").symlink_to(bench.home.guest().absolute() / "kernel")
    for name in ("envd-amd64", "envd-arm64"):
        (guest / name).write_bytes(b"no program")
    monkeypatch.setenv("AENV_GUEST_DIR", str(guest))
    spec = bench.cold()
    with pytest.raises(BootFailed, match=r"(?s)shut down or rebooted.*Kernel panic|failed to load .*envd"):
        await bench.driver.boot(spec)
    assert processes_in(spec.directory) == []


async def test_a_layer_that_is_no_image_is_refused(bench: Bench) -> None:
    bad = bench.root / "bad.qcow2"
    bad.write_bytes(b"no image" * 100)
    with pytest.raises(CorruptData, match=r"bad\.qcow2"):
        await bench.driver.boot(dataclasses.replace(bench.cold(), disk=(bad,)))


# --- across processes ------------------------------------------------------------------------------------------


def start_elsewhere(bench: Bench, spec: RestoreSpec) -> int:
    """Restore ``spec`` in another process, which then ends; the engine's pid."""
    script = f"""
    import asyncio, pathlib
    from pathlib import PosixPath
    from aenv_run.drivers.protocol import RestoreSpec
    from aenv_run.paths import Home
    from aenv_run.snapshot import MemoryFacts
    from aenv_run.types import Digest, MachineSpec
    from tests.contracts.machines import make_driver

    async def main():
        driver = make_driver({bench.name!r}, Home(pathlib.Path({str(bench.home.root)!r})))
        facts = MemoryFacts.model_validate_json({spec.facts.model_dump_json() if spec.facts else ""!r})
        spec = RestoreSpec(
            MachineSpec(**{spec.machine.model_dump()!r}), {spec.disk!r}, {spec.directory!r},
            ephemeral={spec.ephemeral!r}, memory={spec.memory!r}, facts=facts,
        )
        print((await driver.restore(spec)).pid)

    asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


async def test_a_machine_outlives_its_starter_and_is_attached(bench: Bench) -> None:
    spec = bench.restored(ephemeral=False)
    pid = await asyncio.to_thread(start_elsewhere, bench, spec)
    machine = await bench.driver.attach(spec.directory)
    assert machine is not None
    try:
        assert machine.pid == pid
        assert await machine.state() is MachineState.RUNNING
        await sh(machine, "echo 1 >/one; sync")
        first = await machine.capture(bench.capture_directory(), memory=True)
        assert len(first.disk) == 1
        waiting = asyncio.create_task(machine.wait())
        await asyncio.sleep(0.05)
    finally:
        await machine.kill()
    assert (await asyncio.wait_for(waiting, 10)).reason == "it was killed"
    assert processes_in(spec.directory) == []


async def test_an_ephemeral_machine_ends_with_its_starter(bench: Bench) -> None:
    spec = bench.restored()
    await asyncio.to_thread(start_elsewhere, bench, spec)
    for _ in range(100):
        if not processes_in(spec.directory):
            break
        await asyncio.sleep(0.02)
    assert processes_in(spec.directory) == []
    assert await bench.driver.attach(spec.directory) is None


# --- the guest sees ---------------------------------------------------------------------------------------------


async def ask(machine: Machine, address: str, port: int) -> str:
    """What a guest's connection to ``address`` is answered, once it has said something."""
    await let_go_on(machine)
    async with Guest(machine.endpoint) as guest:
        command = f"echo question | busybox nc -w 3 {address} {port}"
        return (await guest.run(Command(("/bin/sh", "-c", command)), timeout_s=30.0)).stdout.decode()


@contextlib.asynccontextmanager
async def listener() -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server on the host's loopback that answers; its port, and what it was told."""
    told: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        told.append(await reader.readline())
        writer.write(b"answer\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], told


DAEMON_PORT = 49983
#: The host, as a guest of user networking sees it, and as it would if it shared the host's loopback.
HOST_ADDRESSES = ("10.0.2.2", "127.0.0.1")


async def test_without_internet_the_guest_reaches_nothing_of_the_host(bench: Bench) -> None:
    async with listener() as (port, told), bench.child() as machine:
        for address in HOST_ADDRESSES:
            assert await ask(machine, address, port) == ""
        assert told == []
        # The same way of asking does get through to who may be asked: the guest's own daemon.
        assert "400 Bad Request" in await ask(machine, "127.0.0.1", DAEMON_PORT)


async def test_with_internet_of_its_own_the_same_question_is_answered(bench: Bench) -> None:
    """The control of the test above. A driver without a way out of its own says so."""
    spec = dataclasses.replace(bench.restored(), internet=True)
    async with listener() as (port, told):
        try:
            async with bench.running(spec) as machine:
                assert await ask(machine, "10.0.2.2", port) == "answer\n"
        except Unsupported:
            assert processes_in(spec.directory) == []
            return
        assert told == [b"question\n"]
