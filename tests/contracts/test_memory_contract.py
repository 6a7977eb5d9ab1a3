"""Memory in layers: generations add up, siblings share what they did not change, freed memory goes back.

Where a driver's images are whole each time, the same must come out; what is about sharing is asked by its Caps.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from pathlib import Path

import pytest

from aenv_run.capture import Capture
from aenv_run.digest import digest_file
from aenv_run.drivers.protocol import Machine
from aenv_run.errors import BootFailed, CorruptData, InvalidInput, RestoreIncompatible
from tests.contracts.machines import Bench, make_bench, prepare_capture, sh

MIB = 1 << 20
GENERATIONS = 10
#: Where each image is whole: nothing adds up.
FEW_GENERATIONS = 3
#: What a guest of this size writes by itself between a restore and a capture.
OVERHEAD_BYTES = 24 * MIB


def anonymous_bytes(machine: Machine) -> int:
    """What the engine holds that no file backs: the pages that its guest wrote, and its own."""
    text = Path(f"/proc/{machine.pid}/smaps_rollup").read_text()
    match = re.search(r"^Anonymous:\s+(\d+) kB", text, re.MULTILINE)
    assert match
    return int(match[1]) << 10


def added_bytes(capture: Capture) -> int:
    """The size of the memory files that a capture adds."""
    return sum(path.stat().st_size for path in capture.memory.values())


async def fill(machine: Machine, name: str, mib: int) -> str:
    """Random bytes in the guest's memory; their digest."""
    await sh(machine, f"dd if=/dev/urandom of=/dev/shm/{name} bs=1M count={mib} 2>/dev/null")
    return await sh(machine, f"busybox sha256sum </dev/shm/{name}")


async def capture(bench: Bench, machine: Machine) -> Capture:
    await prepare_capture(machine)
    return await machine.capture(bench.capture_directory(), memory=True)


@pytest.mark.long("gvisor-none")
async def test_generations_keep_memory_and_disk(bench: Bench) -> None:
    generations = GENERATIONS if bench.driver.caps.shares_memory else FEW_GENERATIONS
    line, digests = [bench.seed], {}
    for generation in range(1, generations + 1):
        async with bench.child(*line) as machine:
            # Something of its own, a page in the middle of what the first one wrote, and a file of each again.
            digests[generation] = await fill(machine, f"g{generation}", 1)
            await sh(
                machine,
                f"echo {generation} | dd of=/dev/shm/g1 bs=4096 seek={5 * generation} conv=notrunc 2>/dev/null;"
                f"echo {generation} >/dev/shm/last; cp /dev/shm/g{generation} /disk{generation}; sync",
            )
            digests[1] = await sh(machine, "busybox sha256sum </dev/shm/g1")
            line.append(await capture(bench, machine))
    spec = bench.restored(*line)
    async with bench.running(spec) as machine:
        for generation, digest in digests.items():
            assert await sh(machine, f"busybox sha256sum </dev/shm/g{generation}") == digest
            if generation > 1:
                assert await sh(machine, f"busybox sha256sum </disk{generation}") == digest
        assert await sh(machine, "cat /dev/shm/last") == str(generations)
    fewer = await bench.driver.merge_memory(spec.memory, bench.root / "merged", eager=True)
    assert (fewer is not None) == bench.driver.caps.shares_memory  # whole images stay as they are
    if fewer is not None:
        async with bench.running(dataclasses.replace(bench.restored(*line), memory=fewer)) as machine:
            said = await sh(machine, "busybox sha256sum </dev/shm/g1; cat /dev/shm/last")
            assert said == f"{digests[1]}\n{generations}"
            again = await capture(bench, machine)
        assert set(again.memory_below) == set(fewer) - {"device_state"}
        assert len(fewer) < 4


async def test_a_capture_adds_what_was_written_and_no_more(bench: Bench) -> None:
    if not bench.driver.caps.shares_memory:
        pytest.skip("its memory images are whole each time")
    async with bench.child() as machine:
        quiet = await capture(bench, machine)
        await fill(machine, "x", 20)
        busy = await capture(bench, machine)
    assert added_bytes(quiet) < OVERHEAD_BYTES
    assert 20 * MIB < added_bytes(busy) < 20 * MIB + OVERHEAD_BYTES
    assert set(quiet.memory_below) < set(bench.seed.memory)


