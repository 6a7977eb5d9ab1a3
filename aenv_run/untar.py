"""Tar streams that come from a guest: bounded reading, and unpacking that never writes outside the target.

Files and directories are made first, in a directory that is new and so holds no links; symbolic links are made
last, so nothing is ever written through one. Devices, sockets and fifos are left out, owners are ours.
"""

from __future__ import annotations

import errno
import gzip
import lzma
import os
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NoReturn

from aenv_run.errors import ProtocolError, TooLarge, from_os

MAX_ENTRIES = 1_000_000
#: A deeper tree could not be removed by ordinary means (and a path has at most 4096 bytes).
MAX_DEPTH = 256
#: Of one extended header, which is read into memory.
MAX_HEADER_BYTES = 1 << 20
#: What headers and padding may add to the content of a stream.
MAX_OVERHEAD_BYTES = 64 << 20
_EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, b"K")
#: What a name in an archive can provoke; all else is this host's own trouble.
_NAME_ERRORS = frozenset(
    {
        errno.EEXIST,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENOENT,
        errno.ENAMETOOLONG,
        errno.EINVAL,
        errno.ELOOP,
        errno.EILSEQ,
        errno.EMLINK,
    }
)


@dataclass
class Limit:
    """How much one copy may bring: counted, and named in the error when it is over."""

    max_bytes: int
    what: str
    fix: str = ""
    taken: int = field(default=0, init=False)

    def take(self, count: int) -> None:
        """``TooLarge`` when it is too much."""
        self.taken += count
        if self.taken > self.max_bytes:
            raise TooLarge(f"more than {self.what} ({self.max_bytes} bytes) was sent", fix=self.fix)

    def of_stream(self) -> Limit:
        """The limit of a tar stream whose files are within this one."""
        return Limit(self.max_bytes + MAX_OVERHEAD_BYTES, f"{self.what} and its headers", self.fix)


class _Member(tarfile.TarInfo):
    """Refuses, before it is acted upon, what only an attack has: huge headers, sizes below 0, sparse files.

    A sparse member of a few bytes stands for terabytes; the sandbox's own daemon never writes one.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        member = super().frombuf(buf, encoding, errors)
        if member.size < 0 or (member.type in _EXTENDED and member.size > MAX_HEADER_BYTES):
            raise ProtocolError(f"the sandbox sent an archive with a header of {member.size} bytes")
        if member.type == tarfile.GNUTYPE_SPARSE:
            _refuse_sparse()
        return member

    # tarfile calls these for the three forms of sparse files in extended headers.
    def _proc_gnusparse_00(self, *_: object) -> None:
        _refuse_sparse()

    def _proc_gnusparse_01(self, *_: object) -> None:
        _refuse_sparse()

    def _proc_gnusparse_10(self, *_: object) -> None:
        _refuse_sparse()


def _refuse_sparse() -> NoReturn:
    raise ProtocolError("the sandbox sent an archive with a sparse file, which it never has to")


#: What a damaged or hostile archive makes the libraries raise; the last is an OSError that no system call made.
_DAMAGE = (
    *(tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError, zlib.error, lzma.LZMAError),
    gzip.BadGzipFile,
)


@contextmanager
def guarded() -> Iterator[None]:
    """Whatever a hostile archive provokes is a ``ProtocolError``; the host's own trouble is what it is."""
    try:
        yield
    except _DAMAGE as error:
        reason = "its headers nest too deep" if isinstance(error, RecursionError) else str(error)
        raise ProtocolError(f"the sandbox sent an archive that cannot be unpacked: {reason[:200]}") from error
    except OSError as error:
        if error.errno not in _NAME_ERRORS:
            raise from_os(error, "unpacking what the sandbox sent") from error
        raise ProtocolError(
            f"the sandbox sent an archive that cannot be unpacked: {error.strerror}: {str(error.filename)[:200]!r}"
        ) from error


def members(stream: BinaryIO, limit: Limit) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Each member, to be read before the next; errors are for ``guarded``. The sizes count against ``limit``."""
    # "r|" never seeks back, so sizes cannot lead in circles.
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as tar:
        number = 0
        while (member := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # it would keep every header
            number += 1
            if number > MAX_ENTRIES:
                raise ProtocolError(f"the sandbox sent an archive of more than {MAX_ENTRIES} entries")
            if member.size < 0 or member.issparse():
                _refuse_sparse()
            if member.isreg():
                limit.take(member.size)
            yield tar, member


def extract(archive: Path, directory: Path, limit: Limit) -> list[str]:
    """Blocking: unpack ``archive`` into the new ``directory``; returns the names that were left out."""
    directory.mkdir(mode=0o700)
    with guarded(), archive.open("rb") as stream:
        return _extract(stream, directory, limit)


def _extract(stream: BinaryIO, directory: Path, limit: Limit) -> list[str]:
    left_out: list[str] = []
    links: list[tuple[Path, str]] = []
    modes: list[tuple[Path, int]] = []
    files: set[Path] = set()
    for tar, member in members(stream, limit):
        target = directory / _safe(member.name)
        if member.isdir():
            target.mkdir(parents=True, exist_ok=True)
            modes.append((target, member.mode & 0o777 | 0o700))
        elif member.isreg():
            _write(tar, member, target)
            files.add(target)
        elif member.islnk() and (source := directory / _safe(member.linkname)) in files:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(source, target)
            files.add(target)
        elif member.issym():
            links.append((target, member.linkname))
        else:
            left_out.append(member.name)
    left_out += _make_links(directory, links)
    for path, mode in reversed(modes):
        path.chmod(mode)
    return left_out


def _safe(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or len(path.parts) > MAX_DEPTH:
        raise ProtocolError(f"the sandbox sent an archive with the entry {name[:200]!r}")
    return path


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    content = tar.extractfile(member)
    assert content is not None
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with content, os.fdopen(descriptor, "wb") as file:
        shutil.copyfileobj(content, file, 1 << 20)
        os.fchmod(descriptor, member.mode & 0o777)


def _make_links(directory: Path, links: list[tuple[Path, str]]) -> list[str]:
    """Those that stay inside the tree; a link to elsewhere would name a file of this host."""
    left_out: list[str] = []
    all_links = {target for target, _ in links}
    for target, to in links:
        below_link = not all_links.isdisjoint(target.parents)
        if below_link or target.exists() or not _stays_inside(directory, target, to, all_links):
            left_out.append(str(target.relative_to(directory)))
            continue
        if not to or "\0" in to:
            raise ProtocolError(f"the sandbox sent an archive with a link to {to[:200]!r}")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.is_symlink():
            target.symlink_to(to)
    return left_out


def _stays_inside(directory: Path, target: Path, to: str, all_links: set[Path]) -> bool:
    """Follow ``to`` by its parts. It may end at another link, not pass through one: ``..`` is elsewhere there."""
    if to.startswith("/"):
        return False
    here = target.parent
    for part in PurePosixPath(to).parts:
        if here in all_links:
            return False
        here = here.parent if part == ".." else here / part
        if not here.is_relative_to(directory):
            return False
    return True
