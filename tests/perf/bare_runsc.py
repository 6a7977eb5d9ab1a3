"""runsc driven by hand: no supervisor, no storage daemon, no node. What the engine alone costs.

The container is the product's (its ``config.json`` and flags are reused), in a network namespace that is ready
before the clock starts, as the product's is from its pool. Its root is a plain overlayfs over an unpacked
directory. All of it lives in a mount and a network namespace of this twin's own threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from aenv_run.disk_mount import MS_RDONLY, mount
from aenv_run.drivers import gvisor_cgroup, gvisor_spec
from aenv_run.drivers.gvisor_supervisor import NET_SYSCTL
from aenv_run.drivers.protocol import NetworkSlot
from aenv_run.sandbox_tools import starts_at_once
from aenv_run.types import MachineSpec
from tests.perf.twin import TRUE, BareMachine, Machines, milliseconds, run

CLONE_FS, CLONE_NEWNS, CLONE_NEWNET = 0x200, 0x20000, 0x40000000
MNT_DETACH, MS_SLAVE_ALL = 2, 1 << 19 | 1 << 14
#: A first packet that is lost on the way to a sandbox that is not there yet is sent again after a second only.
PATIENCE_S = 0.05
GUEST_MAC = "52:54:00:ae:00:01"
END_S = 10.0
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Engine:
    """What every bare container is started from. ``tree`` is its root, unpacked."""

    argv: tuple[str, ...]
    envd: Path
    machine: MachineSpec
    tree: Path
    hide_net_sysctl: bool
    cgroups: bool


@dataclass
class Namespaces:
    """The mount and the network namespace of a twin's threads: the first makes them, the others join."""

    hide_net_sysctl: bool
    lock: threading.Lock = field(default_factory=threading.Lock)
    joined: tuple[int, int] | None = None

    def enter(self) -> None:
        """Move the calling thread there."""
        with self.lock:
            if self.joined is None:
                _call("unshare", _LIBC.unshare(CLONE_NEWNS | CLONE_NEWNET))
                mount("none", "/", "none", MS_SLAVE_ALL)
                mount("tmpfs", "/run/netns", "tmpfs")
                if self.hide_net_sysctl:  # or runsc takes its namespace for the host's
                    mount("tmpfs", NET_SYSCTL, "tmpfs", MS_RDONLY, "size=4k")
                here = Path("/proc/thread-self/ns")
                self.joined = (os.open(here / "mnt", os.O_RDONLY), os.open(here / "net", os.O_RDONLY))
                return
        _call("unshare", _LIBC.unshare(CLONE_FS))
        for descriptor in self.joined:
            _call("setns", _LIBC.setns(descriptor, 0))

    def close(self) -> None:
        """Let go of them: they end with the last thread."""
        for descriptor in self.joined or ():
            os.close(descriptor)


