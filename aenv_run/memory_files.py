"""Copying RAM files: sparse, and layers merged into one or into a whole file. No machine is involved."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from aenv_run.errors import AenvError
from aenv_run.memory_layers import PAGE, Piece, coalesce, compose, finish_layer, read_layer, runs_above, slices

FICLONE = 0x40049409
BUFFER_BYTES = 8 << 20
#: A merge looks up after this much, so that it can be given up.
STEP_BYTES = 32 << 20


def copy_sparse(source: Path, target: Path) -> None:
    """Make ``target`` (new, writable) a copy of ``source`` that keeps its holes; a reflink where that works."""
    with source.open("rb") as reader, target.open("xb") as writer:
        from_fd, to_fd = reader.fileno(), writer.fileno()
        with contextlib.suppress(OSError):
            fcntl.ioctl(to_fd, FICLONE, from_fd)
            return
        os.ftruncate(to_fd, os.fstat(from_fd).st_size)
        for offset, length in data_ranges(from_fd):
            _copy_range(from_fd, to_fd, offset, offset, length)


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


def _copy_range(from_fd: int, to_fd: int, from_offset: int, to_offset: int, length: int) -> None:
    while length:
        try:
            copied = os.copy_file_range(from_fd, to_fd, length, from_offset, to_offset)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP):
                raise
            copied = os.pwrite(to_fd, os.pread(from_fd, min(length, BUFFER_BYTES), from_offset), to_offset)
        if copied == 0:
            raise AenvError("a RAM file became shorter while it was copied")
        from_offset += copied
        to_offset += copied
        length -= copied


def whole_of(base: Path, layers: Sequence[Path]) -> list[Piece]:
    """What the RAM of ``base`` and ``layers`` (oldest first) is made of."""
    size = base.stat().st_size
    return compose(base, size, [read_layer(path, size) for path in layers])


def flatten(base: Path, layers: Sequence[Path], target: Path) -> None:
    """Make ``target``, new and sealed, the whole RAM in one sparse file."""
    whole = whole_of(base, layers)
    copy_sparse(base, target)
    with ExitStack() as files:
        writer = files.enter_context(target.open("r+b")).fileno()
        readers = {path: files.enter_context(path.open("rb")).fileno() for path in layers}
        for piece in whole:
            if piece.file != base:
                _copy_range(readers[piece.file], writer, piece.file_offset, piece.offset, piece.length)
    target.chmod(0o444)


def merge(
    base: Path, layers: Sequence[Path], target: Path, step_bytes: int = STEP_BYTES
) -> Generator[None, None, None]:
    """Make ``target``, new and sealed, one layer that says what all ``layers`` say together.

    Yields after each ``step_bytes`` or more: whoever does not go on has a file that is no layer yet.
    """
    whole = whole_of(base, layers)
    runs = coalesce(runs_above(base, whole))
    with ExitStack() as files:
        writer = files.enter_context(target.open("xb")).fileno()
        readers = {path: files.enter_context(path.open("rb")).fileno() for path in (base, *layers)}
        at, pause_at = PAGE, PAGE + step_bytes
        for part in slices(whole, runs):
            _copy_range(readers[part.file], writer, part.file_offset, at, part.length)
            at += part.length
            if at >= pause_at:
                pause_at = at + step_bytes
                yield
        finish_layer(writer, base.stat().st_size, runs)
    target.chmod(0o444)
