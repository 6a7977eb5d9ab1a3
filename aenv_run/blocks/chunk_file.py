"""One blob's chunks in a sparse file of this node: no bitmap beside it, so that there is none that could be wrong.

What is a hole is not there. What is data is only a candidate when the file is opened: its digest is looked at
before its first use. So nothing that a kill, a crash of the machine, a torn write or a failing disk left behind is
ever believed, and no write has to be synced before the next one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from aenv_run.store.sparse import data_runs, write_at

_LIBC = ctypes.CDLL(None, use_errno=True)
_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01
_ABSENT, _CANDIDATE, _GOOD, _ZERO = range(4)
#: What is left free of the disk, for those who cannot do without: a tenth of it, at most so much.
MAX_RESERVE_BYTES = 1 << 30


class Table(Protocol):
    """Which chunks a blob has. ``aenv_run.chunks.ChunkTable`` is one."""

    @property
    def chunk_bytes(self) -> int:
        """The size of each chunk but the last."""

    @property
    def blob_bytes(self) -> int:
        """The size of the blob."""

    @property
    def count(self) -> int:
        """How many chunks there are."""

    def length(self, index: int) -> int:
        """The size of a chunk."""

    def is_zero(self, index: int) -> bool:
        """Whether the chunk is nothing but zeros."""

    def matches(self, index: int, data: bytes) -> bool:
        """Whether these are the bytes of the chunk."""


class ChunkFile:
    """Open from here to ``close``. Called by one thread at a time."""

    def __init__(self, path: Path, table: Table) -> None:
        """Open or make it; ``OSError`` when that cannot be done."""
        self.path, self.table = path, table
        self.count = table.count
        self._states = bytearray(self.count)
        self._fd = _open(path)
        #: A whole blob has another name in the cache of blobs: then it is only read.
        self.is_whole = False
        try:
            # A trim that cannot lock it leaves it alone (cache_limit.py).
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            found = os.fstat(self._fd)
            self.is_whole = not stat.S_IMODE(found.st_mode) & 0o200
            if found.st_size != table.blob_bytes:
                os.ftruncate(self._fd, 0)
                os.ftruncate(self._fd, table.blob_bytes)
            for index in range(self.count):
                if table.is_zero(index):
                    self._states[index] = _ZERO
            self._find_candidates()
            self._identity = self._identify()
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def descriptor(self) -> int:
        """Of the open file."""
        return self._fd

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def is_there(self) -> bool:
        """Whether it still has its name; of a whole one that is another's care."""
        try:
            return self.is_whole or os.path.samestat(self.path.lstat(), os.fstat(self._fd))
        except OSError:
            return False

    def length(self, index: int) -> int:
        """The size of a chunk."""
        return self.table.length(index)

    def look(self) -> None:
        """Once for each request, before ``has``: after a change of the file that was not ours nothing of it is
        believed before it is digested again."""
        if self._identify() != self._identity:
            self._suspect()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """``put`` and ``drop`` are called inside: one look before and one after all of them."""
        self.look()
        try:
            yield
        finally:
            self._identity = self._identify()

    def has(self, index: int) -> bool:
        """Whether the chunk is here and right. A candidate is digested now."""
        state = self._states[index]
        if state == _CANDIDATE:
            data = os.pread(self._fd, self.length(index), index * self.table.chunk_bytes)
            state = _GOOD if self.table.matches(index, data) else _ABSENT
            self._states[index] = state
        return state != _ABSENT

    def takes_space(self, index: int) -> bool:
        """Whether dropping the chunk would free something."""
        return not self.is_whole and self._states[index] in (_CANDIDATE, _GOOD)

    def stored(self) -> list[int]:
        """Chunks that take space."""
        return [index for index in range(self.count) if self.takes_space(index)]

    def missing(self) -> list[int]:
        """Chunks that are not here, as far as is known without a digest."""
        return [index for index in range(self.count) if self._states[index] == _ABSENT]

    def read(self, index: int, start: int, length: int) -> bytes:
        """A part of a chunk that ``has`` said is here."""
        if self._states[index] == _ZERO:
            return bytes(length)
        data = os.pread(self._fd, length, index * self.table.chunk_bytes + start)
        if len(data) != length:
            raise OSError(errno.EIO, f"{self.path} was cut while it was read")
        return data

    def put(self, index: int, data: bytes) -> bool:
        """Keep a chunk whose bytes were verified; False when this node has no room for it, or cannot write."""
        if self._states[index] in (_GOOD, _ZERO) or self.is_whole:
            return True
        try:
            free_bytes, wanted_bytes = _room(self._fd)
            if (wanted_bytes - free_bytes) * 2 > wanted_bytes:
                return False
            write_at(self._fd, data, index * self.table.chunk_bytes)
        except OSError:
            self._states[index] = _ABSENT  # a part of it may be there
            return False
        self._states[index] = _GOOD
        return True

    def drop(self, index: int) -> int:
        """Give its space back; how many bytes that were."""
        if not self.takes_space(index):
            return 0
        self._states[index] = _ABSENT
        length = self.length(index)
        start = index * self.table.chunk_bytes
        if _LIBC.fallocate(self._fd, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_long(start), ctypes.c_long(length)) != 0:
            return 0  # the file system has no holes: its bytes stay, and are not believed
        return length

    def _identify(self) -> tuple[int, int]:
        """Another one after a write of somebody else. Our own are followed by a new look."""
        found = os.fstat(self._fd)
        return found.st_size, found.st_mtime_ns

    def _suspect(self) -> None:
        """Somebody else wrote to the file or cut it: nothing of it is believed before it is digested again."""
        if not self.is_whole:
            os.ftruncate(self._fd, self.table.blob_bytes)
        for index, state in enumerate(self._states):
            if state == _GOOD:
                self._states[index] = _CANDIDATE
        self._identity = self._identify()

    def _find_candidates(self) -> None:
        size = self.table.chunk_bytes
        for start, end in data_runs(self._fd, self.table.blob_bytes, size):
            for index in range(start // size, -(-end // size)):
                if self._states[index] == _ABSENT:
                    self._states[index] = _CANDIDATE


def reserve_bytes(place: int | Path) -> int:
    """What the cache leaves free of the disk that ``place`` is on."""
    return _room(place)[1]


def lacking_bytes(place: int | Path) -> int:
    """How much of that is not free now."""
    free_bytes, wanted_bytes = _room(place)
    return max(0, wanted_bytes - free_bytes)


def _room(place: int | Path) -> tuple[int, int]:
    """What is free of that disk, and what should be, by one look: it is asked for every chunk that is kept."""
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize, min(MAX_RESERVE_BYTES, found.f_blocks * found.f_frsize // 10)


def _open(path: Path) -> int:
    flags = os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, os.O_RDWR | flags, 0o600)
    except PermissionError:  # whole, and we are not root
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
