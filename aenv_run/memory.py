"""A machine's RAM on the host: which pages it wrote, and files made of those pages.

Every machine maps immutable files privately (a base, layers over it), so what it wrote is exactly the anonymous
pages of these mappings (measured, QEMU 10.0.2: pages that were only read stay file pages). Only x86-64 and arm64
with 4 KiB pages.
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
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from aenv_run.errors import AenvError, SandboxDead
from aenv_run.memory_layers import Piece, Run

PAGE = mmap.PAGESIZE
BUFFER_BYTES = 8 << 20
#: Where nothing is below, blocks of this size that are all zero are left as holes.
GRANULE = 16 << 10
#: struct pm_scan_arg, linux/fs.h (since 6.7): size, flags, start, end, walk_end, vec, vec_len, max_pages, masks.
PAGEMAP_SCAN = 0xC0606610
PAGE_IS_FILE, PAGE_IS_PRESENT, PAGE_IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
SCAN_ARGUMENT = struct.Struct("12Q")
SCAN_REGIONS = 16384
MADV_POPULATE_WRITE = 23  # since Linux 5.14
MAX_IOVECS = 1024  # IOV_MAX

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong
]  # fmt: skip
_libc.memcmp.restype = ctypes.c_int
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True)
class Mapping:
    """Where process ``pid`` has mapped its RAM."""

    pid: int
    start: int
    length: int


def find_mapping(pid: int, whole: Sequence[Piece]) -> Mapping:
    """Where ``pid`` has mapped exactly ``whole`` (see ``memory_layers.compose``), privately and in one stretch.

    Files are known by their inodes: a path may be renamed or linked.
    """
    inodes = {file: file.stat().st_ino for file in {piece.file for piece in whole}}
    expected = _joined((piece.offset, piece.length, inodes[piece.file], piece.file_offset) for piece in whole)
    found = _mapped(pid, set(inodes.values()))
    # The kernel may show one mapping as several neighbours (an madvise on a part splits it).
    start = found[0][0] if found else 0
    relative = _joined((low - start, size, inode, offset) for low, size, inode, offset in found)
    if relative != expected:
        raise AenvError(
            f"the RAM of process {pid} is not mapped as expected from {whole[0].file} and its layers: "
            f"{len(relative)} mappings instead of {len(expected)}"
        )
    return Mapping(pid, start, whole[-1].offset + whole[-1].length)


def _mapped(pid: int, inodes: Set[int]) -> list[tuple[int, int, int, int]]:
    """(address, length, inode, offset) of the private writable mappings of these files, by address."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError as error:
        raise SandboxDead(f"process {pid} is gone: {error.strerror}") from error
    found = []
    for line in lines:
        fields = line.split(maxsplit=5)
        if fields[1] == "rw-p" and fields[4] != "0" and int(fields[4]) in inodes:
            low, high = (int(part, 16) for part in fields[0].split("-"))
            found.append((low, high - low, int(fields[4]), int(fields[2], 16)))
    return found


