"""Keeping the cache of blobs within its bound: the least recently used goes, never what somebody else holds.

A blob that a sandbox uses has a second name in the sandbox's directory, and one that the repository keeps on the
same file system has its name there: dropping ours would free nothing. So only files with a single name count, and
only they go. The lock makes "is it there, and used just now" one step against "is it old, and gone".
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from aenv_run.types import Model

DEFAULT_LIMIT_BYTES = 20 << 30
#: Whoever asked for a path has this long to open it or to link it.
GRACE_S = 600.0
#: A temporary file that nobody holds and that is older was left by a process that is gone.
ABANDONED_S = 60.0
LOCK = "use.lock"
#: Where warm images are: directories, each of which goes as a whole.
WARM = "warm"


class CacheUsage(Model):
    """``own_bytes`` are on disk for the cache alone; ``shared_bytes`` have another name elsewhere too."""

    blobs: int
    warm_images: int
    own_bytes: int
    shared_bytes: int


class Trimmed(Model):
    """How many blobs and warm images a trim removed, and what it left."""

    removed: int
    freed_bytes: int
    left: CacheUsage


@dataclass(frozen=True)
class _Entry:
    path: Path
    mark: Path | None
    own_bytes: int
    shared_bytes: int
    used_s: float

    def remove(self) -> None:
        if self.mark is None:
            shutil.rmtree(self.path, ignore_errors=True)
            return
        self.path.unlink(missing_ok=True)
        self.mark.unlink(missing_ok=True)


@contextmanager
def in_use(root: Path) -> Iterator[None]:
    """Nothing is removed meanwhile. Short: others wait."""
    with _locked(root, fcntl.LOCK_SH):
        yield


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Nobody looks anything up meanwhile. Short: others wait."""
    with _locked(root, fcntl.LOCK_EX):
        yield


def usage(root: Path) -> CacheUsage:
    """What the cache at ``root`` takes on disk now."""
    return _sum(_entries(root))


def trim(root: Path, limit_bytes: int, *, grace_s: float = GRACE_S) -> Trimmed:
    """Remove the least recently used until what the cache alone keeps is at most ``limit_bytes``.

    What was asked for within ``grace_s`` stays, so the bound may be exceeded for so long. Processes may trim and
    use one cache at the same time. Also removes what a killed process left of a fetch.
    """
    removed = freed_bytes = 0
    with alone(root):
        _remove_abandoned(root)
        entries = list(_entries(root))
        own_bytes = _sum(entries).own_bytes
        newest_s = time.time() - grace_s
        for entry in sorted((entry for entry in entries if entry.own_bytes), key=lambda entry: entry.used_s):
            if own_bytes - freed_bytes <= limit_bytes or entry.used_s > newest_s:
                break
            entry.remove()
            removed += 1
            freed_bytes += entry.own_bytes
        return Trimmed(removed=removed, freed_bytes=freed_bytes, left=usage(root))


def _entries(root: Path) -> Iterator[_Entry]:
    for path in (root / "blobs").glob("*/*"):
        with suppress(FileNotFoundError):
            found = path.lstat()
            if stat.S_ISREG(found.st_mode):
                mark = root / "verified" / path.parent.name / path.name
                used_s = found.st_ctime
                with suppress(FileNotFoundError):
                    used_s = mark.stat().st_mtime
                yield _Entry(path, mark, *_bytes([found]), used_s)
    for path in (root / WARM).glob("*"):
        with suppress(FileNotFoundError):
            files = [one.lstat() for one in path.iterdir()]
            yield _Entry(path, None, *_bytes(files), path.stat().st_mtime)


def _bytes(files: list[os.stat_result]) -> tuple[int, int]:
    """On disk for us alone, and with another name elsewhere."""
    own = sum(found.st_blocks * 512 for found in files if found.st_nlink == 1)
    return own, sum(found.st_blocks * 512 for found in files) - own


def _sum(entries: Iterator[_Entry] | list[_Entry]) -> CacheUsage:
    blobs = images = own = shared = 0
    for entry in entries:
        blobs += entry.mark is not None
        images += entry.mark is None
        own += entry.own_bytes
        shared += entry.shared_bytes
    return CacheUsage(blobs=blobs, warm_images=images, own_bytes=own, shared_bytes=shared)


def _remove_abandoned(root: Path) -> None:
    """A fetch holds a lock on its temporary file for as long as it lives."""
    for path in (root / "tmp").glob("*"):
        with suppress(FileNotFoundError, BlockingIOError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_mtime < time.time() - ABANDONED_S:
                    path.unlink()
            finally:
                os.close(descriptor)


@contextmanager
def _locked(root: Path, kind: int) -> Iterator[None]:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)
