"""What the disk of a guest holds that writes into memory, told by a process of ours inside, while all others stop.

Standard library only: part of the supervisor.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence

from aenv_run.drivers import gvisor_sentry
from aenv_run.drivers.gvisor_children import Children

CALL_S, PACK_S = 60.0, 600.0
CHUNK_BYTES = 1 << 20
ALL_PROCESSES, ONE_PROCESS = 1, 0
MAX_STOPPED = 4096


class PackError(Exception):
    """The guest could not be stopped, or did not tell; it goes on."""


class Packer:
    """The steps of it, with one container."""

    def __init__(
        self, children: Children, execute: Sequence[str], kill: Sequence[str], container: str, control: str
    ) -> None:
        self._children, self._execute, self._kill = children, (*execute, container), tuple(kill)
        self._container, self._control = container, control

    def stopped(self, argv: Sequence[str]) -> list[int]:
        """Processes that somebody in the guest stopped: they stay so."""
        code, said = self._children.run([*self._execute, *argv], timeout_s=CALL_S)
        if code != 0:
            raise PackError(f"the guest's processes cannot be looked at (code {code}): {said[-500:]}")
        return [int(word) for word in said.split()[:MAX_STOPPED] if word.isdigit()]

    def stop(self) -> None:
        """Every process of the guest, at one instant. One that is started from outside later runs."""
        self._signal(signal.SIGSTOP, ALL_PROCESSES)

    def go_on(self, stopped: Sequence[int]) -> None:
        """Undo ``stop``, but for those that stood still before it."""
        self._signal(signal.SIGCONT, ALL_PROCESSES)
        for pid in stopped:
            self._signal(signal.SIGSTOP, ONE_PROCESS, pid)

    def _signal(self, number: signal.Signals, mode: int, pid: int = 0) -> None:
        argument: dict[str, str | int] = {"CID": self._container, "Signo": int(number), "PID": pid, "Mode": mode}
        if gvisor_sentry.call(self._control, "Signal", argument):
            return
        whom = ["-all", self._container] if mode == ALL_PROCESSES else ["-pid", str(pid), self._container]
        code, said = self._children.run([*self._kill, *whom, str(int(number))], timeout_s=CALL_S)
        if code != 0 and mode == ALL_PROCESSES:  # a single one may have ended
            raise PackError(f"runsc kill failed (code {code}): {said[-500:]}")

    def pack(self, argv: Sequence[str], target: str, limit_bytes: int) -> None:
        """Write what the guest tells into ``target``; PackError when it is more than the limit or too slow."""
        source, told = os.pipe2(os.O_CLOEXEC)
        log = os.memfd_create("said", os.MFD_CLOEXEC)
        empty = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        problem: list[str] = []
        try:
            pid = self._children.spawn([*self._execute, *argv], stdin=empty, stdout=told, stderr=log)
            os.close(told)
            pump = threading.Thread(target=_pump, args=(source, target, limit_bytes, problem), daemon=True)
            pump.start()
            code = self._children.wait(pid, PACK_S)
            if code is None:
                os.kill(pid, signal.SIGKILL)
                self._children.wait(pid, CALL_S)
                raise PackError(f"the guest did not tell what its disk holds in {PACK_S:g} s")
            pump.join(CALL_S)
            if problem or code != 0 or pump.is_alive():
                said = os.pread(log, 2000, 0).decode(errors="replace").strip()
                raise PackError(f"the guest did not tell what its disk holds: {' '.join(problem)} {said}")
        finally:
            os.close(log)
            os.close(empty)


def _pump(source: int, target: str, limit_bytes: int, problem: list[str]) -> None:
    """Copy to the end; what cannot be written is read all the same, so that the other side ends."""
    written = 0
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            while data := os.read(source, CHUNK_BYTES):
                written += len(data)
                if written > limit_bytes:
                    problem.append("it is more than its disk can hold (no space left)")
                    return
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
        finally:
            os.close(descriptor)
    except OSError as error:
        problem.append(os.strerror(error.errno or 0))
    finally:
        os.close(source)
