"""Blobs as local, verified files of this node. All of it can be deleted at any time and is made again."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

from aenv_run.blobs import RESTORE_FIX
from aenv_run.cache_limit import in_use
from aenv_run.errors import Conflict, CorruptData, StoreUnavailable
from aenv_run.repository import Repository
from aenv_run.snapshot import Blob
from aenv_run.store.identity import FileIdentity
from aenv_run.store.posix_files import link_descriptor, typed_error
from aenv_run.store.sparse import copy_sparse, write_stream_sparse

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.EROFS}
_ROUNDS = 5


class BlobCache:
    """Gives each blob as a path. Threads and processes may share one directory.

    A file is digested once and then trusted while its device, inode, size and mtime are those of that moment.
    What this notices: bytes rewritten in place through the file system (a write sets mtime), a cut or grown
    file (size), another file in its place (inode), another disk (device). ctime would in addition notice a
    write whose mtime was set back, but every hard link made or dropped changes it, and a blob is linked into
    each sandbox. What it does not notice: mtime set back on purpose, which needs the owner's rights, who could
    as well change the mark; and bits that rot below the file system, which ``check --deep`` finds. Blobs are
    0444, so that a program which opens one for writing by mistake is refused unless it is root. mtime moves in
    ticks of some milliseconds, so a file that was just written gets no mark yet and is digested once more. A file
    that this process has just committed is not digested again: the repository knows its identity.

    A mark is a small file of its own, written beside and renamed; it is not synced, because a lost mark costs
    one more digest, and a mark that survives speaks of data that was synced before the mark was written.
    """

    def __init__(self, root: Path, repository: Repository) -> None:
        self.root = root.absolute()
        self._repository = repository

    def path(self, blob: Blob) -> Path:
        """The verified file; never write it. ``CorruptData`` if the repository's bytes are not the blob."""
        path = self._place("blobs", blob)
        with self._errors(f"fetching blob {blob.digest} into the cache"):
            for _ in range(_ROUNDS):
                try:
                    if self._is_used(blob, path):
                        return path
                except FileNotFoundError:
                    if self._fetch(blob, path):
                        return path
                    continue  # another process was faster: look at what it made
                if self._verify_present(blob, path):
                    return path
        raise StoreUnavailable(f"blob {blob.digest} does not stay in the cache {self.root}", fix="try again")

    def link(self, blob: Blob, target: Path) -> None:
        """The verified file under another name, by hard link, or as a copy where that is not possible."""
        for _ in range(_ROUNDS):
            source = self.path(blob)
            with self._errors(f"linking blob {blob.digest} to {target}"):
                try:
                    os.link(source, target, follow_symlinks=False)
                except FileExistsError:
                    raise Conflict(f"{target} exists already") from None
                except FileNotFoundError:
                    if source.exists() or not target.parent.exists():
                        raise
                    continue  # somebody emptied the cache meanwhile
                except OSError as error:
                    if error.errno not in _CANNOT_LINK:
                        raise
                    _copy_new(source, target)
                return
        raise StoreUnavailable(f"blob {blob.digest} does not stay in the cache {self.root}", fix="try again")

    def take_in(self, blob: Blob, path: Path) -> None:
        """Give the cache a file of this home that nobody writes any more as the blob; it keeps its own name too.

        ``CorruptData`` if it is not the blob.
        """
        place = self._place("blobs", blob)
        _make_private(place.parent)
        with self._errors(f"taking {path} into the cache"), _opened(path) as fd:
            before = FileIdentity.of(os.fstat(fd))
            settled = before.settled
            self._require(blob, fd, str(path))
            os.fchmod(fd, 0o444)
            os.fsync(fd)
            with in_use(self.root):
                try:
                    _link(fd, place)
                except FileExistsError:
                    return
            if settled:
                self._mark(blob, before)

    @property
    def is_beside_files(self) -> bool:
        """Whether the repository's blobs are files of this machine."""
        return self._repository.store.has_files

    def holds(self, blob: Blob) -> bool:
        """Whether ``path`` needs nothing of the repository's store but what is a file here already."""
        if self._repository.store.local_path(self._repository.blob_key(blob.digest)) is not None:
            return True
        return self._place("blobs", blob).exists()

    # Pieces

    def _is_used(self, blob: Blob, path: Path) -> bool:
        """Whether it is there and was verified; it then counts as used now (cache_limit.py)."""
        with in_use(self.root):
            found = path.stat(follow_symlinks=False)
            if not (stat.S_ISREG(found.st_mode) and self._is_marked(blob, found)):
                return False
            os.utime(self._place("verified", blob))
            return True

    def _fetch(self, blob: Blob, path: Path) -> bool:
        """Bring the blob in; False when ``path`` is taken meanwhile. What is linked was verified before."""
        self._repository.require_blob(blob)
        _make_private(path.parent)
        local = self._repository.store.local_path(self._repository.blob_key(blob.digest))
        if local is not None:
            with suppress(FileNotFoundError):  # it was packed meanwhile
                return self._fetch_local(blob, local, path)
        with self._temporary() as (fd, _):
            with self._repository.open_blob(blob) as reader:
                write_stream_sparse(cast(BinaryIO, reader), fd)
            return self._keep(blob, fd, path)

    def _fetch_local(self, blob: Blob, local: Path, path: Path) -> bool:
        if (done := self._adopt(blob, local, path)) is not None:
            return done
        with self._temporary() as (fd, _):
            self._copy_local(blob, local, fd)
            return self._keep(blob, fd, path)

    def _keep(self, blob: Blob, fd: int, path: Path) -> bool:
        """Give our own copy its name; False when that is taken."""
        os.fchmod(fd, 0o444)
        os.fsync(fd)
        try:
            _link(fd, path)
        except FileExistsError:
            return False
        # Nobody else has opened it: its last write was before the digest.
        self._mark(blob, FileIdentity.of(os.fstat(fd)))
        return True

    def _adopt(self, blob: Blob, local: Path, path: Path) -> bool | None:
        """Link the store's own file; None when the file system cannot."""
        with _opened(local) as fd:
            found = os.fstat(fd)
            if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
                return None  # others can write it whenever they like: take a copy
            before = FileIdentity.of(found)
            settled = before.settled
            if not self._repository.has_digested(blob, before):
                self._require(blob, fd, f"{self._repository.blob_key(blob.digest)} ({local})")
            try:
                _link(fd, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno in _CANNOT_LINK:
                    return None
                raise
            if settled:
                self._mark(blob, before)
            return True

    def _copy_local(self, blob: Blob, local: Path, target_fd: int) -> None:
        with _opened(local) as fd:
            copy_sparse(fd, target_fd)
        self._require(blob, target_fd, f"{self._repository.blob_key(blob.digest)} ({local})")

    def _verify_present(self, blob: Blob, path: Path) -> bool:
        """Digest a cached file without a valid mark. A wrong one is dropped; False: fetch it again."""
        try:
            with _opened(path) as fd:
                found = os.fstat(fd)
                before = FileIdentity.of(found)
                settled = before.settled
                try:
                    self._require(blob, fd, str(path))
                except CorruptData:
                    local = self._repository.store.local_path(self._repository.blob_key(blob.digest))
                    if local is not None and os.path.samestat(found, local.stat(follow_symlinks=False)):
                        path.unlink(missing_ok=True)
                        raise  # it is the repository's file
                    path.unlink(missing_ok=True)
                    return False
                if settled:
                    self._mark(blob, before)
                return True
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link in our own cache: drop it
                path.unlink(missing_ok=True)
                return False
            raise

    def _require(self, blob: Blob, fd: int, where: str) -> None:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size != blob.size_bytes:
            raise CorruptData(
                f"blob {blob.digest} at {where} has {found.st_size} bytes instead of {blob.size_bytes}",
                fix=RESTORE_FIX,
            )
        os.lseek(fd, 0, os.SEEK_SET)
        with os.fdopen(os.dup(fd), "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != blob.digest.hex:
            raise CorruptData(
                f"blob {blob.digest} at {where} is damaged: its {found.st_size} bytes have sha256 {digest}",
                fix=RESTORE_FIX,
            )

    def _is_marked(self, blob: Blob, found: os.stat_result) -> bool:
        try:
            with self._place("verified", blob).open("rb") as file:
                return file.read(256) == FileIdentity.of(found).line().encode()
        except FileNotFoundError:
            return False

    def _mark(self, blob: Blob, verified: FileIdentity) -> None:
        """Keep that the file was right; ``verified`` is its identity before it was digested."""
        mark = self._place("verified", blob)
        _make_private(mark.parent)
        with self._temporary() as (fd, temporary):
            os.write(fd, verified.line().encode())
            temporary.rename(mark)

    def _place(self, kind: str, blob: Blob) -> Path:
        return self.root / kind / blob.digest.hex[:2] / blob.digest.hex

    @contextmanager
    def _temporary(self) -> Iterator[tuple[int, Path]]:
        directory = self.root / "tmp"
        _make_private(directory)
        path = directory / f"{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # so that a trim sees that it is not abandoned
            yield fd, path
        finally:
            os.close(fd)
            with suppress(FileNotFoundError):
                path.unlink()

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise typed_error(error, doing, self.root) from error


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, _OPEN)
    try:
        yield fd
    finally:
        os.close(fd)


def _link(fd: int, path: Path) -> None:
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        link_descriptor(fd, path.name, directory)
    finally:
        os.close(directory)


def _copy_new(source: Path, target: Path) -> None:
    """A sparse, read-only copy at ``target``, which must not exist; nothing is left of it if that fails."""
    with _opened(source) as source_fd:
        fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            copy_sparse(source_fd, fd)
            os.fchmod(fd, 0o444)
        except BaseException:
            target.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
