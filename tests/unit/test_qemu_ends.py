"""What QEMU leaves and says when it ends, or when a capture of it is given up. No QEMU runs."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio

from aenv_run import process
from aenv_run.drivers.qemu_capture import Capturer, page_reader
from aenv_run.drivers.qemu_machine import LOG, how_it_ended, read_log
from aenv_run.drivers.qmp import Qmp
from aenv_run.errors import SandboxDead
from aenv_run.memory import PAGE, Mapping
from tests.bytes_half import FACTS

NO_PEER = "qemu-system-x86_64: warning: netdev unused has no peer"
DISCARDING = "qemu-system-x86_64: warning: Discarding RAM in private file mappings is possibly dangerous, because"
PAGES = 4096


@pytest.mark.parametrize(
    ("said", "signal", "reason"),
    [
        (
            [NO_PEER],
            "BUS",
            "its process ended by SIGBUS "
            "(a file that it maps became shorter, or the host ran out of memory for it)",
        ),
        ([NO_PEER, "qemu: it broke", DISCARDING], "SEGV", "its process ended by SIGSEGV: qemu: it broke"),
        ([], "KILL", "its process ended by SIGKILL"),
    ],
)
async def test_the_reason_says_what_a_signal_means_and_no_harmless_warning(
    tmp_path: Path, said: list[str], signal: str, reason: str
) -> None:
    words = "".join(f"echo '{line}' >&2; " for line in said)
    script = f"until [ -e {tmp_path}/go ]; do sleep 0.01; done; {words} kill -{signal} $$"
    child = await process.spawn(["sh", "-c", script], log=tmp_path / LOG, ephemeral=True, bounded=True)
    try:
        (tmp_path / "go").touch()  # spawn refuses one that has ended already
        await child.wait()
        assert how_it_ended(tmp_path, child) == reason
    finally:
        child.close()


def test_a_warning_of_another_device_stays(tmp_path: Path) -> None:
    (tmp_path / LOG).write_text(f"{NO_PEER}\nqemu-system-x86_64: warning: netdev n0 has no peer\n{DISCARDING}\n")
    assert read_log(tmp_path, process.Child(1, 0)) == "qemu-system-x86_64: warning: netdev n0 has no peer"


@pytest_asyncio.fixture
async def qmp() -> AsyncIterator[Qmp]:
    """A connection to a QEMU that is gone."""
    ours, other = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    made = Qmp(reader, writer)
    made.close()
    yield made
    other.close()


def opened() -> set[str]:
    """What this process has open."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            found.add(str(entry.readlink()))
    return found


@pytest.mark.parametrize("roles", [(), ("ram",)], ids=["whole", "layer"])
@pytest.mark.parametrize("cancels", [1, 2])
async def test_a_capture_that_is_cancelled_while_its_pages_are_made_leaves_nothing_open(
    tmp_path: Path, qmp: Qmp, roles: tuple[str, ...], cancels: int
) -> None:
    (tmp_path / "machine").mkdir()
    ram = mmap.mmap(-1, PAGES * PAGE)  # RAM of this very process
    for at in range(0, len(ram), PAGE):
        ram[at] = 1
    start = next(
        int(line.split("-")[0], 16)
        for line in Path("/proc/self/maps").read_text().splitlines()
        if int(line.split("-")[1].split()[0], 16) - int(line.split("-")[0], 16) == len(ram) and " rw-s " in line
    )
    page_reader()
    capturer = Capturer(
        directory=tmp_path / "machine", pid=os.getpid(), qmp=qmp, virtual_bytes=1 << 30,
        ram=Mapping(os.getpid(), start, len(ram)), ram_roles=roles, facts=FACTS, top=1,
    )  # fmt: skip
    for number in range(10):
        directory = tmp_path / f"capture-{number}"
        capturing = asyncio.create_task(
            capturer.capture(directory, memory=True, was_running=False, keep_running=False)
        )
        for _ in range(1 + number):  # at other moments: before the thread, in it, after it
            await asyncio.sleep(0)
        for _ in range(cancels):
            capturing.cancel()
            await asyncio.sleep(0)
        with pytest.raises((asyncio.CancelledError, SandboxDead)):  # dead: it came further than the pages
            await capturing
        assert not directory.exists()
    gc.collect()
    held = [path for path in opened() if "capture-" in path]
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "capture-" in line]
    assert not held and not mapped
    ram.close()
