"""A store in a directory of a local (or cluster) file system: the key is the relative path.

Every path is opened part by part and never through a symbolic link, so that a repository written by somebody
else cannot lead a reader or a writer out of its directory. Writes go to ``.tmp`` (no key starts with a dot),
are synced, get their name by link(2), which fails when the name is taken, and then the directory is synced.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from aenv_run.errors import Conflict, CorruptData, InvalidInput, NotFound
from aenv_run.store.posix_files import (
    OPEN_DIRECTORY,
    OPEN_FILE,
    as_key,
    directory_rows,
    kind_of,
    link_descriptor,
    make_durable_directory,
    opened_source,
    typed_error,
)
from aenv_run.store.protocol import KeyInfo, StoreKey, Stray
from aenv_run.store.reserve import RESERVE, Reserve
from aenv_run.store.sparse import copy_sparse, write_at

_TEMPORARY = ".tmp"
_LOCK = ".lock"
_ASIDE = ".aside"
_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.EROFS}
_MAX_DEPTH = 16


class PosixStore:
    """See ``Store``. The directory is created, private to its owner, at the first write."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._durable: set[tuple[str, ...]] = set()  # directories whose own entry this process has synced
        self._reserve = Reserve(self.root)

    def __repr__(self) -> str:
        return f"PosixStore({str(self.root)!r})"

    @property
    def conditional(self) -> bool:
        """See ``Store``."""
        return True

    def freeing(self) -> AbstractContextManager[None]:
        """See ``KeepsRoom``."""
        return self._reserve.freeing()

    # Writing

    def require_writable(self) -> None:
        """See ``Store``. Only a write could tell, and each says so itself."""

    def put_file(self, key: StoreKey, source: Path, *, consume: bool = False) -> bool:
        """See ``Store``. With ``consume`` on the same file system the file itself becomes the object."""
        return self._reserve.with_room(lambda: self._put_file(key, source, consume=consume))

    def _put_file(self, key: StoreKey, source: Path, *, consume: bool) -> bool:
        with self._errors("storing", key), opened_source(source) as fd:
            if consume and (created := self._adopt(fd, key)) is not None:
                return created
            if self.stat(key) is not None:
                self._sync_parent(key)
                return False
            with self._temporary() as (_, temporary_fd):
                copy_sparse(fd, temporary_fd)
                return self._seal(temporary_fd, key)

    def put_new(self, key: StoreKey, data: bytes) -> bool:
        """See ``Store``."""
        return self._reserve.with_room(lambda: self._put_new(key, data))

    def _put_new(self, key: StoreKey, data: bytes) -> bool:
        with self._errors("storing", key):
            if self.stat(key) is not None:
                self._sync_parent(key)
                return False
            with self._temporary() as (_, fd):
                write_at(fd, data, 0)
                return self._seal(fd, key)

    def swap(self, key: StoreKey, data: bytes, *, expected: bytes | None) -> bool:
        """See ``Store``. Exclusive by a lock file for swaps and deletes, by link(2) against ``put_new``."""
        return self._reserve.with_room(lambda: self._swap(key, data, expected=expected))

    def _swap(self, key: StoreKey, data: bytes, *, expected: bytes | None) -> bool:
        if expected is None:
            return self.put_new(key, data)
        with self._errors("writing", key), self._locked():
            try:
                present = self.read(key, limit_bytes=len(expected))
            except (NotFound, CorruptData):
                # Longer than expected, gone, or no file: not what the caller saw. A damaged key is for check.
                return False
            if present != expected:
                return False
            *parents, name = key.split("/")
            with self._temporary() as (temporary_name, fd), self._directory(parents, create=True) as directory:
                write_at(fd, data, 0)
                os.fchmod(fd, 0o444)
                os.fsync(fd)
                with self._directory((_TEMPORARY,), create=True) as temporary:
                    os.rename(temporary_name, name, src_dir_fd=temporary, dst_dir_fd=directory)
                os.fsync(directory)
            return True

    def delete(self, key: StoreKey) -> None:
        """See ``Store``. Empty directories stay: removing them would race with writers."""
        return self._reserve.with_room(lambda: self._delete(key))

    def _delete(self, key: StoreKey) -> None:
        *parents, name = key.split("/")
        with (
            self._errors("deleting", key),
            suppress(FileNotFoundError, NotADirectoryError),
            self._locked(),
            self._directory(parents, create=False) as directory,
        ):
            if not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=directory)
                os.fsync(directory)

    # Reading

    def read(self, key: StoreKey, *, limit_bytes: int) -> bytes:
        """See ``Store``."""
        with self.open(key) as file, self._errors("reading", key):
            data = file.read(limit_bytes + 1)
            size = os.fstat(file.fileno()).st_size
        if max(len(data), size) > limit_bytes:
            raise CorruptData(
                f"{key} in {self.root} has {size} bytes, more than the {limit_bytes} that such an object can have",
                fix="restore the file from a copy",
            )
        if len(data) != size:
            raise CorruptData(f"{key} in {self.root} gave {len(data)} bytes, its size is {size}")
        return data

    def read_range(self, key: StoreKey, offset: int, length: int) -> bytes:
        """See ``Store``."""
        if offset < 0 or length < 0:
            raise InvalidInput(f"range {offset}+{length} of {key} is negative")
        parts: builtins.list[bytes] = []
        left = length
        with self.open(key) as file, self._errors("reading", key):
            while left and (data := os.pread(file.fileno(), min(left, 1 << 24), offset + length - left)):
                parts.append(data)
                left -= len(data)
        if left:
            raise CorruptData(
                f"{key} in {self.root} ends {left} bytes before the end of the range {offset}+{length}",
                fix="restore the file from a copy or rebuild the snapshot",
            )
        return b"".join(parts)

    @contextmanager
    def open(self, key: StoreKey) -> Iterator[BinaryIO]:
        """See ``Store``."""
        *parents, name = key.split("/")
        with self._errors("opening", key):
            try:
                with self._directory(parents, create=False) as directory:
                    fd = os.open(name, OPEN_FILE, dir_fd=directory)
            except (FileNotFoundError, NotADirectoryError):
                raise NotFound(f"{key} is not in the store {self.root}") from None
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                directory_found = stat.S_ISDIR(os.fstat(fd).st_mode)
                os.close(fd)
                if directory_found:
                    raise NotFound(f"{key} is not in the store {self.root}: it is a directory")
                raise self._odd(key)
        with os.fdopen(fd, "rb") as file:
            yield file

    def stat(self, key: StoreKey) -> KeyInfo | None:
        """See ``Store``."""
        *parents, name = key.split("/")
        with self._errors("looking up", key):
            try:
                with self._directory(parents, create=False) as directory:
                    found = os.stat(name, dir_fd=directory, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                return None
        if stat.S_ISDIR(found.st_mode):
            return None
        if not stat.S_ISREG(found.st_mode):
            raise self._odd(key)
        return KeyInfo(key, found.st_size, found.st_mtime)

    def list(self, prefix: str) -> Iterator[KeyInfo]:
        """See ``Store``."""
        for path, found in self._walk(prefix):
            if stat.S_ISREG(found.st_mode) and (key := as_key(path)) is not None:
                yield KeyInfo(key, found.st_size, found.st_mtime)

    def strays(self) -> Iterator[Stray]:
        """See ``Store``."""
        for path, found in self._walk(""):
            if path == _LOCK or path.startswith((_ASIDE + "/", RESERVE + "/")):
                continue
            if path.startswith(_TEMPORARY + "/"):
                detail = "left by a writer that is still busy or has died"
                yield Stray("temporary", path, detail, found.st_mtime)
            elif not stat.S_ISREG(found.st_mode):
                yield Stray("foreign", ascii(path)[1:-1], f"is {kind_of(found.st_mode)}, not a regular file")
            elif as_key(path) is None:
                yield Stray("foreign", ascii(path)[1:-1], "has a name that no object has")

    @property
    def has_files(self) -> bool:
        """See ``Store``."""
        return True

    def clear(self, stray: Stray) -> None:
        """See ``Store``."""
        parent, _, name = stray.path.partition("/")
        if stray.kind != "temporary" or parent != _TEMPORARY or not name or "/" in name:
            raise InvalidInput(f"{stray.path} in {self.root} is no unfinished write", fix="remove it by hand")
        with (
            self._errors("removing", stray.path),
            suppress(FileNotFoundError),
            self._directory((_TEMPORARY,), create=False) as directory,
        ):
            os.unlink(name, dir_fd=directory)

    def set_aside(self, stray: Stray) -> str:
        """Rename what is foreign to ``.aside``, where nothing looks; the new path below the root."""
        return self._reserve.with_room(lambda: self._set_aside(stray))

    def _set_aside(self, stray: Stray) -> str:
        if stray.kind == "foreign":
            with self._errors("moving", stray.path):
                for path, found in self._walk(""):
                    shown = ascii(path)[1:-1]
                    if shown == stray.path and (not stat.S_ISREG(found.st_mode) or as_key(path) is None):
                        *parents, name = path.split("/")
                        target = f"{secrets.token_hex(8)}-{name[:100]}"
                        with self._directory(parents, create=False) as here:
                            with self._directory((_ASIDE,), create=True) as aside:
                                os.rename(name, target, src_dir_fd=here, dst_dir_fd=aside)
                                os.fsync(aside)
                            os.fsync(here)
                        return f"{_ASIDE}/{target}"
        raise NotFound(f"{stray.path} is nothing foreign in the store {self.root}")

    def local_path(self, key: StoreKey) -> Path | None:
        """See ``Store``."""
        return self.root / key if self.stat(key) is not None else None

    # Pieces

    def _adopt(self, fd: int, key: StoreKey) -> bool | None:
        """Make the source itself the object; None when the file system cannot, and it must be copied."""
        try:
            return self._seal(fd, key)
        except OSError as error:
            if error.errno in _CANNOT_LINK:
                return None
            raise

    def _seal(self, fd: int, key: StoreKey) -> bool:
        """Sync the file of ``fd`` and give it the name ``key`` unless that is taken."""
        os.fchmod(fd, 0o444)
        os.fsync(fd)
        *parents, name = key.split("/")
        with self._directory(parents, create=True) as directory:
            try:
                link_descriptor(fd, name, directory)
                created = True
            except FileExistsError:
                self._require_file(directory, name, key)
                created = False
            # Also when it existed: whoever made it may not have come as far as this, and our caller relies on it.
            os.fsync(directory)
        return created

    def _sync_parent(self, key: StoreKey) -> None:
        with self._directory(key.split("/")[:-1], create=True) as directory:
            os.fsync(directory)

    def _require_file(self, directory: int, name: str, key: StoreKey) -> None:
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            raise Conflict(f"{key} cannot be stored in {self.root}: other keys begin with {key}/")
        if not stat.S_ISREG(mode):
            raise self._odd(key)

    def _odd(self, key: str) -> CorruptData:
        return CorruptData(
            f"{key} in the store {self.root} is a link or a special file; it was not followed",
            fix="remove it, or put the regular file back",
        )

    @contextmanager
    def _temporary(self) -> Iterator[tuple[str, int]]:
        """A new private file in ``.tmp``: its name there and its descriptor. The name is gone afterwards."""
        self._reserve.ensure()
        with self._directory((_TEMPORARY,), create=True) as directory:
            name = f"{os.getpid()}-{secrets.token_hex(8)}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(name, flags, 0o600, dir_fd=directory)
            try:
                yield name, fd
            finally:
                os.close(fd)
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._directory((), create=True) as root:
            fd = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=root)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # per open file, so threads of one process exclude each other too
            yield
        finally:
            os.close(fd)

    @contextmanager
    def _directory(self, parts: Sequence[str], *, create: bool) -> Iterator[int]:
        """A descriptor of the directory; with ``create`` it and its own entry are made durable."""
        fd = self._open_root(create=create)
        try:
            for depth in range(1, len(parts) + 1):
                child = self._enter(fd, tuple(parts[:depth]), create=create)
                os.close(fd)
                fd = child
            yield fd
        finally:
            os.close(fd)

    def _open_root(self, *, create: bool) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC  # the root itself may be a link: the user chose it
        try:
            return os.open(self.root, flags)
        except FileNotFoundError:
            if not create:
                raise
        except NotADirectoryError:
            raise InvalidInput(
                f"{self.root} is no directory, so it is no repository",
                fix="correct $AENV_REPOSITORY, --repository or $AENV_HOME",
            ) from None
        make_durable_directory(self.root)
        return os.open(self.root, flags)

    def _enter(self, fd: int, path: tuple[str, ...], *, create: bool) -> int:
        name = path[-1]
        made = False
        if create:
            try:
                os.mkdir(name, 0o700, dir_fd=fd)
                made = True
            except FileExistsError:
                pass
        try:
            child = os.open(name, OPEN_DIRECTORY, dir_fd=fd)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            if not stat.S_ISREG(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                raise self._odd("/".join(path)) from None
            if not create:
                raise
            joined = "/".join(path)
            raise Conflict(f"nothing can be stored below {joined} in {self.root}: it is an object") from None
        if create and (made or path not in self._durable):
            os.fsync(fd)
            self._durable.add(path)
        return child

    def _walk(self, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
        """All that is no directory and whose path starts with ``prefix``, in order of path."""
        with self._errors("listing", prefix):
            try:
                fd = self._open_root(create=False)
            except FileNotFoundError:
                return
        try:
            yield from self._walk_below(fd, "", prefix, _MAX_DEPTH)
        finally:
            os.close(fd)

    def _walk_below(self, fd: int, below: str, prefix: str, depth: int) -> Iterator[tuple[str, os.stat_result]]:
        with self._errors("listing", below):
            rows = directory_rows(fd)
        for name, found in rows:
            path = below + name
            if not stat.S_ISDIR(found.st_mode) or depth == 0:
                if path.startswith(prefix):
                    yield path, found
            elif (path + "/").startswith(prefix) or prefix.startswith(path + "/"):
                with self._errors("listing", path):
                    try:
                        child = os.open(name, OPEN_DIRECTORY, dir_fd=fd)
                    except FileNotFoundError:
                        continue
                try:
                    yield from self._walk_below(child, path + "/", prefix, depth - 1)
                finally:
                    os.close(child)

    @contextmanager
    def _errors(self, doing: str, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # what O_NOFOLLOW says of a link, open of a socket
                raise self._odd(key) from None
            raise typed_error(
                error, f"{doing} {key or 'everything'} in the store {self.root}", self.root
            ) from error
