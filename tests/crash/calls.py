"""A process stopped, or refused, at its n-th system call that changes files.

Python tells a profiler of every call of a C function, before and after it, so nothing of the code under test is
replaced and nothing in it knows of this: whatever module makes the call, it is counted.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

#: Those that change a file or a directory, or wait for a disk.
CHANGES = {
    os.write, os.pwrite, os.ftruncate, os.truncate, os.copy_file_range, os.sendfile, os.fsync, os.fdatasync,
    os.link, os.symlink, os.rename, os.replace, os.unlink, os.remove, os.mkdir, os.rmdir,
    os.chmod, os.fchmod, os.utime,
}  # fmt: skip
#: Those that a full disk refuses. Unlinking never needs room; of an open nothing tells whether it is to create.
NEEDS_ROOM = {
    os.write, os.pwrite, os.ftruncate, os.copy_file_range, os.fsync, os.link, os.rename, os.replace,
    os.mkdir,
}  # fmt: skip


class Calls:
    """Counts; ``reached`` is called just before call ``at`` is made."""

    def __init__(self, which: set[object], at: int | None, reached: Callable[[], None]) -> None:
        self.count = 0
        self._which, self._at, self._reached = which, at, reached

    def __call__(self, frame: FrameType, event: str, function: object) -> None:
        if event != "c_call" or not (self._is_one(function)):
            return
        self.count += 1
        if self.count == self._at:
            self._reached()

    def _is_one(self, function: object) -> bool:
        try:
            if function in self._which:
                return True
        except TypeError:  # a method of something that cannot be hashed
            return False
        name = getattr(function, "__name__", "")
        return name in ("write", "flush") and isinstance(getattr(function, "__self__", None), io.IOBase)


@contextmanager
def watched(
    which: set[object], at: int | None = None, reached: Callable[[], None] = lambda: None
) -> Iterator[Calls]:
    """Counts what this thread calls."""
    before, calls = sys.getprofile(), Calls(which, at, reached)
    sys.setprofile(calls)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def no_room() -> None:
    """What a full disk says."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def kill_self() -> None:
    """As ``kill -9``: nothing is tidied up."""
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at(at: int, act: Callable[[], object]) -> bool:
    """Run ``act`` in a process that is killed before its call ``at``; False: it came to its end before."""
    with in_process(lambda: _counted(at, act)) as pid:
        _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "it failed by itself, see standard error"
    return False


def _counted(at: int, act: Callable[[], object]) -> None:
    with watched(CHANGES, at, kill_self):
        act()


@contextmanager
def in_process(act: Callable[[], object]) -> Iterator[int]:
    """A copy of this process that runs ``act``; the caller waits for it or kills it."""
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            act()
            code = 0
        except BaseException:  # noqa: BLE001 - whatever it was, this copy goes no further
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    yield pid
