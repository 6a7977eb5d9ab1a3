"""What the machine tests share: a tiny image, a captured machine of each driver, commands in a guest."""

from __future__ import annotations

import itertools
import platform
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest

from aenv_run import disk, process
from aenv_run.capture import Capture
from aenv_run.drivers.gvisor import GvisorDriver
from aenv_run.drivers.gvisor_level import Level
from aenv_run.drivers.protocol import BootSpec, Driver, Machine, RestoreSpec
from aenv_run.drivers.qemu import QemuDriver
from aenv_run.guest import Command, Guest
from aenv_run.paths import Home
from aenv_run.types import MachineSpec

MACHINE = MachineSpec(cpus=1, memory_mib=256, disk_mib=256)
APPLETS = (
    "sh",
    "cat",
    "dd",
    "echo",
    "kill",
    "ls",
    "mkdir",
    "poweroff",
    "ps",
    "rm",
    "sleep",
    "sync",
    "touch",
    "true",
)
#: Counts in a shell variable (memory) and in a file (disk); USR1 writes the variable to /value.
COUNTER = "trap 'echo $i >/value' USR1; i=0; while :; do i=$((i+1)); echo $i >/counter; sleep 0.3; done"


#: Every driver, and every level at which one works without root; root in a test may use those as well.
DRIVERS = ("qemu", "gvisor", "gvisor-none")


def make_driver(name: str, home: Home) -> Driver:
    """The driver of one of ``DRIVERS``."""
    if name == "qemu":
        return QemuDriver(home)
    return GvisorDriver(home, Level.NONE if name == "gvisor-none" else Level.ROOT)


def make_tree(root: Path) -> Path:
    """A root file system that holds busybox and one user."""
    for name in ("bin", "dev", "etc", "proc", "root", "sys", "tmp"):
        (root / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    assert busybox, "the tests need busybox: apt install busybox-static"
    shutil.copy(busybox, root / "bin" / "busybox")
    for applet in APPLETS:
        (root / "bin" / applet).symlink_to("busybox")
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    return root


def need_runsc() -> None:
    """`make setup` installs it, but where the distribution has no such package: only there it may be absent.

    In a chroot it cannot run: the kernel refuses the user namespace that it makes. Only a real root helps.
    """
    if process.in_chroot(Path("/proc/self/mountinfo").read_text()):
        pytest.skip("gVisor cannot run in a chroot (the root directory is no mount point)")
    if shutil.which("runsc") is None:
        if platform.freedesktop_os_release().get("ID") == "ubuntu":
            pytest.skip("runsc is not installed, and this distribution has no package of it")
        pytest.fail("runsc, the engine of the gVisor driver, is not installed: run `make setup`", pytrace=False)


async def sh(machine: Machine, script: str) -> str:
    """What a shell script prints in the guest; it must succeed."""
    await let_go_on(machine)
    async with Guest(machine.endpoint) as guest:
        result = await guest.run(Command(("/bin/sh", "-c", script)), timeout_s=60.0)
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()


async def start_counter(machine: Machine) -> None:
    """Leave ``COUNTER`` running."""
    async with Guest(machine.endpoint) as guest, guest.start(Command(("/bin/sh", "-c", COUNTER), tag="counter")):
        pass


async def let_go_on(machine: Machine) -> None:
    """Its processes, which stand still since a detach; no token is set."""
    async with httpx.AsyncClient(base_url=machine.endpoint.url) as node:
        (await node.post("/init", json={}, timeout=60)).raise_for_status()


async def prepare_capture(machine: Machine) -> None:
    """What every caller does before a capture."""
    async with Guest(machine.endpoint) as guest:
        await guest.detach(sync=True)


def processes_in(directory: Path) -> list[int]:
    """Processes whose working directory is ``directory``: a machine's engine."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink() == directory:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@dataclass
class Bench:
    """One driver with a disk image, a captured machine, and machines that end with the test."""

    driver: Driver
    home: Home
    root: Path
    disk: tuple[Path, ...]
    seed: Capture
    name: str
    machine: MachineSpec = MACHINE
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def largest_memory_file(self) -> Path:
        """The one that holds the guest's pages."""
        return max(self.seed.memory.values(), key=lambda path: path.stat().st_size)

    @property
    def smallest_memory_role(self) -> str:
        """The one of which any byte counts."""
        return min(self.seed.memory, key=lambda role: self.seed.memory[role].stat().st_size)

    def directory(self) -> Path:
        """A new empty directory."""
        path = self.root / f"d{next(self.numbers)}"
        path.mkdir()
        return path

    def capture_directory(self) -> Path:
        """A path where nothing is yet."""
        return self.root / f"c{next(self.numbers)}"

    def cold(self, *captures: Capture) -> BootSpec:
        """A cold boot of the base and the disks of ``captures``."""
        layers = tuple(layer for capture in captures for layer in capture.disk)
        return BootSpec(self.machine, self.disk + layers, self.directory(), ephemeral=True, timeout_s=90.0)

    def restored(self, *captures: Capture, ephemeral: bool = True) -> RestoreSpec:
        """A restore of the last of a line of captures (each made of a machine restored from the one before)."""
        captures = captures or (self.seed,)
        layers = tuple(layer for capture in captures for layer in capture.disk)
        memory: dict[str, Path] = {}
        for capture in captures:
            memory = capture.whole_memory(memory, capture.memory)
        return RestoreSpec(
            self.machine, self.disk + layers, self.directory(), ephemeral=ephemeral,
            memory=memory, facts=captures[-1].facts,
        )  # fmt: skip

    @asynccontextmanager
    async def running(self, spec: BootSpec) -> AsyncIterator[Machine]:
        """The machine of ``spec``, killed at the end."""
        start: Callable[[], Awaitable[Machine]]
        if isinstance(spec, RestoreSpec):
            restore_spec = spec
            start = lambda: self.driver.restore(restore_spec)  # noqa: E731
        else:
            start = lambda: self.driver.boot(spec)  # noqa: E731
        machine = await start()
        try:
            yield machine
        finally:
            await machine.kill()

    @asynccontextmanager
    async def child(self, *captures: Capture) -> AsyncIterator[Machine]:
        """A machine restored from the seed, or from the last of ``captures``."""
        async with self.running(self.restored(*captures)) as machine:
            yield machine


async def make_bench(driver: Driver, home: Home, root: Path, name: str, spec: MachineSpec = MACHINE) -> Bench:
    """Make the image, boot it, start the counter, capture it."""
    image = root / "base.qcow2"
    await disk.make_image(make_tree(root / "tree"), spec.disk_mib, image)
    image.chmod(0o444)
    bench = Bench(driver, home, root, (image,), Capture(root), name, spec)
    async with bench.running(bench.cold()) as machine:
        await sh(machine, "echo seed >/seed")
        await start_counter(machine)
        await sh(machine, "while [ ! -s /counter ]; do sleep 0.1; done")
        await prepare_capture(machine)
        capture = await machine.capture(bench.capture_directory(), memory=True)
    return replace(bench, seed=capture)
