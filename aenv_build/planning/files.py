"""Files that a ``copy`` step brings from the host: their digest, and the tar that carries them.

The digest covers name, type, exec bit, content and link target, and nothing a fresh clone changes: no time, owner
or umask. The tar is made from the same facts, so that equal digests give equal files in the sandbox.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import os
import stat
import sys
import tarfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from aenv_build.planning.ignore import Ignore
from aenv_run.digest import READ_BYTES, digest_file
from aenv_run.errors import Conflict, InvalidInput, ProtocolError
from aenv_run.types import Digest, MachineSpec
from aenv_run.untar import Limit, guarded, members

MAX_ENTRIES = 500_000


@dataclass(frozen=True)
class Entry:
    """One entry below the copied root; ``name`` is b"" for the root itself."""

    name: bytes
    path: bytes
    kind: str
    executable: bool = False
    size_bytes: int = 0
    target: bytes = b""


@dataclass(frozen=True)
class CopiedFiles:
    """A root on the host and the digest of all below it. With ``parts`` it is those, side by side."""

    root: Path
    is_directory: bool
    digest: Digest
    ignore: Ignore | None = None
    parts: tuple[tuple[str, CopiedFiles], ...] = ()

    @classmethod
    def of_parts(cls, root: Path, parts: Sequence[tuple[str, CopiedFiles]]) -> CopiedFiles:
        """A directory of these: the content of each directory, and each file by the name that stands with it."""
        summary = hashlib.sha256()
        for name, part in parts:
            for text in ("" if part.is_directory else name, part.digest):
                summary.update(len(text.encode()).to_bytes(8, "big") + text.encode())
        return cls(root, True, Digest("sha256:" + summary.hexdigest()), None, tuple(parts))


def examine(root: Path, ignore: Ignore | None = None) -> CopiedFiles:
    """Digest the file or directory. A link as root is followed, links below it are copied as links.

    What ``ignore`` hides is not there; ``InvalidInput`` if that is all of it.
    """
    root = root.resolve(strict=True)
    summary, count = hashlib.sha256(), 0
    for entry in _walk(root, ignore):
        _add(summary, entry, _content_digest(entry))
        count += 1
    if ignore is not None and not count:
        raise InvalidInput(f"{ignore.file} leaves out all of it", fix="add a line '!…' that takes it in again")
    return CopiedFiles(root, root.is_dir(), Digest("sha256:" + summary.hexdigest()), ignore)


class Readings:
    """What was read of the host's files, each once, however many cells of a recipe copy it. Not thread-safe."""

    def __init__(self) -> None:
        self._copied: dict[tuple[Path, Ignore | None], CopiedFiles] = {}
        self._digests: dict[Path, Digest] = {}

    def examine(self, root: Path, ignore: Ignore | None = None) -> CopiedFiles:
        """As the function of that name."""
        if (root, ignore) not in self._copied:
            self._copied[root, ignore] = examine(root, ignore)
        return self._copied[root, ignore]

    def digest(self, path: Path) -> Digest:
        """sha256 of a file."""
        if path not in self._digests:
            self._digests[path] = digest_file(path)
        return self._digests[path]


def write_tar(files: CopiedFiles, target: Path, *, name: str = "", mode: int | None = None) -> None:
    """Write the tar of a directory's content, or of one file called ``name``; all with ``mode``, if it is given.

    ``Conflict`` if the files are no longer those that were examined: the key would lie.
    """
    with target.open("wb") as stream, tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for own, part in files.parts or ((name, files),):
            _add_tree(tar, part, own, mode)


