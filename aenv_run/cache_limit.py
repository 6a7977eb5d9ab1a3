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
from typing import Literal

from aenv_run.errors import from_os
from aenv_run.types import Digest, Model

DEFAULT_LIMIT_BYTES = 20 << 30
#: Whoever asked for a path has this long to open it or to link it.
GRACE_S = 600.0
#: A temporary file that nobody holds and that is older was left by a process that is gone.
ABANDONED_S = 60.0
LOCK = "use.lock"
#: Where warm images are: directories, each of which goes as a whole.
WARM = "warm"
#: Where layers are that are read by range, as far as they are here; blocks/exports.py says what is in it.
PARTIAL = "partial"


class CacheUsage(Model):
    """``own_bytes`` are on disk for the cache alone; ``shared_bytes`` have another name elsewhere too."""

    blobs: int
    warm_images: int
    partial_blobs: int = 0
    partial_bytes: int = 0
    own_bytes: int
    shared_bytes: int


class Trimmed(Model):
    """How many blobs and warm images a trim removed, and what it left."""

    removed: int
    freed_bytes: int
    left: CacheUsage


@dataclass(frozen=True)
class _Entry:
    kind: Literal["blob", "warm", "partial"]
    path: Path
    mark: Path | None
    own_bytes: int
    shared_bytes: int
    used_s: float
    #: The name by which the block server still reads one that has become whole.
    served: Path | None = None

    def remove(self) -> bool:
        """False: it is in use after all."""
        if self.kind == "warm":
            shutil.rmtree(self.path, ignore_errors=True)
        elif self.kind == "blob":
            with suppress(FileNotFoundError):
                if self.served is not None and not _unlink_unlocked(self.served):
                    return False
            self.path.unlink(missing_ok=True)
        else:  # the block server locks those that it has open, and drops chunks of them by itself
            with suppress(FileNotFoundError):
                return _unlink_unlocked(self.path)
        if self.mark is not None:
            self.mark.unlink(missing_ok=True)
        return True


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

    What was asked for within ``grace_s`` stays, so the bound may be exceeded for so long; but for layers that are
    read by range, whose chunks can be had again at any moment. Processes may trim and use one cache at the same
    time. Also removes what a killed process left of a fetch, and what nobody reads by range any more.
    """
    removed = freed_bytes = 0
    with _errors(f"trimming the cache {root}"), alone(root):
        _remove_abandoned(root)
        _remove_unused_exports(root)
        _remove_whole(root)
        entries = list(_entries(root))
        own_bytes = _sum(entries).own_bytes
        newest_s = time.time() - grace_s
        for entry in sorted((entry for entry in entries if entry.own_bytes), key=lambda entry: entry.used_s):
            if own_bytes - freed_bytes <= limit_bytes:
                break
            if (entry.kind == "partial" or entry.used_s <= newest_s) and entry.remove():
                removed += 1
                freed_bytes += entry.own_bytes
        return Trimmed(removed=removed, freed_bytes=freed_bytes, left=usage(root))


def let_go(root: Path, digest: Digest, same: os.stat_result, unused_s: float, *, dry_run: bool = False) -> bool:
    """Drop the cache's name of that very file if nobody has asked the cache for it within ``unused_s``.

    Whether it was dropped, or with ``dry_run`` would be.
    """
    path = root / "blobs" / digest.hex[:2] / digest.hex
    mark = root / "verified" / digest.hex[:2] / digest.hex
    with alone(root), suppress(FileNotFoundError):
        if os.path.samestat(path.lstat(), same):
            with suppress(FileNotFoundError):
                if mark.stat().st_mtime > time.time() - unused_s:
                    return False
            if not dry_run:
                path.unlink()
                mark.unlink(missing_ok=True)
            return True
    return False


def _entries(root: Path) -> Iterator[_Entry]:
    served = _served_whole(root)
    for path in (root / "blobs").glob("*/*"):
        with suppress(FileNotFoundError):
            found = path.lstat()
            if stat.S_ISREG(found.st_mode):
                mark = root / "verified" / path.parent.name / path.name
                used_s = found.st_ctime
                with suppress(FileNotFoundError):
                    used_s = mark.stat().st_mtime
                name = served.get((found.st_dev, found.st_ino))
                yield _Entry("blob", path, mark, *_bytes([found], names=1 + (name is not None)), used_s, name)
    for path in (root / WARM).glob("*"):
        with suppress(FileNotFoundError):
            files = [one.lstat() for one in path.iterdir()]
            yield _Entry("warm", path, None, *_bytes(files), path.stat().st_mtime)
    for path in (root / PARTIAL).glob("*.data"):
        with suppress(FileNotFoundError):
            found = path.lstat()
            if found.st_nlink > 1:
                continue  # whole: a blob
            yield _Entry("partial", path, None, *_bytes([found]), max(found.st_atime, found.st_mtime))


def _served_whole(root: Path) -> dict[tuple[int, int], Path]:
    """Layers that are read by range although they have become whole, and have a name among the blobs."""
    found: dict[tuple[int, int], Path] = {}
    for path in (root / PARTIAL).glob("*.data"):
        with suppress(FileNotFoundError):
            one = path.lstat()
            if one.st_nlink > 1:
                found[one.st_dev, one.st_ino] = path
    return found


def _remove_whole(root: Path) -> None:
    """Their name here, once no block server has them open any more."""
    for path in _served_whole(root).values():
        with suppress(FileNotFoundError):
            _unlink_unlocked(path)


def _bytes(files: list[os.stat_result], *, names: int = 1) -> tuple[int, int]:
    """On disk for us alone, who have so many names of each, and with another name elsewhere."""
    own = sum(found.st_blocks * 512 for found in files if found.st_nlink <= names)
    return own, sum(found.st_blocks * 512 for found in files) - own


def _sum(entries: Iterator[_Entry] | list[_Entry]) -> CacheUsage:
    found = list(entries)
    partial = [entry for entry in found if entry.kind == "partial"]
    return CacheUsage(
        blobs=sum(entry.kind == "blob" for entry in found),
        warm_images=sum(entry.kind == "warm" for entry in found),
        partial_blobs=len(partial),
        partial_bytes=sum(entry.own_bytes for entry in partial),
        own_bytes=sum(entry.own_bytes for entry in found),
        shared_bytes=sum(entry.shared_bytes for entry in found),
    )


def _unlink_unlocked(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _remove_unused_exports(root: Path) -> None:
    """An export is kept by the hard links of those who use it; its table and its last trouble stay with it."""
    needed: set[str] = set()
    for path in (root / PARTIAL).glob("*.json"):
        with suppress(FileNotFoundError):
            found = path.lstat()
            if found.st_nlink > 1 or found.st_mtime > time.time() - GRACE_S:
                needed.add(path.name.rpartition(".")[0].rpartition(".")[0])
            elif path.name.count(".") > 1:
                path.unlink()
    for pattern in ("*.table", "*.trouble", "*.unread"):
        for path in (root / PARTIAL).glob(pattern):
            if path.stem not in needed and not path.with_suffix(".data").exists():
                path.unlink(missing_ok=True)


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
def _errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise from_os(error, what) from error


@contextmanager
def _locked(root: Path, kind: int) -> Iterator[None]:
    with _errors(f"locking the cache {root}"):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)
