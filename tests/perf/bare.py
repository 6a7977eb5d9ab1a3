"""QEMU driven by hand: blocking sockets, no daemon client, no node. What the engine alone costs.

The virtual machine has the same shape as the product's (its command line is reused, or the device state would not
load). All else is written out here: spawn, QMP, load, and one command through the guest's daemon over plain HTTP.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import struct
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from aenv_run import disk
from aenv_run.drivers import guest_image, qemu_command
from aenv_run.drivers.protocol import BootSpec
from aenv_run.drivers.qemu_capture import overlay_name

Json = dict[str, object]
START_TRUE = json.dumps({"process": {"cmd": "/bin/true"}, "stdin": False}).encode()
STREAM = {"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"}


@dataclass(frozen=True)
class Engine:
    """What every bare machine is started from."""

    program: Path
    cpu: qemu_command.Cpu
    image: guest_image.GuestImage
    spec: BootSpec
    zero_ram: Path


@dataclass
class BareMachine:
    """One QEMU process and its QMP connection."""

    process: subprocess.Popen[bytes]
    directory: Path
    qmp: socket.socket
    lines: BinaryIO
    port: int = 0
    events: list[Json] = field(default_factory=list)

    def execute(self, command: str, **arguments: object) -> object:
        """One QMP command."""
        self.qmp.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        while True:
            reply: Json = json.loads(self.lines.readline())
            if "return" in reply:
                return reply["return"]
            if "error" in reply:
                raise RuntimeError(f"{command}: {reply['error']}")
            self.events.append(reply)

    def thaw(self) -> None:
        """The one call that lets a restored guest's processes go on: an identity, here an empty one."""
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            try:
                connection.request("POST", "/init", b"{}", {"Content-Type": "application/json"})
                connection.getresponse().read()
                return
            except OSError:
                time.sleep(0.002)
            finally:
                connection.close()

    def run_true(self) -> None:
        """``/bin/true`` through the daemon, from the connection to the end of its stream."""
        payload = struct.pack(">BI", 0, len(START_TRUE)) + START_TRUE
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            try:
                connection.request("POST", "/process.Process/Start", payload, STREAM)
                body = connection.getresponse().read()
            except OSError:
                time.sleep(0.002)
                continue
            finally:
                connection.close()
            if b'"end"' not in body:
                raise RuntimeError(f"the command did not run: {body[:300]!r}")
            return

    def kill(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        self.lines.close()
        self.qmp.close()


def spawn(engine: Engine, directory: Path, ram: Path, arguments: list[str]) -> BareMachine:
    """Start QEMU and open its monitor."""
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
            [*argv, *arguments], cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    where = os.open(directory, os.O_PATH)
    try:
        while True:
            qmp = socket.socket(socket.AF_UNIX)
            try:
                qmp.connect(f"/proc/self/fd/{where}/{qemu_command.QMP_SOCKET}")
                break
            except OSError:
                qmp.close()
                if process.poll() is not None:
                    raise RuntimeError((directory / "log").read_text()) from None
                time.sleep(0.001)
    finally:
        os.close(where)
    machine = BareMachine(process, directory, qmp, qmp.makefile("rb"))
    machine.lines.readline()
    machine.execute("qmp_capabilities")
    usernet = str(machine.execute("human-monitor-command", **{"command-line": "info usernet"}))
    match = re.search(r"HOST_FORWARD\]\s+\d+\s+127\.0\.0\.1\s+(\d+)\s", usernet)
    assert match, usernet
    machine.port = int(match.group(1))
    return machine


def boot(engine: Engine, directory: Path) -> BareMachine:
    """Cold boot until the console says that the daemon listens."""
    arguments = qemu_command.boot_arguments(engine.image.kernel, engine.image.initramfs, engine.cpu)
    machine = spawn(engine, directory, engine.zero_ram, arguments)
    console = ""
    while "aenv-ready" not in console:
        console += str(machine.execute("ringbuf-read", device="console", size=65536))
        time.sleep(0.005)
    return machine


def restore(engine: Engine, directory: Path, ram: Path, device_state: Path) -> BareMachine:
    """Load the device state over the RAM file and let it run."""
    machine = spawn(engine, directory, ram, qemu_command.restore_arguments())
    machine.execute("migrate-incoming", uri=f"file:{device_state}")
    while (status := machine.execute("query-status")) and isinstance(status, dict):
        if status["status"] != "inmigrate":
            break
        time.sleep(0.0005)
    machine.execute("cont")
    machine.thaw()
    return machine


def save_whole(machine: BareMachine, target: Path) -> float:
    """What QEMU itself offers to save a machine: stop and migrate to a file. Milliseconds it stood still."""
    start = time.perf_counter()
    machine.execute("stop")
    machine.execute("migrate", uri=f"file:{target}")
    while True:
        status = machine.execute("query-migrate")
        assert isinstance(status, dict)
        if status.get("status") in ("completed", "failed"):
            assert status["status"] == "completed", status
            return (time.perf_counter() - start) * 1000
        time.sleep(0.001)


def restore_many(
    engine: Engine, directories: list[Path], ram: Path, device_state: Path
) -> tuple[list[BareMachine], list[float]]:
    """Restore several at once, two at a time per CPU; and when each had run its first command (ms)."""
    start = time.perf_counter()

    def one(directory: Path) -> tuple[BareMachine, float]:
        machine = restore(engine, directory, ram, device_state)
        machine.run_true()
        return machine, (time.perf_counter() - start) * 1000

    with ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as pool:
        results = list(pool.map(one, directories))
    return [machine for machine, _ in results], [ms for _, ms in results]