def _add_tree(tar: tarfile.TarFile, files: CopiedFiles, name: str, mode: int | None) -> None:
    summary = hashlib.sha256()
    for entry in _walk(files.root, files.ignore):
        member = tarfile.TarInfo(os.fsdecode(entry.name) or name)
        member.mode = 0o755 if entry.executable or entry.kind == "d" else 0o644
        member.mode = member.mode if mode is None else mode
        content = b""
        if entry.kind == "f":
            content = _add_file(tar, member, entry)
        elif entry.name or not files.is_directory:
            member.type = tarfile.DIRTYPE if entry.kind == "d" else tarfile.SYMTYPE
            member.linkname = os.fsdecode(entry.target)
            tar.addfile(member)
        _add(summary, entry, content)
    if summary.hexdigest() != files.digest.hex:
        raise Conflict(
            f"the files in {files.root} changed while the build ran",
            fix="run the build again when they are at rest",
        )


def repack(file: CopiedFiles, target: Path, limit: Limit, *, mode: int | None = None) -> None:
    """The tar that the archive holds, plain and bounded. ``InvalidInput`` if it is none."""
    try:
        with (
            guarded(),
            plain_tar(file.root) as stream,
            tarfile.open(target, "w|", format=tarfile.PAX_FORMAT) as out,
        ):
            for source, member in members(stream, limit):
                member.mode = member.mode if mode is None else mode
                out.addfile(member, source.extractfile(member) if member.isreg() else None)
    except ProtocolError as error:
        reason = error.message.removeprefix("the sandbox sent an archive ")
        raise InvalidInput(f"{file.root} cannot be unpacked: {reason}", fix="give a tar, or a .tar.gz") from error
    if examine(file.root).digest != file.digest:
        raise Conflict(f"{file.root} changed while the build ran", fix="run the build again")


@contextmanager
def plain_tar(path: Path) -> Iterator[BinaryIO]:
    """A tar that may be packed, unpacked; by its first bytes, not by its name."""
    with path.open("rb") as file:
        head = file.read(6)
        file.seek(0)
        if head.startswith(b"\x1f\x8b"):
            with gzip.open(file) as stream:
                yield cast("BinaryIO", stream)
        elif head.startswith(b"BZh"):
            with bz2.open(file) as packed:
                yield cast("BinaryIO", packed)
        elif head == b"\xfd7zXZ\0":
            with lzma.open(file) as packed_xz:
                yield cast("BinaryIO", packed_xz)
        else:
            yield file


def one_file_tar(name: str, content: bytes, mode: int) -> bytes:
    """The tar of one file that stands nowhere on the host."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(content), mode
        tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


async def chunks(data: bytes) -> AsyncIterator[bytes]:
    """As a stream of one piece."""
    yield data


def read_examined(file: CopiedFiles) -> bytes:
    """The content of an examined file; ``Conflict`` if it is no longer what was examined."""
    content = file.root.read_bytes()
    if examine(file.root) != file:
        raise Conflict(f"{file.root} changed while the build ran", fix="run the build again")
    return content


def disk_limit(machine: MachineSpec) -> Limit:
    """What a copy from a step may bring: no honest state has more than fits on its disk."""
    fix = "copy less, or give the machine a larger disk"
    return Limit(machine.disk_mib << 20, "the size of the machine's disk", fix=fix)


def holds_directory(archive: Path) -> bool:
    """Whether a sandbox's tar is of a directory: its first entry says so. Errors as ``strip_top``."""
    with guarded(), archive.open("rb") as stream:
        for _, first in members(stream, Limit(sys.maxsize, "the first entry")):
            return first.isdir()
    return False


def strip_top(
    archive: Path, target: Path, limit: Limit, *, name: str, special: bool = True, mode: int | None = None
) -> None:
    """A sandbox's tar of one path as ``write_tar`` makes it: a directory's content, or a file as ``name``.

    The archive is untrusted: ``ProtocolError``, ``TooLarge``. It is only rewritten here; the receiving
    sandbox extracts it. Without ``special``, devices, sockets and fifos are left out. ``mode``: of all entries.
    """
    top, left_out = "", set[str]()
    with (
        guarded(),
        archive.open("rb") as stream,
        tarfile.open(target, "w|", format=tarfile.PAX_FORMAT) as out,
    ):
        for source, member in members(stream, limit):
            if not top:
                top = member.name + "/"
                if member.isdir():
                    continue
                member.name = name
            else:
                member.name = _below(member.name, top)
            if member.islnk():
                member.linkname = _below(member.linkname, top)
            plain = member.isreg() or member.isdir() or member.issym()
            if not special and not plain and (not member.islnk() or member.linkname in left_out):
                left_out.add(member.name)
                continue
            kept = {key: value for key, value in member.pax_headers.items() if key not in {"path", "linkpath"}}
            member.pax_headers = kept
            member.mode = member.mode if mode is None else mode
            out.addfile(member, source.extractfile(member) if member.isreg() else None)


