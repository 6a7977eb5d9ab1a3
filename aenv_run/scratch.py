"""A scratch directory of a build or an import: removed at its end, or by the next if its process was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch(staging: Path) -> Iterator[Path]:
    """A new directory below ``staging``, known as alive by a flock(2) on it, which ends with the process."""
    staging.mkdir(mode=0o700, parents=True, exist_ok=True)
    _sweep(staging)
    directory, descriptor = _make(staging)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(descriptor)


def _make(staging: Path) -> tuple[Path, int]:
    while True:
        # Short names: a unix socket's path below has at most 107 bytes.
        directory = Path(tempfile.mkdtemp(prefix="b", dir=staging))
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # a sweeper was faster
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if directory.exists():  # else a sweeper took it for a dead one before the lock was ours
            return directory, descriptor
        os.close(descriptor)


def _sweep(staging: Path) -> None:
    """Remove what killed processes left: their locks are gone with them."""
    for directory in staging.iterdir():
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)
