"""Room that a directory keeps for work that frees: on a full disk even a lock cannot be written.

``.reserve`` has a few small files. Whoever frees gives them up one by one when there is no room, and makes them
again when it ends. Nobody else uses them, so that they are there when they are needed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from aenv_run.errors import NoSpace
from aenv_run.store.posix_files import OPEN_DIRECTORY

RESERVE = ".reserve"
#: Each is a block and an inode: directories and small objects take one of both.
PIECES = 16
PIECE_BYTES = 4096

T = TypeVar("T")


@runtime_checkable
class KeepsRoom(Protocol):
    """A store that keeps room for work that frees."""

    def freeing(self) -> AbstractContextManager[None]:
        """Around such work in this thread: its small writes may use the room that is kept for it."""


def freeing(store: object) -> AbstractContextManager[None]:
    """Of any store; one that keeps no room is as it is."""
    return store.freeing() if isinstance(store, KeepsRoom) else nullcontext()


class Reserve:
    """Of the directory ``root``. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._here = threading.local()
        self._looked = False

    @contextmanager
    def freeing(self) -> Iterator[None]:
        """See ``KeepsRoom``."""
        depth: int = getattr(self._here, "depth", 0)
        self._here.depth = depth + 1
        try:
            yield
        finally:
            self._here.depth = depth
            if depth == 0 and self._root.is_dir():
                self._fill()

    def with_room(self, work: Callable[[], T]) -> T:
        """Do it; in work that frees, again with more room as long as there is none. It may be repeated."""
        while True:
            try:
                return work()
            except NoSpace:
                if not getattr(self._here, "depth", 0) or not self._give_up():
                    raise

    def ensure(self) -> None:
        """Begin to keep room, where nobody did."""
        if not self._looked:
            self._looked = True
            if not (self._root / RESERVE).exists():
                self._fill()

    def _fill(self) -> None:
        """As far as there is room now, and this user may."""
        with suppress(OSError), self._directory(create=True) as directory:
            for name in _names():
                _make(name, directory)

    def _give_up(self) -> bool:
        """One more block and inode for whoever is next; False when there is none left."""
        with suppress(OSError), self._directory(create=False) as directory:
            for name in reversed(_names()):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory)
                    with suppress(OSError):
                        os.fsync(directory)  # some file systems give back what is freed only then
                    return True
        return False

    @contextmanager
    def _directory(self, *, create: bool) -> Iterator[int]:
        root = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if create:
                with suppress(FileExistsError):
                    os.mkdir(RESERVE, 0o700, dir_fd=root)
            directory = os.open(RESERVE, OPEN_DIRECTORY, dir_fd=root)
        finally:
            os.close(root)
        try:
            yield directory
        finally:
            os.close(directory)


def _names() -> list[str]:
    return [f"{number:02}" for number in range(PIECES)]


def _make(name: str, directory: int) -> None:
    """Of bytes that no file system makes smaller."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, 0o600, dir_fd=directory)
    except FileExistsError:
        return
    try:
        written = os.write(fd, os.urandom(PIECE_BYTES))
    except OSError:
        written = 0
    finally:
        os.close(fd)
    if written < PIECE_BYTES:
        os.unlink(name, dir_fd=directory)
        raise OSError("no room")
