"""Small files that survive a power cut, whole: temp, fsync, rename, fsync of the directory."""

from __future__ import annotations

import os
from pathlib import Path


def replace(path: Path, data: bytes) -> None:
    """Make ``data`` the content of ``path``, mode 0600. A crash leaves the old file or the new one.

    One writer at a time: the temporary name is ``path`` with ``.tmp``.
    """
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """fsync of a file, or of a directory's entries; never of what a link leads to."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
