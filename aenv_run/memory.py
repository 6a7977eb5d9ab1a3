"""A machine's RAM on the host: which pages it wrote, and a new RAM file made of its base and those pages.

Every machine maps an immutable RAM file privately, so what it wrote is exactly the anonymous pages of that
mapping (measured, QEMU 10.0.2: pages that were only read stay file pages). Only x86-64 and arm64 with 4 KiB pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
import threading
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aenv_run.errors import AenvError, SandboxDead

PAGE = mmap.PAGESIZE
BUFFER_BYTES = 8 << 20
#: Over a base of zeros, blocks of this size that are all zero are left as holes.
GRANULE = 16 << 10
FICLONE = 0x40049409
#: struct pm_scan_arg, linux/fs.h (since 6.7): size, flags, start, end, walk_end, vec, vec_len, max_pages, masks.
PAGEMAP_SCAN = 0xC0606610
PAGE_IS_FILE, PAGE_IS_PRESENT, PAGE_IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
SCAN_ARGUMENT = struct.Struct("12Q")
SCAN_REGIONS = 16384
MAX_IOVECS = 1024  # IOV_MAX

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong
]  # fmt: skip
_libc.memcmp.restype = ctypes.c_int
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True)
class Run:
    """``length`` bytes from ``offset`` of guest RAM, whole pages."""

    offset: int
    length: int


@dataclass(frozen=True)
class Mapping:
    """Where process ``pid`` has mapped the RAM file."""

    pid: int
    start: int
    length: int


def find_mapping(pid: int, base: Path) -> Mapping:
    """The private mapping of ``base`` in ``pid``, found by inode (a path may be renamed or linked)."""
    facts = base.stat()
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError as error:
        raise SandboxDead(f"process {pid} is gone: {error.strerror}") from error
    start = end = 0
    for line in lines:
        fields = line.split(maxsplit=5)
        if fields[4] != str(facts.st_ino) or not fields[1].startswith("rw-p"):
            continue
        low, high = (int(part, 16) for part in fields[0].split("-"))
        offset = int(fields[2], 16)
        # The kernel may show one mapping as several neighbours (an madvise on a part splits it).
        if offset == 0:
            start, end = low, high
        elif start and low == end and offset == low - start:
            end = high
    if not start or end - start != facts.st_size:
        raise AenvError(f"the RAM of process {pid} is not mapped as expected from {base}")
    return Mapping(pid, start, end - start)


def dirty_runs(mapping: Mapping) -> list[Run]:
    """The pages that the machine wrote since it was started, as runs. The machine must be stopped."""
    descriptor = os.open(f"/proc/{mapping.pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            return _scan(descriptor, mapping)
        except OSError as error:
            if error.errno not in (errno.ENOTTY, errno.EINVAL, errno.ENOSYS):
                raise
            return _parse_pagemap(descriptor, mapping)
    finally:
        os.close(descriptor)


def _scan(descriptor: int, mapping: Mapping) -> list[Run]:
    """1-4 ms by the PAGEMAP_SCAN ioctl (measured)."""
    regions = array("Q", bytes(24 * SCAN_REGIONS))
    address = regions.buffer_info()[0]
    runs: list[Run] = []
    at, end = mapping.start, mapping.start + mapping.length
    wanted = PAGE_IS_PRESENT | PAGE_IS_SWAPPED
    while at < end:
        # category_inverted, category_mask: not FILE; category_anyof_mask: present or swapped; return_mask
        argument = bytearray(
            SCAN_ARGUMENT.pack(
                SCAN_ARGUMENT.size, 0, at, end, 0, address, SCAN_REGIONS, 0,
                PAGE_IS_FILE, PAGE_IS_FILE, wanted, wanted,
            )
        )  # fmt: skip
        count = fcntl.ioctl(descriptor, PAGEMAP_SCAN, argument, True)
        for index in range(0, 3 * count, 3):
            _append(runs, regions[index] - mapping.start, regions[index + 1] - mapping.start)
        walked = SCAN_ARGUMENT.unpack(argument)[4]
        if walked <= at:
            raise AenvError("PAGEMAP_SCAN made no progress")
        at = walked
    return runs


def _append(runs: list[Run], low: int, high: int) -> None:
    """Add a region; neighbours (present beside swapped) become one run."""
    if runs and runs[-1].offset + runs[-1].length == low:
        low = runs.pop().offset
    runs.append(Run(low, high - low))


def _parse_pagemap(descriptor: int, mapping: Mapping) -> list[Run]:
    """The same from the entries of kernels before 6.7: bit 63 present, 62 swapped, 61 file page."""
    runs: list[Run] = []
    first, pages = mapping.start // PAGE, mapping.length // PAGE
    at = 0
    while at < pages:
        data = os.pread(descriptor, 8 * min(pages - at, 1 << 16), 8 * (first + at))
        if not data:
            raise SandboxDead(f"process {mapping.pid} is gone")
        entries = array("Q", data)
        for index, entry in enumerate(entries):
            if entry >> 61 in (0b100, 0b010, 0b110, 0b011, 0b111):
                _append(runs, (at + index) * PAGE, (at + index + 1) * PAGE)
        at += len(entries)
    return runs


def copy_sparse(source: Path, target: Path) -> None:
    """Make ``target`` (new, writable) a copy of ``source`` that keeps its holes; a reflink where that works."""
    with source.open("rb") as reader, target.open("xb") as writer:
        from_fd, to_fd = reader.fileno(), writer.fileno()
        with contextlib.suppress(OSError):
            fcntl.ioctl(to_fd, FICLONE, from_fd)
            return
        os.ftruncate(to_fd, os.fstat(from_fd).st_size)
        for offset, length in data_ranges(from_fd):
            _copy_range(from_fd, to_fd, offset, length)


def data_ranges(descriptor: int) -> Iterator[tuple[int, int]]:
    """Offsets and lengths of what a sparse file has; the rest are holes."""
    size = os.fstat(descriptor).st_size
    at = 0
    while at < size:
        try:
            start = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        at = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, at - start


def _copy_range(from_fd: int, to_fd: int, offset: int, length: int) -> None:
    while length:
        try:
            copied = os.copy_file_range(from_fd, to_fd, length, offset, offset)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP):
                raise
            copied = os.pwrite(to_fd, os.pread(from_fd, min(length, BUFFER_BYTES), offset), offset)
        if copied == 0:
            raise AenvError("a RAM file became shorter while it was copied")
        offset += copied
        length -= copied


class PageReader:
    """Streams a stopped machine's pages into a file through one buffer that is kept (huge pages, touched once).

    A fresh buffer per capture costs ten times the time of the copy itself (measured).
    """

    def __init__(self) -> None:
        self._buffer = mmap.mmap(-1, BUFFER_BYTES)
        with contextlib.suppress(OSError):
            self._buffer.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, BUFFER_BYTES, PAGE):
            self._buffer[at] = 0
        self._view = memoryview(self._buffer)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        self._zeros = ctypes.create_string_buffer(GRANULE)
        self._lock = threading.Lock()

    def stream(self, mapping: Mapping, runs: list[Run], target: int, *, skip_zeros: bool) -> int:
        """Write each run at its offset into the file descriptor ``target``; returns the bytes read."""
        total = 0
        with self._lock:
            for batch in _batches(runs):
                total += self._copy(mapping, batch, target, skip_zeros)
        return total

    def _copy(self, mapping: Mapping, batch: list[Run], target: int, skip_zeros: bool) -> int:
        self._read(mapping, batch)
        at = 0
        for run in batch:
            if skip_zeros:
                self._write_nonzero(target, at, run)
            else:
                _write_all(target, self._view[at : at + run.length], run.offset)
            at += run.length
        return at

    def _read(self, mapping: Mapping, batch: list[Run]) -> None:
        length = sum(run.length for run in batch)
        local = array("Q", (self._address, length))
        remote = array("Q", (word for run in batch for word in (mapping.start + run.offset, run.length)))
        got = _libc.process_vm_readv(
            mapping.pid, local.buffer_info()[0], 1, remote.buffer_info()[0], len(batch), 0
        )
        if got != length:
            number = ctypes.get_errno() if got < 0 else errno.EFAULT
            if number == errno.ESRCH:
                raise SandboxDead(f"process {mapping.pid} is gone")
            hint = "allow ptrace (kernel.yama.ptrace_scope=0) or run as root" if number == errno.EPERM else ""
            raise AenvError(f"cannot read the RAM of process {mapping.pid}: {os.strerror(number)}", fix=hint)

    def _write_nonzero(self, target: int, at: int, run: Run) -> None:
        start: int | None = None
        for offset in range(0, run.length, GRANULE):
            size = min(GRANULE, run.length - offset)
            if _libc.memcmp(self._address + at + offset, self._zeros, size):
                start = offset if start is None else start
            elif start is not None:
                _write_all(target, self._view[at + start : at + offset], run.offset + start)
                start = None
        if start is not None:
            _write_all(target, self._view[at + start : at + run.length], run.offset + start)


def _batches(runs: list[Run]) -> Iterator[list[Run]]:
    """Groups of runs that fit the buffer and one system call; a longer run is cut."""
    batch: list[Run] = []
    room = BUFFER_BYTES
    for run in runs:
        offset, left = run.offset, run.length
        while left:
            part = min(left, room)
            batch.append(Run(offset, part))
            offset, left, room = offset + part, left - part, room - part
            if room == 0 or len(batch) == MAX_IOVECS:
                yield batch
                batch, room = [], BUFFER_BYTES
    if batch:
        yield batch


def _write_all(target: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(target, view, offset)
        view, offset = view[written:], offset + written
