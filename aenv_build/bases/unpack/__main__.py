"""Unpacks an untrusted tar, or an image's layers, into a directory that it cannot leave. Runs as a plain script.

The process enters the directory with chroot(2) before it reads the first entry, so every path, link and link
target resolves inside. Only the standard library is used: nothing can be imported after the chroot.

Called as ``python -I -X utf8 __main__.py <JOB``, JSON as ``Job`` below: the archives, the lowest first, and the
bounds. ``digest`` (of the file) and ``diff_id`` (of the tar in it) are verified unless they are null. ``layered``:
.wh. names hide what is below, as the OCI image specification says. Exit 0, or 3 and on stderr a line with the why.
"""

# ruff: noqa: PTH101, PTH102, PTH106, PTH108, PTH112, PTH114, PTH118, PTH123, PTH208, PTH211
# Paths are those of the new root and need not be UTF-8: os calls say exactly what is done.

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import lzma
import math
import os
import resource
import stat
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, ClassVar, NoReturn, TypedDict

#: tarfile reads extended headers whole; an archive that announces gigabytes of them ends here.
MEMORY_LIMIT_BYTES = 2 << 30
MAX_HEADER_BYTES = 8 << 20
CHUNK_BYTES = 1 << 20
#: A deeper tree could not be removed by ordinary means.
MAX_DEPTH = 256
#: What padding may add to the content of one archive, and the headers of an entry.
MAX_PADDING_BYTES = 64 << 20
MAX_ENTRY_OVERHEAD_BYTES = 16 << 10
#: One less than the largest, which means "leave the owner as it is" to the kernel.
MAX_OWNER = (1 << 32) - 2
#: What ext4 can keep.
MAX_TIME_S = (1 << 33) - 1
XATTR_PREFIX = "SCHILY.xattr."
#: Others (trusted., security.selinux, ...) have a meaning to the host kernel, not to a guest's files.
DEFAULT_ACL = "system.posix_acl_default"
XATTRS_KEPT = ("user.", "security.capability", "system.posix_acl_access", DEFAULT_ACL)
WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
#: Of a union file system that old images were made with: its own notes, not files.
WHITEOUT_NOTES = ".wh..wh."
_EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, b"K")


class Refused(Exception):
    """The archive is not one we unpack; the text says why."""


class Layer(TypedDict):
    """One archive: the file, its digest and that of the tar in it (``sha256:…``), or null."""

    path: str
    digest: str | None
    diff_id: str | None


class Job(TypedDict):
    """What to do, as the parent says it."""

    tree: str
    max_bytes: int
    max_entries: int
    devices: bool
    layered: bool
    workdir: str | None
    layers: list[Layer]


class Member(tarfile.TarInfo):
    """Refuses damaged headers: tarfile takes one after the first entry for the end of the archive."""

    #: Whether the last header was that of the end.
    at_end: ClassVar[bool] = False

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Member:
        """The header, or ``Refused``."""
        return cls._watched(super().frombuf, buf, encoding, errors)

    @classmethod
    def _frombuf(cls, buf: bytes, encoding: str, errors: str, **more: bool) -> Member:
        """What Python with the fixes of 2025 and later calls instead."""
        return cls._watched(super()._frombuf, buf, encoding, errors, **more)  # type: ignore[misc]

    @classmethod
    def _watched(cls, make: Callable[..., Member], *arguments: bytes | bytearray | str, **more: bool) -> Member:
        Member.at_end = False
        try:
            member = make(*arguments, **more)
        except (tarfile.EOFHeaderError, tarfile.EmptyHeaderError) as error:  # type: ignore[attr-defined]
            Member.at_end = isinstance(error, tarfile.EOFHeaderError)  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise Refused(f"it is damaged, cut off or not a tar archive: {error}") from None
        if member.size < 0 or (member.type in _EXTENDED and member.size > MAX_HEADER_BYTES):
            raise Refused(f"it is damaged: a header of {member.size} bytes")
        return member


class Reader:
    """A stream of at most ``max_bytes``, and the digest of what was read."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile | lzma.LZMAFile, max_bytes: int) -> None:
        self._stream = stream
        self._bytes_left = max_bytes
        self._hash = hashlib.sha256()
        self._ahead = b""

    def is_empty(self) -> bool:
        """Whether there is not a single byte; asked before the first read."""
        self._ahead = self._stream.read(1)
        return not self._ahead

    def allow(self, count: int) -> None:
        """Let that many bytes more be read."""
        self._bytes_left += count

    def read(self, count: int) -> bytes:
        """As a file's."""
        data, self._ahead = self._ahead + self._stream.read(count - len(self._ahead)), b""
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise Refused("it unpacks to far more than fits on the machine's disk")
        self._hash.update(data)
        return data

    def finish(self) -> str:
        """Read to the end; the digest of all."""
        while self.read(CHUNK_BYTES):
            pass
        return f"sha256:{self._hash.hexdigest()}"


