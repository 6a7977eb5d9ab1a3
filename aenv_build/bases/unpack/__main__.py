"""Unpacks an untrusted tar into a directory that it cannot leave. Runs as a child process, as a plain script.

The process enters the directory with chroot(2) before it reads the first entry, so every path, link and link
target resolves inside. Only the standard library is used: nothing can be imported after the chroot.

    python unpack.py ARCHIVE DIRECTORY MAX_BYTES MAX_ENTRIES DEVICES(0|1)

Exit 0, or 3 with one line on stderr that says what is wrong with the archive.
"""

# ruff: noqa: PTH101, PTH102, PTH103, PTH106, PTH108, PTH120, PTH123, PTH211
# Paths are relative to the new root and need not be UTF-8: os calls say exactly what is done.

from __future__ import annotations

import errno
import gzip
import lzma
import os
import resource
import stat
import subprocess
import sys
import tarfile
import zlib
from typing import IO, NoReturn

#: tarfile reads extended headers whole; an archive that announces gigabytes of them ends here.
MEMORY_LIMIT_BYTES = 2 << 30
CHUNK_BYTES = 1 << 20
XATTR_PREFIX = "SCHILY.xattr."
#: Others (trusted., system.) have a meaning to the host kernel, not to a guest's files.
XATTRS_KEPT = ("user.", "security.capability")


class Refused(Exception):
    """The archive is not one we unpack; the text says why."""


class Unpacker:
    """The rules for each kind of entry, and the bounds over all of them."""

    def __init__(self, max_bytes: int, max_entries: int, *, devices: bool) -> None:
        self._bytes_left = max_bytes
        self._max_mib = max_bytes >> 20
        self._max_entries = max_entries
        self._devices = devices
        self._directory_times: list[tuple[str, float]] = []

    def unpack(self, stream: IO[bytes] | gzip.GzipFile | lzma.LZMAFile) -> int:
        """All entries in order; a later one replaces an earlier of the same name. Returns their number."""
        count = 0
        with tarfile.open(fileobj=stream, mode="r|", encoding="utf-8", errors="surrogateescape") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # it would keep every header
                count += 1
                if count > self._max_entries:
                    raise Refused(f"it has more than {self._max_entries} entries")
                self._entry(tar, member)
        for path, modified_s in reversed(self._directory_times):
            os.utime(path, (modified_s, modified_s), follow_symlinks=False)
        return count

    def _entry(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        path = inside(member.name, member.name)
        try:
            if path:
                os.makedirs(os.path.dirname(path) or ".", mode=0o755, exist_ok=True)
                self._clear(path, member)
            if not self._create(tar, member, path or "."):
                return
            self._metadata(member, path or ".")
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise Refused("the host's disk is full") from None
            raise Refused(f"the entry {shown(member.name)}: {error.strerror}") from None

    def _clear(self, path: str, member: tarfile.TarInfo) -> None:
        """Make way for an entry; a directory stays a directory."""
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return
        if stat.S_ISDIR(mode):
            if not member.isdir():
                os.rmdir(path)
        else:
            os.unlink(path)

    def _create(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> bool:
        """Whether something was made that takes an owner and a mode."""
        if member.isdir():
            if not os.path.lexists(path):
                os.mkdir(path, 0o700)
            self._directory_times.append((path, member.mtime))
        elif member.isreg():
            self._file(tar, member, path)
        elif member.issym():
            os.symlink(member.linkname, path)
        elif member.islnk():
            os.link(inside(member.linkname, member.name), path, follow_symlinks=False)
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
        source = tar.extractfile(member)
        assert source is not None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "wb") as target:
            left = member.size
            while left:
                chunk = source.read(min(left, CHUNK_BYTES))
                if not chunk:
                    raise Refused(f"it ends in the middle of {shown(member.name)}")
                left -= len(chunk)
                self._bytes_left -= len(chunk)
                if self._bytes_left < 0:
                    raise Refused(f"it unpacks to more than the {self._max_mib} MiB of the machine's disk")
                target.write(chunk)

    def _metadata(self, member: tarfile.TarInfo, path: str) -> None:
        if os.geteuid() == 0:
            os.chown(path, member.uid, member.gid, follow_symlinks=False)
        for key, value in member.pax_headers.items():
            name = key.removeprefix(XATTR_PREFIX)
            if name != key and name.startswith(XATTRS_KEPT):
                data = value.encode("utf-8", "surrogateescape")
                os.setxattr(path, name, data, follow_symlinks=False)
        if not member.issym():
            os.chmod(path, member.mode & 0o7777)
        if not member.isdir():
            os.utime(path, (member.mtime, member.mtime), follow_symlinks=False)


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


def main(arguments: list[str]) -> None:
    """Unpack, or exit with 3 and the reason."""
    archive, directory, max_bytes, max_entries, devices = arguments
    try:
        stream, child = open_archive(archive)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
        os.chroot(directory)
        os.chdir("/")
        os.umask(0)
        count = Unpacker(int(max_bytes), int(max_entries), devices=devices == "1").unpack(stream)
        if count == 0:
            raise Refused("it holds no files")
        if child is not None:
            while stream.read(CHUNK_BYTES):  # padding after the end
                pass
            if child.wait() != 0:
                raise Refused("its compressed data is damaged or cut off")
    except Refused as reason:
        fail(str(reason))
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, ValueError) as error:
        fail(f"it is damaged or not a tar archive: {error}")
    except MemoryError:
        fail("its headers need more than 2 GiB of memory")


def fail(reason: str) -> NoReturn:
    """End with the reason."""
    sys.stderr.write(reason.replace("\n", " ") + "\n")
    sys.stderr.flush()
    os._exit(3)


if __name__ == "__main__":
    main(sys.argv[1:])