def _joined(parts: Iterable[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """(offset, length, inode, file offset) with neighbours that continue each other made one."""
    result: list[tuple[int, int, int, int]] = []
    for offset, length, inode, file_offset in parts:
        if result:
            at, size, last, last_offset = result[-1]
            if (at + size, last, last_offset + size) == (offset, inode, file_offset):
                result[-1] = (at, size + length, inode, last_offset)
                continue
        result.append((offset, length, inode, file_offset))
    return result


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


def _scan(descriptor: int, mapping: Mapping, room: int = SCAN_REGIONS) -> list[Run]:
    """1-4 ms by the PAGEMAP_SCAN ioctl (measured); ``room`` is for how many regions at once.

    Where the walk ended is taken from the regions: with more than 512 of them, all that the kernel buffers,
    ``walk_end`` names a place before the last ones (measured, 6.18).
    """
    regions = array("Q", bytes(24 * room))
    address = regions.buffer_info()[0]
    runs: list[Run] = []
    at, end = mapping.start, mapping.start + mapping.length
    wanted = PAGE_IS_PRESENT | PAGE_IS_SWAPPED
    while at < end:
        # category_inverted, category_mask: not FILE; category_anyof_mask: present or swapped; return_mask
        argument = bytearray(
            SCAN_ARGUMENT.pack(
                SCAN_ARGUMENT.size, 0, at, end, 0, address, room, 0,
                PAGE_IS_FILE, PAGE_IS_FILE, wanted, wanted,
            )
        )  # fmt: skip
        count = fcntl.ioctl(descriptor, PAGEMAP_SCAN, argument, True)
        for index in range(0, 3 * count, 3):
            _append(runs, regions[index] - mapping.start, regions[index + 1] - mapping.start)
        if count < room:
            break
        at = regions[3 * count - 2]
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


class ReadyFile:
    """A new file whose first pages are there, mapped, before the machine is stopped: to fill them is one copy.

    Measured: 0.25 ms/MB before the stop and 0.25-0.7 in it, instead of 0.7-3 in it (a host that is itself virtual
    must first find the memory). ``close`` always, and not while the machine is stopped: it takes a while.
    """

    def __init__(self, path: Path, ready_bytes: int) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._pages: mmap.mmap | None = None
        self._start: ctypes.c_char | None = None
        try:
            os.ftruncate(self.descriptor, ready_bytes)
            pages = mmap.mmap(self.descriptor, ready_bytes)
            pages.madvise(MADV_POPULATE_WRITE)
        except (OSError, ValueError):
            return  # nothing wanted, an older kernel, or a full disk, which the first write will name
        self._pages, self._start = pages, ctypes.c_char.from_buffer(pages)

    def address(self, offset: int, length: int) -> int | None:
        """Where these bytes of the file are mapped, if they are."""
        if self._pages is None or self._start is None or offset + length > len(self._pages):
            return None
        return ctypes.addressof(self._start) + offset

    def close(self) -> None:
        """Idempotent."""
        if self.descriptor < 0:
            return
        self._start = None
        if self._pages is not None:
            self._pages.close()
        os.close(self.descriptor)
        self.descriptor = -1


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

    def stream(self, mapping: Mapping, runs: Sequence[Run], target: int) -> None:
        """Write each run at its offset into ``target``, a hole as large as the RAM: blocks of zeros stay holes."""
        with self._lock:
            for batch in _batches(runs):
                self._read(mapping, batch)
                at = 0
                for run in batch:
                    self._write_nonzero(target, at, run)
                    at += run.length

    def pack(self, mapping: Mapping, runs: Sequence[Run], target: ReadyFile) -> None:
        """Write the runs one after the other into ``target``, from its second page."""
        offset = PAGE
        with self._lock:
            for batch in _batches(runs):
                length = sum(run.length for run in batch)
                address = target.address(offset, length)
                if address is None or _read_into(mapping, batch, address, length) != length:
                    self._read(mapping, batch)
                    _write_all(target.descriptor, self._view[:length], offset)
                offset += length

    def _read(self, mapping: Mapping, batch: list[Run]) -> None:
        length = sum(run.length for run in batch)
        got = _read_into(mapping, batch, self._address, length)
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


def _read_into(mapping: Mapping, batch: list[Run], address: int, length: int) -> int:
    """What process_vm_readv(2) read of ``batch`` to ``address``: less than ``length``, or -1, is a failure."""
    local = array("Q", (address, length))
    remote = array("Q", (word for run in batch for word in (mapping.start + run.offset, run.length)))
    return int(
        _libc.process_vm_readv(mapping.pid, local.buffer_info()[0], 1, remote.buffer_info()[0], len(batch), 0)
    )


def _batches(runs: Sequence[Run]) -> Iterator[list[Run]]:
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
