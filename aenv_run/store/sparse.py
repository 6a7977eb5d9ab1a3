"""Copies that keep holes: a disk layer or a RAM image is mostly holes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import BinaryIO

PIECE_BYTES = 1 << 20
PAGE_BYTES = 4096
_ZEROS = bytes(PIECE_BYTES)
_NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}


def copy_sparse(source_fd: int, target_fd: int) -> int:
    """Copy the whole of ``source_fd`` into the empty ``target_fd``, holes as holes; returns the size.

    The kernel copies where it can, which shares extents on file systems that reflink.
    """
    size = os.fstat(source_fd).st_size
    os.ftruncate(target_fd, size)
    for start, end in data_runs(source_fd, size):
        _copy_range(source_fd, target_fd, start, end)
    return size


def data_runs(fd: int, size_bytes: int, step_bytes: int = 1) -> Iterator[tuple[int, int]]:
    """Where the file has bytes: offsets from and to, in order, widened to whole steps."""
    end = 0
    while end < size_bytes:
        try:
            at = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole from here on
                return
            raise
        if at >= size_bytes:
            return
        start = at - at % step_bytes
        # Extents that lie in one step, or in neighbours, are one run.
        while at < size_bytes and (hole := os.lseek(fd, at, os.SEEK_HOLE)) != at:
            at = end = min(-(-hole // step_bytes) * step_bytes, size_bytes)
        yield start, end


def _copy_range(source_fd: int, target_fd: int, start: int, end: int) -> None:
    kernel_copies = True
    while start < end:
        length = min(end - start, 1 << 30 if kernel_copies else PIECE_BYTES)
        if kernel_copies:
            try:
                copied = os.copy_file_range(source_fd, target_fd, length, start, start)
            except OSError as error:
                if error.errno not in _NO_KERNEL_COPY:
                    raise
                kernel_copies = False
                continue
        else:
            data = os.pread(source_fd, length, start)
            write_at(target_fd, data, start)
            copied = len(data)
        if copied == 0:
            if not kernel_copies:
                return  # the source was cut while it was read; its digest will tell
            kernel_copies = False
        start += copied


def write_at(target_fd: int, data: bytes, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    view = memoryview(data)
    while view:
        written = os.pwrite(target_fd, view, offset)
        view, offset = view[written:], offset + written


def write_stream_sparse(source: BinaryIO, target_fd: int) -> int:
    """Write a stream into the empty ``target_fd``, pages of zeros as holes; returns the size."""
    size = 0
    while data := source.read(PIECE_BYTES):
        for start, end in _runs(data, size % PAGE_BYTES):
            write_at(target_fd, data[start:end], size + start)
        size += len(data)
    os.ftruncate(target_fd, size)
    return size


def _runs(data: bytes, skew: int) -> Iterator[tuple[int, int]]:
    """What is not zero of bytes that begin ``skew`` bytes into a page: from and to, in whole pages."""
    if _is_zero(data):
        return
    run: int | None = None
    for page in range(-skew, len(data), PAGE_BYTES):
        if _is_zero(data[max(page, 0) : page + PAGE_BYTES]):
            if run is not None:
                yield run, page
            run = None
        elif run is None:
            run = max(page, 0)
    if run is not None:
        yield run, len(data)


def _is_zero(data: bytes) -> bool:
    return data == (_ZEROS if len(data) == PIECE_BYTES else bytes(len(data)))
