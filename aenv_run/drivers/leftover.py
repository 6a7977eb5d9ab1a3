"""What an earlier process left running in a machine's directory, found without any record of it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path

from aenv_run.errors import AenvError
from aenv_run.process import KILL_WAIT_S


def end_engines(directory: Path) -> bool:
    """Blocking: end every engine that works in ``directory``; whether there was one.

    An engine is a process of this user, without a terminal, whose working directory it is: each driver starts its
    own there. Told by device and inode, so it does not matter how the path is written or in which mount namespace
    the engine lives. A person's shell that looks around in there has a terminal and is left alone.
    """
    try:
        place = directory.stat()
    except OSError:
        return False
    # In order: the first process of a pid namespace ends all others of it, and in the order that they need.
    found = [pid for pid in sorted(_pids()) if _works_in(pid, place)]
    ends = time.monotonic() + KILL_WAIT_S
    for pid in found:
        _end(pid, place, ends)
    return bool(found)


def _pids() -> list[int]:
    own = os.getpid()
    return [
        int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and int(entry.name) != own
    ]


def _works_in(pid: int, place: os.stat_result) -> bool:
    process = Path("/proc", str(pid))
    try:
        if process.stat().st_uid != os.geteuid() or not os.path.samestat((process / "cwd").stat(), place):
            return False
        terminal = (process / "stat").read_bytes().rpartition(b")")[2].split()[4]
    except (OSError, IndexError):
        return False
    return terminal == b"0"


def _end(pid: int, place: os.stat_result, ends: float) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if not _works_in(pid, place):
            return  # it has ended, or is another one by now
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(max(0.0, ends - time.monotonic()) * 1000):
            raise AenvError(f"process {pid} did not end {KILL_WAIT_S:.0f} s after SIGKILL")
    finally:
        os.close(descriptor)