def _below(name: str, top: str) -> str:
    """The name as seen from ``top``, which it must be in."""
    rest = name.removeprefix(top)
    if not name.startswith(top) or ".." in rest.split("/"):
        raise ProtocolError(f"the sandbox's archive of {top.rstrip('/')!r} has an entry elsewhere: {name[:200]!r}")
    return rest


def _add_file(tar: tarfile.TarFile, member: tarfile.TarInfo, entry: Entry) -> bytes:
    with open(entry.path, "rb") as file:  # noqa: PTH123 - names may not be UTF-8
        member.size = os.fstat(file.fileno()).st_size
        reader = _Hashing(file)
        tar.addfile(member, reader)
    return reader.digest.digest()


class _Hashing(io.RawIOBase):
    """Hashes what passes through."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        data = self._file.read(size)
        self.digest.update(data)
        return data


def _add(summary: hashlib._Hash, entry: Entry, content: bytes) -> None:
    for part in (entry.kind.encode(), entry.name, b"x" if entry.executable else b"-", content, entry.target):
        summary.update(len(part).to_bytes(8, "big") + part)


def _content_digest(entry: Entry) -> bytes:
    if entry.kind != "f":
        return b""
    with open(entry.path, "rb") as file:  # noqa: PTH123 - names may not be UTF-8
        digest = hashlib.sha256()
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
    return digest.digest()


def _walk(root: Path, ignore: Ignore | None = None) -> Iterator[Entry]:
    """The root, then all below it, parents first, in order of their bytes; of what is left out nothing.

    A directory that is left out comes after all when something in it is taken in again.
    """
    pending: list[tuple[bytes, bytes, tuple[Entry, ...]]] = [(b"", os.fsencode(root), ())]
    shown: set[bytes] = set()
    count = 0
    while pending:
        name, path, above = pending.pop()
        hidden = ignore is not None and ignore.hides(os.fsdecode(name))
        if hidden and not (ignore and ignore.takes_in_again):
            continue
        count += 1
        if count > MAX_ENTRIES:
            raise InvalidInput(f"{root} holds more than {MAX_ENTRIES} files", fix="copy less, or use an archive")
        info = os.lstat(path)
        is_directory = stat.S_ISDIR(info.st_mode)
        if hidden and not is_directory:
            continue
        entry = _entry(name, path, info)
        if not hidden:
            yield from (one for one in (*above, entry) if one.name not in shown)
            shown.update(one.name for one in above)
            above = ()
        if is_directory:
            above = (*above, entry) if hidden else ()
            children = sorted(os.listdir(path), reverse=True)  # noqa: PTH208 - bytes
            prefix = name + b"/" if name else b""
            pending += [(prefix + child, path + b"/" + child, above) for child in children]


def _entry(name: bytes, path: bytes, info: os.stat_result) -> Entry:
    if stat.S_ISDIR(info.st_mode):
        return Entry(name, path, "d")
    if stat.S_ISLNK(info.st_mode):
        return Entry(name, path, "l", target=os.readlink(path))  # noqa: PTH115 - bytes
    if stat.S_ISREG(info.st_mode):
        return Entry(name, path, "f", bool(info.st_mode & 0o100), info.st_size)
    raise InvalidInput(f"{os.fsdecode(path)} is a socket, pipe or device; copy takes files, directories and links")
