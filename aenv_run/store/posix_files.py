"""Pieces of the posix store that know files but not keys' meaning."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from aenv_run import durable
from aenv_run.errors import AenvError, InvalidInput, NoSpace, NotFound, StoreUnavailable
from aenv_run.store.protocol import StoreKey

OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: O_NONBLOCK: opening a FIFO that somebody put there must not hang; it means nothing for a regular file.
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def make_durable_directory(path: Path, mode: int = 0o700) -> None:
    """Create ``path`` and what is missing above it, each entry synced. Idempotent."""
    if path.is_dir():
        return
    make_durable_directory(path.parent)
    with suppress(FileExistsError):
        path.mkdir(mode)
    durable.sync(path.parent)


@contextmanager
def opened_source(source: Path) -> Iterator[int]:
    """The file that is to be stored: a regular one, not through a link."""
    try:
        fd = os.open(source, OPEN_FILE)
    except FileNotFoundError:
        raise NotFound(f"{source}, which is to be stored, does not exist") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise InvalidInput(f"{source}, which is to be stored, is a symbolic link or a socket") from None
        raise
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise InvalidInput(f"{source}, which is to be stored, is {kind_of(mode)}, not a regular file")
        yield fd
    finally:
        os.close(fd)


def link_descriptor(fd: int, name: str, directory: int) -> None:
    """Give the open file ``fd`` the name ``name`` in ``directory``; ``FileExistsError`` when it is taken.

    By descriptor, so that what was synced or digested is what gets the name. A directory descriptor is a
    must: without one Python calls link(2), which does not follow the link in /proc.
    """
    os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=directory, follow_symlinks=True)


def directory_rows(fd: int) -> list[tuple[str, os.stat_result]]:
    """Entries in the order in which their keys sort: a directory counts with its slash."""
    rows: list[tuple[str, os.stat_result]] = []
    with os.scandir(fd) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                rows.append((entry.name, entry.stat(follow_symlinks=False)))
    return sorted(rows, key=lambda row: row[0] + "/" if stat.S_ISDIR(row[1].st_mode) else row[0])


def as_key(path: str) -> StoreKey | None:
    """The key of that path; None when no key looks so."""
    try:
        return StoreKey(path)
    except InvalidInput:
        return None


def kind_of(mode: int) -> str:
    """The kind of a file in words."""
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFBLK: "a block device",
        stat.S_IFCHR: "a character device",
    }
    return kinds.get(stat.S_IFMT(mode), "a special file")


def typed_error(error: OSError, doing: str, place: Path) -> AenvError:
    """What a failed system call means to callers; ``place`` is where to help."""
    what = f"{doing}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(f"no space: {what}", fix=f"free space on the file system of {place}, then repeat")
    if error.errno == errno.ENOENT:
        return NotFound(what)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StoreUnavailable(what, fix=f"give this user the right to use {place}")
    return StoreUnavailable(what, fix="look at the kernel log for faults of that file system")
