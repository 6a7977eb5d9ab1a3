"""QEMU driven by hand: blocking sockets, no daemon client, no node. What the engine alone costs.

The virtual machine has the same shape as the product's (its command line is reused, or the device state would not
load), its network too: user networking, a forwarded port. All else is written out here: spawn, QMP, load.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from aenv_run import disk
from aenv_run.drivers import guest_image, qemu_command, qemu_ram
from aenv_run.drivers.protocol import BootSpec
from aenv_run.drivers.qemu_capture import overlay_name
from aenv_run.drivers.qemu_ram import Handover, RamImage
from aenv_run.memory_files import whole_of
from aenv_run.sandbox_tools import starts_at_once
from tests.perf.twin import TRUE, BareMachine, Machines, ask, milliseconds, run

Json = dict[str, object]


@dataclass(frozen=True)
class Engine:
    """What every bare machine is started from; ``ram`` and ``device_state`` are of the product's snapshot."""

    program: Path
    cpu: qemu_command.Cpu
    image: guest_image.GuestImage
    spec: BootSpec
    zero_ram: Path
    ram: Path
    device_state: Path
    preload: Path | None


@dataclass(eq=False)
class QemuMachine:
    """One QEMU process and its QMP connection."""

    machines: Machines
    process: subprocess.Popen[bytes]
    directory: Path
    qmp: socket.socket | None = None
    lines: BinaryIO = field(default_factory=io.BytesIO)
    port: int = 0
    restored: bool = False
    groups: tuple[Path, ...] = ()

    def connect(self) -> None:
        """Open its monitor, and ask where its daemon's port is forwarded."""
        where = os.open(self.directory, os.O_PATH)
        try:
            while True:
                self.machines.check()
                qmp = socket.socket(socket.AF_UNIX)
                try:
                    qmp.connect(f"/proc/self/fd/{where}/{qemu_command.QMP_SOCKET}")
                    break
                except OSError:
                    qmp.close()
                    if self.process.poll() is not None:
                        raise RuntimeError((self.directory / "log").read_text()) from None
                    time.sleep(0.001)
        finally:
            os.close(where)
        self.qmp, self.lines = qmp, qmp.makefile("rb")
        self.lines.readline()
        self.execute("qmp_capabilities")
        usernet = str(self.execute("human-monitor-command", **{"command-line": "info usernet"}))
        match = re.search(r"HOST_FORWARD\]\s+\d+\s+127\.0\.0\.1\s+(\d+)\s", usernet)
        assert match, usernet
        self.port = int(match.group(1))

    def execute(self, command: str, **arguments: object) -> object:
        """One QMP command; events are passed over."""
        assert self.qmp is not None
        self.qmp.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        while True:
            reply: Json = json.loads(self.lines.readline())
            if "return" in reply:
                return reply["return"]
            if "error" in reply:
                raise RuntimeError(f"{command}: {reply['error']}")

    def run(self, argv: Sequence[str] = TRUE) -> None:
        """Run a command through its daemon.

        A restored guest's processes stand still until one call gives it an identity, here an empty one.
        """
        address = ("127.0.0.1", self.port)
        if self.restored:
            ask(self.machines, address, "/init", b"{}", {"Content-Type": "application/json"}, 60.0)
            self.restored = False
        run(self.machines, address, argv)

    def engines(self) -> list[int]:
        """QEMU."""
        return [self.process.pid]

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        self.machines.remove(self)

    def tidy(self) -> None:
        """Close its monitor."""
        self.lines.close()
        if self.qmp is not None:
            self.qmp.close()


class QemuTwin:
    """See ``twin.Twin``."""

    notes = {  # noqa: RUF012 - of the class
        "machine": "QEMU by its monitor, with our command line and memory files; user networking in both",
        "pause": "stop the machine and write all of its RAM, which is what QEMU alone offers",
        "save": "stop the machine and write all of its RAM, which is what QEMU alone offers",
    }

    def __init__(self, engine: Engine, scratch: Path) -> None:
        self._engine, self._scratch = engine, scratch
        self._machines = Machines()
        self._numbers = itertools.count()
        self.pool = ThreadPoolExecutor(starts_at_once())

    def prepare(self) -> None:
        """Nothing: it restores the product's own files."""

    def make_ready(self, count: int) -> None:
        """Nothing."""

    def boot(self) -> QemuMachine:
        """Cold boot until the console says that the daemon listens."""
        engine = self._engine
        machine = self._spawn(
            engine.zero_ram, qemu_command.boot_arguments(engine.image.kernel, engine.image.initramfs, engine.cpu)
        )
        console = ""
        while "aenv-ready" not in console:
            self._machines.check()
            console += str(machine.execute("ringbuf-read", device="console", size=65536))
            time.sleep(0.005)
        return machine

    def restore(self) -> QemuMachine:
        """Load the device state over the RAM file and let it run."""
        machine = self._spawn(self._engine.ram, qemu_command.restore_arguments())
        machine.execute("migrate-incoming", uri=f"file:{self._engine.device_state}")
        while (status := machine.execute("query-status")) and isinstance(status, dict):
            if status["status"] != "inmigrate":
                break
            time.sleep(0.0005)
        machine.execute("cont")
        machine.restored = True
        return machine

    def save(self, machine: BareMachine) -> float:
        """What QEMU itself offers to save a machine: stop and migrate to a file."""
        assert isinstance(machine, QemuMachine)
        target = self._scratch / f"whole-{next(self._numbers)}"

        def write() -> None:
            machine.execute("stop")
            machine.execute("migrate", uri=f"file:{target}")
            while True:
                status = machine.execute("query-migrate")
                assert isinstance(status, dict)
                if status.get("status") in ("completed", "failed"):
                    assert status["status"] == "completed", status
                    break
                time.sleep(0.001)
            machine.execute("cont")

        try:
            return milliseconds(write)
        finally:
            target.unlink(missing_ok=True)

    def pause(self, machine: BareMachine) -> float:
        """Save it and end it."""
        return self.save(machine) + milliseconds(machine.end)

    def close(self) -> None:
        """End whatever runs."""
        self._machines.close(self.pool)

    def _spawn(self, ram: Path, arguments: list[str]) -> QemuMachine:
        with qemu_ram.handed_over(self._engine.preload, RamImage(ram), whole_of(ram, ())) as handover:
            return self._spawn_with(handover, arguments)

    def _spawn_with(self, ram: Handover, arguments: list[str]) -> QemuMachine:
        self._machines.check()
        engine = self._engine
        directory = self._scratch / f"bare-{next(self._numbers)}"
        directory.mkdir()
        overlay = Path(f"{overlay_name(1)}.qcow2")
        disk.write_overlay(directory / overlay, engine.spec.machine.disk_mib << 20)
        argv = qemu_command.common(
            engine.program,
            engine.spec,
            engine.spec.disk,
            engine.cpu,
            ram,
            overlay,
            overlay_name(1),
            (qemu_command.network(False),),
        )
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                [*argv, *arguments],
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=ram.descriptors,
                env=ram.variables or None,
            )
        machine = QemuMachine(self._machines, process, directory)
        self._machines.add(machine)
        machine.connect()
        return machine
