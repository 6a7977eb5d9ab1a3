"""The node's unix socket, bound and reached through its directory's descriptor.

A unix socket path holds 107 bytes and a home directory may be deeper: ``/proc/self/fd/N/node.sock`` never is.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A path of at most 40 bytes for a socket in a directory of any depth, valid inside the context."""
    descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


def listen(path: Path) -> socket.socket:
    """Bind and listen, mode 0600, replacing a dead node's socket. Hold the node lock."""
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(path) as short:
            old_mask = os.umask(0o177)
            try:
                server.bind(short)
            finally:
                os.umask(old_mask)
        server.listen(128)
        server.setblocking(False)
    except BaseException:
        server.close()
        raise
    return server


class FileLock:
    """``flock`` of a file; released by ``release`` or by the end of the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def acquire(self) -> bool:
        """Take it now; False when another process has it."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Let it go. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