class Unpacker:
    """The rules for each kind of entry, and the bounds over all of them. Runs in the new root."""

    def __init__(self, max_bytes: int, max_entries: int, *, devices: bool, layered: bool) -> None:
        self._bytes_left = max_bytes
        self._max_mib = max_bytes >> 20
        self._entries_left = self._max_entries = max_entries
        self._devices = devices
        self._layered = layered
        #: All directories and their times, which are set last: what is made in one changes its own.
        self._times: dict[str, float] = {"/": 0}
        #: Set last too: new files would inherit them.
        self._default_acls: dict[str, bytes] = {}
        #: Paths of this layer, and what they are in. The layer's markers hide all else.
        self._ours: set[str] = set()
        self._late_markers: list[tuple[str, str]] = []
        self._last_parent = ("", "/")
        os.chmod("/", 0o755)

    def layer(self, stream: Reader) -> int:
        """All entries in order; a later one replaces an earlier of the same name. Returns their number."""
        before = self._entries_left
        self._ours, self._late_markers, self._last_parent = {"/"}, [], ("", "/")
        if self._layered and stream.is_empty():
            return 0  # nothing at all is a layer without entries
        with tarfile.open(
            fileobj=stream,  # type: ignore[call-overload]
            mode="r|",
            encoding="utf-8",
            errors="surrogateescape",
            tarinfo=Member,
        ) as tar:
            while (member := tar.next()) is not None:
                tar.members = []
                self._entries_left -= 1
                if self._entries_left < 0:
                    raise Refused(f"it has more than {self._max_entries} entries")
                stream.allow(MAX_ENTRY_OVERHEAD_BYTES)
                try:
                    self._entry(tar, member)
                except OSError as error:
                    self._failed(member.name, error)
        if not Member.at_end and not self._layered:
            raise Refused("it is cut off: the mark of its end is missing")
        for parent, name in self._late_markers:
            self._hide(os.path.realpath("/" + parent), name)
        return before - self._entries_left

    def close(self, workdir: str | None) -> None:
        """Make the working directory, as a runtime does, and set the directories' times."""
        if workdir is not None:
            try:
                self._directory(inside(workdir, workdir), replace=False)
            except OSError as error:
                self._failed(workdir, error)
        for path, acl in self._default_acls.items():
            os.setxattr(path, DEFAULT_ACL, acl)
        for path, modified_s in self._times.items():
            set_time(path, modified_s)

    def _failed(self, name: str, error: OSError) -> NoReturn:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise Refused("the host's disk is full") from None
        raise Refused(f"the entry {shown(name)}: {error.strerror}") from None

    def _entry(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name = inside(member.name, member.name)
        parent, base = os.path.split(name)
        if self._layered and WHITEOUT in name and self._marker(parent, base):
            return
        path = "/"
        if name:
            path = os.path.join(self._directory(parent), base)
            if member.islnk() and same_file("/" + inside(member.linkname, member.name), path):
                self._ours.add(path)
                return
            self._clear(path, member)
        self._ours.add(path)
        if self._create(tar, member, path):
            self._metadata(member, path)

    def _marker(self, parent: str, base: str) -> bool:
        """Whether the entry is a marker, whatever its type: some tools store it as a hard link."""
        if any(part.startswith(WHITEOUT_NOTES) for part in (*parent.split("/"), base)) and base != OPAQUE:
            return True
        if not base.startswith(WHITEOUT):
            return False
        if base.removeprefix(WHITEOUT) in {"", ".", ".."}:
            raise Refused(f"the marker {shown(parent + '/' + base)} hides a directory itself")
        real = os.path.realpath("/" + parent)
        if real == "/" + parent or not parent:
            self._hide(real, base)
        else:  # this layer may yet replace the link by a directory, which is then the one meant
            self._late_markers.append((parent, base))
        return True

    def _hide(self, directory: str, base: str) -> None:
        if not os.path.isdir(directory):
            return
        self._last_parent = ("", "/")
        if base == OPAQUE:
            for name in os.listdir(directory):
                self._prune(os.path.join(directory, name))
        else:
            self._prune(os.path.join(directory, base.removeprefix(WHITEOUT)))

    def _prune(self, path: str) -> None:
        """Remove what lower layers put at ``path`` and below; what this layer put there stays."""
        if not os.path.lexists(path):
            return
        if path not in self._ours:
            self._remove(path)
        elif os.path.isdir(path) and not os.path.islink(path):
            for name in os.listdir(path):
                self._prune(os.path.join(path, name))

    def _remove(self, path: str) -> None:
        info = os.lstat(path)
        if stat.S_ISDIR(info.st_mode):
            for name in os.listdir(path):
                self._remove(os.path.join(path, name))
            os.rmdir(path)
            self._forget(path)
            return
        os.unlink(path)
        if stat.S_ISREG(info.st_mode) and info.st_nlink == 1:
            self._bytes_left += min(info.st_size, info.st_blocks * 512)

    def _forget(self, path: str) -> None:
        self._times.pop(path, None)
        self._default_acls.pop(path, None)

    def _directory(self, name: str, *, replace: bool = True) -> str:
        """The real path of a parent directory, links followed inside the root; made where it is missing."""
        if name == self._last_parent[0]:
            return self._last_parent[1]
        real = os.path.realpath("/" + name)
        if real.count("/") > MAX_DEPTH:
            raise Refused(f"the directory {shown(name)} is more than {MAX_DEPTH} levels deep")
        path = ""
        for part in real.split("/")[1:]:
            path += "/" + part
            if path == "/":
                continue
            if os.path.islink(path) or not os.path.isdir(path):
                if os.path.lexists(path) and replace and path not in self._ours:
                    self._remove(path)
                os.mkdir(path, 0o755)
                self._times[path] = 0
            self._ours.add(path)
        self._last_parent = (name, real)
        return real

    def _clear(self, path: str, member: tarfile.TarInfo) -> None:
        """Make way for an entry; a directory stays a directory, with the layer's attributes."""
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return
        self._last_parent = ("", "/")
        if not stat.S_ISDIR(mode):
            self._remove(path)
        elif not member.isdir():
            self._prune(path)
            if os.path.lexists(path):
                os.rmdir(path)  # fails where this very layer has put something in it
                self._forget(path)
        else:
            self._default_acls.pop(path, None)
            for name in os.listxattr(path, follow_symlinks=False):
                if name.startswith(XATTRS_KEPT):
                    os.removexattr(path, name, follow_symlinks=False)

    def _create(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> bool:
        """Whether something was made that takes an owner and a mode."""
        if member.isdir():
            if not os.path.lexists(path):
                os.mkdir(path, 0o700)
            self._times[path] = member.mtime
        elif member.isreg():
            self._file(tar, member, path)
        elif member.issym():
            os.symlink(member.linkname, path)
        elif member.islnk():
            os.link("/" + inside(member.linkname, member.name), path, follow_symlinks=False)
            return False
        elif member.isfifo():
            os.mkfifo(path, 0o600)
        elif member.ischr() or member.isblk():
            if not self._devices:
                raise Refused(f"the entry {shown(member.name)} is a device, which only root can make")
            kind = stat.S_IFCHR if member.ischr() else stat.S_IFBLK
            os.mknod(path, kind | 0o600, os.makedev(member.devmajor, member.devminor))
        else:
            raise Refused(f"the entry {shown(member.name)} is of the unknown type {member.type!r}")
        return True

    def _file(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        """Write the content; of a sparse file only what is stored, so a small archive stays small."""
        source = tar.fileobj
        assert source is not None
        source.seek(member.offset_data)  # forward only: the parts follow each other
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        holes: list[tuple[int, int]] | None = member.sparse  # type: ignore[assignment]
        parts = [(0, member.size)] if holes is None else holes
        with os.fdopen(os.open(path, flags, 0o600), "wb") as target:
            here = 0
            for offset, count in parts:
                if offset < here or count < 0 or offset + count > member.size:
                    raise Refused(f"the entry {shown(member.name)} has a wrong map of its holes")
                here = offset + count
                target.seek(offset)
                while count:
                    chunk = source.read(min(count, CHUNK_BYTES))
                    if not chunk:
                        raise Refused(f"it ends in the middle of {shown(member.name)}")
                    count -= len(chunk)
                    self._bytes_left -= len(chunk)
                    if self._bytes_left < 0:
                        raise Refused(f"it unpacks to more than the {self._max_mib} MiB of the machine's disk")
                    target.write(chunk)
            target.truncate(member.size)

    def _metadata(self, member: tarfile.TarInfo, path: str) -> None:
        if not (0 <= member.uid <= MAX_OWNER and 0 <= member.gid <= MAX_OWNER):
            raise Refused(f"the entry {shown(member.name)} has an owner that no Linux has")
        if os.geteuid() == 0:
            os.chown(path, member.uid, member.gid, follow_symlinks=False)
        for key, value in member.pax_headers.items():
            name = key.removeprefix(XATTR_PREFIX)
            if name != key and name.startswith(XATTRS_KEPT):
                data = value.encode("utf-8", "surrogateescape")
                if name == DEFAULT_ACL and member.isdir():
                    self._default_acls[path] = data
                    continue
                os.setxattr(path, name, data, follow_symlinks=False)
        if not member.issym():
            os.chmod(path, member.mode & 0o7777)
        if not member.isdir():
            set_time(path, member.mtime)


def set_time(path: str, modified_s: float) -> None:
    """Set the time, as near as a file system can."""
    wanted = modified_s if math.isfinite(modified_s) else 0
    wanted = min(max(wanted, -(1 << 31)), MAX_TIME_S)
    os.utime(path, (wanted, wanted), follow_symlinks=False)


def same_file(one: str, other: str) -> bool:
    """Whether both names exist and are of one file."""
    return all(map(os.path.lexists, (one, other))) and os.path.samestat(os.lstat(one), os.lstat(other))


def inside(name: str, entry: str) -> str:
    """The name relative to the root, "" for the root itself; never one that points above it."""
    parts = [part for part in name.split("/") if part not in {"", "."}]
    if ".." in parts:
        raise Refused(f"the entry {shown(entry)} points out of the archive ({shown(name)})")
    return "/".join(parts)


def shown(name: str) -> str:
    """The name for a message: bounded, on one line."""
    return repr(name if len(name) <= 200 else name[:200] + "…")


def open_archive(path: str) -> tuple[IO[bytes] | gzip.GzipFile | lzma.LZMAFile, subprocess.Popen[bytes] | None]:
    """The tar stream, decompressed by what the file's first bytes say, and the process that does it."""
    file = open(path, "rb")  # noqa: SIM115 - the process ends soon
    magic = os.pread(file.fileno(), 6, 0)  # leaves the offset, which zstd inherits, at 0
    if magic.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=file), None
    if magic.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMAFile(file), None
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        try:
            child = subprocess.Popen(["zstd", "-dcq"], stdin=file, stdout=subprocess.PIPE)
        except FileNotFoundError:
            raise Refused("the program zstd is not installed, which unpacks it") from None
        assert child.stdout is not None
        return child.stdout, child
    return file, None


def require_digest(path: str, wanted: str) -> None:
    """Refuse a file whose content is not the one that is named."""
    with open(path, "rb") as file:
        found = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    if found != wanted:
        raise Refused(f"its content is {found}, not {wanted}")


def unpack(job: Job) -> None:
    """Verify and open all layers, enter the directory, unpack them in order."""
    opened = []
    for layer in job["layers"]:
        with told_of(layer):
            if layer["digest"] is not None:
                require_digest(layer["path"], layer["digest"])
            opened.append(open_archive(layer["path"]))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    os.chroot(job["tree"])
    os.chdir("/")
    os.umask(0)
    layered, max_bytes = job["layered"], job["max_bytes"]
    unpacker = Unpacker(max_bytes, job["max_entries"], devices=job["devices"], layered=layered)
    for layer, (stream, child) in zip(job["layers"], opened, strict=True):
        with told_of(layer):
            reader = Reader(stream, 2 * max_bytes + MAX_PADDING_BYTES)
            if unpacker.layer(reader) == 0 and not layered:
                raise Refused("it holds no files")
            diff_id = reader.finish()
            if child is not None and child.wait() != 0:
                raise Refused("its compressed data is damaged or cut off")
            if layer["diff_id"] not in {None, diff_id}:
                raise Refused(f"the tar in it is {diff_id}, and the image's config says {layer['diff_id']}")
    unpacker.close(job["workdir"])


@contextmanager
def told_of(layer: Layer) -> Iterator[None]:
    """Whatever a hostile archive provokes is ``Refused``, and says which layer it was."""
    try:
        yield
    except Refused as error:
        reason = str(error)
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        reason = f"it is damaged or not a tar archive: {error}"
    except (ValueError, ArithmeticError, RecursionError) as error:
        reason = f"it is damaged: {error}"
    except MemoryError:
        reason = f"its headers need more than {MEMORY_LIMIT_BYTES >> 30} GiB of memory"
    else:
        return
    raise Refused(reason if layer["digest"] is None else f"layer {layer['digest']}: {reason}") from None


def main() -> None:
    """Unpack, or exit with 3 and the reason."""
    try:
        unpack(json.load(sys.stdin))
    except Refused as reason:
        fail(str(reason))


def fail(reason: str) -> NoReturn:
    """End with the reason."""
    sys.stderr.write(reason.replace("\n", " ") + "\n")
    sys.stderr.flush()
    os._exit(3)


if __name__ == "__main__":
    main()
