"""What a test session may leave behind on the host: found before and after, named for people."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MARKER = "AENV_TEST_SESSION"
INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel
# These end with pytest itself.
OF_PYTEST = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
# So does this one, as a child of pytest's own: machines copied from it have the same command, but another parent.
OF_OTHERS = ("qemu-system", "runsc", "aenv_run.node", "-m pytest")
OF_DRIVERS = "aenv_run.drivers.gvisor_template"


@dataclass(frozen=True, order=True)
class Process:
    """A process that inherited a session's marker."""

    pid: int
    command: str

    def __str__(self) -> str:
        return f"process {self.pid}: {self.command}"

    def kill(self) -> None:
        """End it; it may be gone already."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def _others() -> Iterator[tuple[int, bytes, str]]:
    """(pid, environment, command line) of every other process that may be read and is not a zombie."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                yield int(entry.name), (entry / "environ").read_bytes(), command


def processes(session: str) -> set[Process]:
    """Those that descend from the session, whoever their parent is by now."""
    marker = f"{MARKER}={session}".encode()
    return {
        Process(pid, command[:200])
        for pid, environ, command in _others()
        if marker in environ.split(b"\0")
        and command
        and not any(name in command for name in OF_PYTEST)
        and not (OF_DRIVERS in command and _parent(pid) == os.getpid())
    }


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, ValueError):
        return 0


def others_work_here(session: str) -> bool:
    """True when another test session, or a machine that no session owns, runs on this host.

    A container cannot see who else works on the host, yet loop devices and perhaps /dev/shm are the host's.
    """
    if str(Path("/proc/self/ns/pid").readlink()) != INITIAL_PID_NAMESPACE:
        return True
    own = f"{MARKER}={session}".encode()
    return any(
        own not in environ.split(b"\0")
        and (f"{MARKER}=".encode() in environ or any(name in command for name in OF_OTHERS))
        for _, environ, command in _others()
    )


def _network_namespaces() -> set[str]:
    try:
        return {f"network namespace {entry.name}" for entry in Path("/run/netns").iterdir()}
    except OSError:
        return set()


def _mounts() -> set[str]:
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        return {
            f"mount {fields[4]} ({' '.join(fields[fields.index('-') + 1 :][:2])})"
            for fields in map(str.split, lines)
        }
    return set()


def _loop_devices() -> set[str]:
    found = set()
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            found.add(f"loop device {file.parts[3]} of {file.read_text().strip()}")
    return found


def _shared_memory() -> set[str]:
    try:
        return {f"shared memory {entry}" for entry in Path("/dev/shm").iterdir()}
    except OSError:
        return set()


def resources() -> set[str]:
    """Named network namespaces, mounts, loop devices and shared memory files of this host."""
    return _network_namespaces() | _mounts() | _loop_devices() | _shared_memory()