def _call(what: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _command(*argv: str, text: str = "") -> None:
    subprocess.run(argv, input=text, text=True, check=True, capture_output=True)


def make_slot(number: int) -> NetworkSlot:
    """A namespace with one end of a pair of links and the sandbox's address, ready for runsc to take over."""
    name, link, net = f"bare-{number}", f"bare-{number}", f"10.{200 + number // 250}.{number % 250}"
    slot = NetworkSlot(
        "veth", Path("/proc/self/ns/net"), Path("/run/netns") / name, "eth0", GUEST_MAC, f"{net}.2", f"{net}.1",
        f"{net}.1", f"{net}.2",
    )  # fmt: skip
    _command(
        "ip", "-batch", "-",
        text=f"netns add {name}\nlink add {link} type veth peer name eth0 address {GUEST_MAC} netns {name}\n"
        f"addr add {slot.gateway}/24 dev {link}\nlink set {link} up\n"
        # The host need not ask for the sandbox's address, which would be answered a second later only.
        f"neigh replace {slot.guest_address} lladdr {GUEST_MAC} nud permanent dev {link}\n",
    )  # fmt: skip
    _command("ip", "-n", name, "-batch", "-", text=gvisor_spec.addresses(slot))
    return slot


@dataclass(eq=False)
class RunscMachine:
    """One container: the sandbox's kernel (sentry) and the process that opens its files (gofer)."""

    machines: Machines
    name: str
    directory: Path
    slot: NetworkSlot
    groups: tuple[Path, ...]
    sentry: int = 0

    def run(self, argv: Sequence[str] = TRUE) -> None:
        """Run a command through its daemon."""
        run(self.machines, (self.slot.host_address, gvisor_spec.DAEMON_PORT), argv, PATIENCE_S)

    def engines(self) -> list[int]:
        """Every process of runsc for this container: its id is their last argument."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and (entry / "cmdline").read_bytes().endswith(f"\0{self.name}\0".encode()):
                    found.append(int(entry.name))
        return found

    def end(self) -> None:
        """Kill the sentry; its gofer and its guest's processes end with it."""
        if self.sentry:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(self.sentry)
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                select.select([descriptor], [], [], END_S)
                os.close(descriptor)
            self.sentry = 0
        self.machines.remove(self)

    def tidy(self) -> None:
        """Wait for its gofer; remove its mount, control groups and network namespace."""
        deadline_s = time.monotonic() + END_S
        while (left := self.engines()) and time.monotonic() < deadline_s:
            time.sleep(0.001)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        _LIBC.umount2(os.fsencode(self.directory / "root"), MNT_DETACH)
        gvisor_cgroup.remove(self.groups)
        assert self.slot.guest_netns is not None
        subprocess.run(["ip", "netns", "del", self.slot.guest_netns.name], check=False, capture_output=True)


class RunscTwin:
    """See ``twin.Twin``."""

    notes = {  # noqa: RUF012 - of the class
        "machine": "runsc run, restore of our bundle on plain overlayfs; its network namespace was there before",
        "pause": "runsc checkpoint, uncompressed, which ends the container",
        "save": "runsc pause, checkpoint -leave-running, resume",
    }

    def __init__(self, engine: Engine, scratch: Path) -> None:
        self._engine, self._scratch = engine, scratch
        self._machines = Machines()
        self._numbers = itertools.count(1)
        self._slots: deque[NetworkSlot] = deque()
        self._below = [engine.tree]
        self._image = scratch / "bare-image"
        self._state = scratch / "bare-state"
        self._namespaces = Namespaces(engine.hide_net_sysctl)
        self.pool = ThreadPoolExecutor(starts_at_once(), initializer=self._namespaces.enter)

    def prepare(self) -> None:
        """Boot one, checkpoint it: what it wrote is a layer of those that are restored from it."""
        self.make_ready(1)
        machine = self.boot()
        machine.run()
        self._checkpoint(machine, self._image)
        machine.end()
        machine.tidy()
        self._below.insert(0, machine.directory / "upper")

    def make_ready(self, count: int) -> None:
        """Network namespaces for ``count`` machines."""
        while len(self._slots) < count:
            self._slots.append(make_slot(next(self._numbers)))

    def boot(self) -> RunscMachine:
        """Mount its root, ``runsc run``."""
        return self._start("run")

    def restore(self) -> RunscMachine:
        """Mount its root, ``runsc restore``."""
        return self._start("restore", "-image-path", str(self._image))

    def save(self, machine: BareMachine) -> float:
        """See ``notes``."""
        assert isinstance(machine, RunscMachine)
        target = self._scratch / f"image-{next(self._numbers)}"

        def work() -> None:
            self._runsc("pause", machine.name)
            self._checkpoint(machine, target, "-leave-running")
            self._runsc("resume", machine.name)

        try:
            return milliseconds(work)
        finally:
            shutil.rmtree(target, ignore_errors=True)

    def pause(self, machine: BareMachine) -> float:
        """See ``notes``."""
        assert isinstance(machine, RunscMachine)
        target = self._scratch / f"image-{next(self._numbers)}"

        def work() -> None:
            self._checkpoint(machine, target)
            machine.end()

        try:
            return milliseconds(work)
        finally:
            shutil.rmtree(target, ignore_errors=True)

    def close(self) -> None:
        """End whatever runs."""
        self._machines.close(self.pool)
        self._namespaces.close()

    def _checkpoint(self, machine: RunscMachine, target: Path, *more: str) -> None:
        target.mkdir()
        self._runsc("checkpoint", "-image-path", str(target), "-compression", "none", *more, machine.name)

    def _runsc(self, *arguments: str) -> None:
        done = subprocess.run(
            [*self._engine.argv, "--root", str(self._state), *arguments], capture_output=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"runsc {arguments[0]}: {done.stderr.decode(errors='replace')[:1000]}")

    def _start(self, *how: str) -> RunscMachine:
        self._machines.check()
        engine, slot = self._engine, self._slots.popleft()
        assert slot.guest_netns is not None
        name = f"aenv-{slot.guest_netns.name}-{os.getpid()}"
        directory = self._scratch / name
        for part in ("root", "upper", "work"):
            (directory / part).mkdir(parents=True)
        below = ":".join(map(str, self._below))
        options = f"lowerdir={below},upperdir={directory}/upper,workdir={directory}/work"
        mount("overlay", str(directory / "root"), "overlay", 0, options)
        groups = gvisor_cgroup.directories(name) if engine.cgroups else ()
        path = gvisor_cgroup.spec_path(name) if engine.cgroups else None
        machine = RunscMachine(self._machines, name, directory, slot, groups)
        self._machines.add(machine)
        container = gvisor_spec.Container(engine.machine, directory / "root", engine.envd, slot, path)
        (directory / "config.json").write_text(json.dumps(gvisor_spec.describe(container)))
        pid_file = directory / "pid"
        argv = [*engine.argv, "--root", str(self._state), *how, "-detach", "-bundle", str(directory)]
        with (directory / "log").open("wb") as log:
            code = subprocess.run(
                [*argv, "-pid-file", str(pid_file), name], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                check=False,
            ).returncode  # fmt: skip
        if code != 0:
            raise RuntimeError(f"runsc {how[0]}: {(directory / 'log').read_text()[:1000]}")
        machine.sentry = int(pid_file.read_text())
        return machine
