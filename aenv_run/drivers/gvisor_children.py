"""Child processes of a sandbox's supervisor, which is process 1 of its namespace and must reap every orphan.

Standard library only, threads instead of asyncio: the supervisor starts with every sandbox (20 ms against 60).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

OUTPUT_BYTES = 65536


class Children:
    """All children; one thread reaps. They are registered under the lock it takes, so that no exit is lost."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._codes: dict[int, int | None] = {}
        self._watchers: dict[int, Callable[[int], None]] = {}

    def spawn(self, argv: Sequence[str], *, stdin: int, stdout: int, stderr: int) -> int:
        """Start ``argv`` in a session of its own; descriptors that are not inheritable stay here."""
        actions = [
            (os.POSIX_SPAWN_DUP2, descriptor, number) for number, descriptor in enumerate((stdin, stdout, stderr))
        ]
        with self._changed:
            pid = os.posix_spawnp(argv[0], list(argv), os.environ, file_actions=actions, setsid=True)
            self._codes[pid] = None
        return pid

    def start_reaping(self) -> None:
        """From here on there is a thread: what must be done by the whole process comes before."""
        threading.Thread(target=self._reap, daemon=True).start()

    def adopt(self, pid: int, ended: Callable[[int], None]) -> None:
        """Call ``ended(code)`` once the orphan ``pid``, now a child of this process, is gone."""
        with self._changed:
            self._watchers[pid] = ended
            alive = Path(f"/proc/{pid}").exists()
        if not alive:
            self._tell(pid, 0)

    def wait(self, pid: int, timeout_s: float) -> int | None:
        """The exit code of a spawned child (negative: a signal); None when it still runs at the time-out."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._codes.get(pid) is None:
                if pid not in self._codes or not self._changed.wait(deadline - time.monotonic()):
                    return None
            return self._codes.pop(pid)

    def run(self, argv: Sequence[str], *, timeout_s: float, text: str = "") -> tuple[int, str]:
        """Run to the end, with ``text`` to read: exit code and what it printed on both outputs.

        The code is -9, with a note, when it was too slow.
        """
        output, source = (os.memfd_create(name, os.MFD_CLOEXEC) for name in ("output", "input"))
        try:
            os.pwrite(source, text.encode(), 0)
            pid = self.spawn(argv, stdin=source, stdout=output, stderr=output)
            code = self.wait(pid, timeout_s)
            if code is None:
                os.kill(pid, 9)
                self.wait(pid, 5.0)
                return -9, f"{argv[0]} did not end in {timeout_s:g} s"
            return code, os.pread(output, OUTPUT_BYTES, 0).decode(errors="replace").strip()
        finally:
            os.close(source)
            os.close(output)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                time.sleep(0.05)  # only between two children of a machine that is being started
                continue
            code = os.waitstatus_to_exitcode(status)
            with self._changed:
                if pid in self._codes:
                    self._codes[pid] = code
                    self._changed.notify_all()
            self._tell(pid, code)

    def _tell(self, pid: int, code: int) -> None:
        with self._changed:
            watcher = self._watchers.pop(pid, None)
        if watcher is not None:
            watcher(code)