@pytest.mark.long("gvisor-none")
async def test_a_parent_forks_twice_and_the_shared_files_stay(bench: Bench) -> None:
    shared = [*bench.seed.disk, *bench.seed.memory.values()]
    before = [digest_file(path) for path in shared]
    async with bench.child() as parent:
        one = await fill(parent, "one", 4)
        first = await capture(bench, parent)
        two = await fill(parent, "two", 4)
        await sh(parent, "rm /dev/shm/one")
        second = await capture(bench, parent)
        async with bench.child(bench.seed, first) as elder, bench.child(bench.seed, second) as younger:
            assert await sh(elder, "cd /dev/shm; busybox sha256sum <one; ls | busybox grep -c two || true") == (
                f"{one}\n0"
            )
            assert await sh(younger, "cd /dev/shm; busybox sha256sum <two; ls | busybox grep -c one || true") == (
                f"{two}\n0"
            )
            files = [*first.memory.values(), *second.memory.values()]
            layers = [digest_file(path) for path in files]
            await asyncio.gather(*(fill(one, "mine", 8) for one in (parent, elder, younger)))
            assert await sh(elder, "busybox sha256sum </dev/shm/one") == one
            assert await sh(younger, "busybox sha256sum </dev/shm/two") == two
        assert await sh(parent, "busybox sha256sum </dev/shm/two") == two
    assert [digest_file(path) for path in shared] == before
    assert [digest_file(path) for path in files] == layers


async def test_memory_that_the_guest_frees_goes_back_and_the_shared_files_stay(bench: Bench) -> None:
    if not bench.driver.caps.shares_memory:
        pytest.skip("this is about pages over a shared base")
    async with bench.child() as parent:
        kept = await fill(parent, "kept", 4)
        first = await capture(bench, parent)
    files = [*bench.seed.memory.values(), *first.memory.values()]
    before = [digest_file(path) for path in files]
    async with bench.child(bench.seed, first) as machine:
        start = anonymous_bytes(machine)
        await fill(machine, "x", 60)
        full = anonymous_bytes(machine)
        assert full > start + 60 * MIB
        await sh(machine, "rm /dev/shm/x")
        while anonymous_bytes(machine) > full - 40 * MIB:  # noqa: ASYNC110 - the guest reports in its own time
            await asyncio.sleep(0.2)
        # What the guest still has is as it was, and the pages that were given back can be used again.
        assert await sh(machine, "busybox sha256sum </dev/shm/kept") == kept
        again = await fill(machine, "y", 60)
        assert await sh(machine, "busybox sha256sum </dev/shm/y") == again
        second = await capture(bench, machine)
    assert [digest_file(path) for path in files] == before
    async with bench.child(bench.seed, first, second) as machine:
        assert (
            await sh(machine, "cd /dev/shm; busybox sha256sum <kept; busybox sha256sum <y") == f"{kept}\n{again}"
        )


# --- images that cannot be right -------------------------------------------------------------------------------


@pytest.fixture
def layered(bench: Bench) -> Bench:
    if not bench.driver.caps.shares_memory:
        pytest.skip("its memory images have no layers")
    return bench


async def test_a_damaged_or_missing_layer_is_refused_before_a_machine_is_touched(layered: Bench) -> None:
    async with layered.child() as machine:
        first = await capture(layered, machine)
    spec = layered.restored(layered.seed, first)
    (role,) = set(spec.memory) - set(layered.seed.memory)
    broken = spec.directory / "broken"
    broken.write_bytes(spec.memory[role].read_bytes()[:-8])
    with pytest.raises(CorruptData, match=str(broken)):
        await layered.driver.restore(dataclasses.replace(spec, memory={**spec.memory, role: broken}))
    with pytest.raises(InvalidInput, match=f"missing: .*{re.escape(role)}"):
        memory = {("ram.2" if name == role else name): path for name, path in spec.memory.items()}
        await layered.driver.restore(dataclasses.replace(spec, memory=memory))


def guest_without_library(bench: Bench, folder: Path) -> Path:
    """The guest directory but for the library that is preloaded."""
    folder.mkdir()
    for path in bench.home.guest().absolute().iterdir():
        if path.suffix != ".so":
            (folder / path.name).symlink_to(path)
    return folder


async def test_without_the_library_layers_are_made_one_file(
    layered: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AENV_GUEST_DIR", str(guest_without_library(layered, tmp_path / "guest")))
    with pytest.raises(RestoreIncompatible, match="devices"):
        await layered.driver.restore(layered.restored())
    (tmp_path / "machines").mkdir()
    own = await make_bench(layered.driver, layered.home, tmp_path / "machines", layered.name)
    async with own.child() as machine:
        digest = await fill(machine, "x", 2)
        first = await capture(own, machine)
    async with own.child(own.seed, first) as machine:
        assert await sh(machine, "busybox sha256sum </dev/shm/x") == digest
        await sh(machine, "echo second >/dev/shm/second")
        second = await capture(own, machine)
        assert added_bytes(second) < OVERHEAD_BYTES
    assert [role for role in second.memory if role.startswith("ram")] == ["ram.2"]
    async with own.child(own.seed, first, second) as machine:
        assert await sh(machine, "busybox sha256sum </dev/shm/x; cat /dev/shm/second") == f"{digest}\nsecond"


async def test_a_library_that_cannot_be_loaded_fails_loudly(
    layered: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest = guest_without_library(layered, tmp_path / "guest")
    for path in layered.home.guest().glob("*.so"):
        (guest / path.name).write_text("no library")
    monkeypatch.setenv("AENV_GUEST_DIR", str(guest))
    with pytest.raises(BootFailed, match="aenv-ram"):
        await layered.driver.restore(layered.restored())
