"""A guest's own account of its disk (``envd pack``): read, bounded, and turned into debugfs commands.

Nothing of it ever becomes a name on the host: content goes to numbered files, names only into an ext4 image.
"""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from pydantic import Base64Bytes, BaseModel, Field, ValidationError

from aenv_run.erofs import Node
from aenv_run.errors import NoSpace, ProtocolError, Unsupported
from aenv_run.ext4 import LINK_BYTES, NAME_BYTES

MAX_ENTRIES, MAX_LINE_BYTES, MAX_PATH_BYTES, MAX_DEPTH = 4_000_000, 1 << 18, 1 << 15, 512
CHUNK = struct.Struct("<QI")
MAX_CHUNK_BYTES = 1 << 20
#: debugfs puts a name into a directory without growing it: so many fit into a new block, whatever their length.
LINKS_PER_BLOCK = 12
#: A guest tells nothing of these that are in its image: gVisor shows no node of a character device there.
UNTOLD = (stat.S_IFSOCK, stat.S_IFCHR)
KINDS = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO)


class PackLine(BaseModel, extra="forbid", strict=False):
    """One file as the guest tells it; see ``packEntry`` of the daemon."""

    path: Base64Bytes = Field(max_length=MAX_PATH_BYTES)
    mode: int = Field(ge=0, le=0xFFFF)
    uid: int = Field(ge=0, le=0xFFFFFFFF)
    gid: int = Field(ge=0, le=0xFFFFFFFF)
    mtime: tuple[int, int]
    size: int = Field(0, ge=0, lt=1 << 44)
    mount: bool = False
    same: int = Field(0, ge=0)
    whole: bool = False
    link: Base64Bytes = Field(b"", max_length=MAX_PATH_BYTES)
    target: Base64Bytes = Field(b"", max_length=2 * LINK_BYTES)
    device: tuple[int, int] = (0, 0)
    xattrs: dict[str, Base64Bytes] = Field(default_factory=dict, max_length=64)


@dataclass(slots=True)
class Packed:
    """A file as the disk shall have it. ``content`` is the number of the file that holds its bytes."""

    line: PackLine
    children: dict[bytes, Packed] = field(default_factory=dict)
    content: int | None = None

    @property
    def kind(self) -> int:
        """S_IFREG and so on."""
        return stat.S_IFMT(self.line.mode)


def read(source: BinaryIO, contents: Path, limit_bytes: int) -> Packed:
    """The root of what is told; the content of files goes into ``contents``, at most ``limit_bytes`` in all."""
    root: Packed | None = None
    written = count = 0
    while (raw := source.readline(MAX_LINE_BYTES)) != b"\n":
        count += 1
        if not raw.endswith(b"\n") or count > MAX_ENTRIES:
            raise ProtocolError("the guest's account of its disk ends in the middle, or is too long")
        try:
            packed = Packed(PackLine.model_validate_json(raw))
        except ValidationError as error:
            raise ProtocolError(f"the guest's account of its disk has a bad line: {str(error)[:300]}") from error
        if packed.kind not in KINDS:
            raise ProtocolError(f"the guest's disk has a file of no known kind: {packed.line.path!r}")
        if root is None:
            if packed.line.path or packed.kind != stat.S_IFDIR:
                raise ProtocolError("the guest's account of its disk does not begin with its root")
            root = packed
        else:
            _put(root, packed)
        if packed.kind == stat.S_IFREG and packed.line.mount:
            packed.content = count
            (contents / str(count)).touch()
        elif packed.kind == stat.S_IFREG and not packed.line.same and not packed.line.link:
            packed.content = count
            written += _content(source, contents / str(count), packed.line.size, limit_bytes - written)
    if root is None:
        raise ProtocolError("the guest told nothing of its disk")
    return root


def _put(root: Packed, packed: Packed) -> None:
    *parents, name = packed.line.path.split(b"/")
    at = root
    if len(parents) > MAX_DEPTH:
        raise Unsupported(
            f"directories {MAX_DEPTH} deep cannot be captured at this level: {packed.line.path[:99]!r}…"
        )
    for parent in parents:
        found = at.children.get(parent)
        if found is None or found.kind != stat.S_IFDIR:
            raise ProtocolError(f"the guest's account of its disk has {packed.line.path!r} before its directory")
        at = found
    if not name or name in (b".", b"..") or len(name) > NAME_BYTES or b"\0" in name or name in at.children:
        raise ProtocolError(f"the guest's account of its disk has the impossible name {packed.line.path!r}")
    at.children[name] = packed


def _content(source: BinaryIO, target: Path, size: int, limit_bytes: int) -> int:
    """One file's bytes; how many were written."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    written = 0
    try:
        os.ftruncate(descriptor, size)
        while True:
            head = source.read(CHUNK.size)
            offset, length = CHUNK.unpack(head) if len(head) == CHUNK.size else (0, MAX_CHUNK_BYTES + 1)
            if not length:
                return written
            data = source.read(length) if length <= MAX_CHUNK_BYTES and offset + length <= size else b""
            if len(data) != length:
                raise ProtocolError("the guest's account of its disk ends in the middle of a file")
            written += length
            if written > limit_bytes:
                raise NoSpace(
                    "the sandbox's files do not fit on its disk, so it cannot be captured; it runs on",
                    fix="remove files, or use a machine with a larger disk",
                )
            os.pwrite(descriptor, data, offset)
    finally:
        os.close(descriptor)


class Script:
    """Commands that make a disk what a guest says it is. debugfs works in one directory at a time."""

    def __init__(self, files: dict[int, Node], contents: Path) -> None:
        self._files, self._contents = files, contents
        self.lines: list[str] = []
        self._links: dict[bytes, int] = {}

    def make(self, root: Packed, base: Node) -> str:
        """All of them, for a disk that is ``base``."""
        self._directory(root, base, b"")
        for path, count in self._links.items():
            self._add(f"sif {_word(b'/' + path)} links_count {count}")
        return "\n".join(self.lines) + "\n"

    def _add(self, line: str) -> None:
        self.lines.append(line)

    def _directory(self, packed: Packed, base: Node | None, path: bytes) -> None:
        """The working directory is this one."""
        before = base.children if base is not None else {}
        linked, changed = 0, base is None
        for name, node in before.items():
            if not self._stays(packed.children.get(name), node):
                self._remove(name, node)
                changed = True
        for name, child in packed.children.items():
            known = before.get(name)
            if known is not None and not self._stays(child, known):
                known = None
            if child.line.link and known is None:
                if linked % LINKS_PER_BLOCK == 0:
                    self._add("expand_dir .")
                linked += 1
            changed = changed or known is None
            self._file(name, child, known, path + b"/" + name if path else name)
        self._attributes(".", packed, None if changed else base)

    def _stays(self, packed: Packed | None, node: Node) -> bool:
        """Whether what is there is not removed first."""
        if packed is not None and packed.line.mount:
            return True  # it is covered, whatever it is
        if packed is None:
            return node.inode.kind in UNTOLD
        if packed.line.same:
            if self._files.get(packed.line.same) is not node:
                raise ProtocolError(f"the guest says that {packed.line.path!r} is as it was, and it is not")
            return True
        if packed.kind != node.inode.kind or packed.kind == stat.S_IFREG:
            return False
        if packed.kind == stat.S_IFLNK:
            return packed.line.target == node.data
        return packed.kind not in (stat.S_IFCHR, stat.S_IFBLK) or packed.line.device == node.inode.rdev

    def _remove(self, name: bytes, node: Node) -> None:
        if not node.is_directory:
            self._add(f"rm {_relative(name)}")
            return
        self._add(f"cd {_relative(name)}")
        for child, below in node.children.items():
            self._remove(child, below)
        self._add("cd ..")
        self._add(f"rmdir {_relative(name)}")

    def _file(self, name: bytes, packed: Packed, base: Node | None, path: bytes) -> None:
        line = packed.line
        if (line.mount or line.whole or line.same) and base is not None:
            return
        if line.whole or line.same:
            raise ProtocolError(f"the guest says that {path!r} is as it was, and it is not there")
        if packed.kind == stat.S_IFDIR:
            if base is None:
                self._add(f"mkdir {_word(name)}")
            self._add(f"cd {_relative(name)}")
            self._directory(packed, base, path)
            self._add("cd ..")
            return
        if base is None:
            self._create(name, packed, path)
        if not line.link:
            self._attributes(_relative(name), packed, base)

    def _create(self, name: bytes, packed: Packed, path: bytes) -> None:
        line, word = packed.line, _word(name)
        match packed.kind:
            case stat.S_IFLNK:
                self._add(f"symlink {word} {_word(line.target)}")
            case stat.S_IFIFO:
                self._add(f"mknod {word} p")
            case stat.S_IFCHR | stat.S_IFBLK:
                self._device(name, line, "c" if packed.kind == stat.S_IFCHR else "b")
            case _ if line.link:
                self._add(f"ln {_word(b'/' + line.link)} {word}")
                self._links[line.link] = self._links.get(line.link, 1) + 1
            case _:
                self._add(f"write {_word(bytes(self._contents / str(packed.content)))} {word}")

    def _device(self, name: bytes, line: PackLine, kind: str) -> None:
        major, minor = line.device
        if not 0 <= major < 1 << 12 or not 0 <= minor < 1 << 20:
            raise ProtocolError(f"the guest says that {line.path!r} is a device that cannot be")
        large = major > 0xFF or minor > 0xFF
        self._add(f"mknod {_word(name)} {kind} {0 if large else major} {0 if large else minor}")
        if large:  # which debugfs would not take; as Linux's new_encode_dev
            self._add(f"sif {_relative(name)} block[0] 0")
            self._add(f"sif {_relative(name)} block[1] {minor & 0xFF | major << 8 | (minor & ~0xFF) << 12}")

    def _attributes(self, where: str, packed: Packed, base: Node | None) -> None:
        line = packed.line
        wanted = (line.mode, line.uid, line.gid, *line.mtime)
        if base is not None:
            inode = base.inode
            if wanted == (inode.mode, inode.uid, inode.gid, inode.mtime_s, inode.mtime_ns):
                return
        mode, uid, gid, seconds, nanoseconds = wanted
        self._add(f"sif {where} mode 0{mode:o}")
        self._add(f"sif {where} uid {uid}")
        self._add(f"sif {where} gid {gid}")
        if 0 <= seconds < 1 << 34 and 0 <= nanoseconds < 1_000_000_000:
            self._add(f"sif {where} mtime @{seconds & 0xFFFFFFFF}")
            self._add(f"sif {where} mtime_extra {nanoseconds << 2 | _epoch(seconds)}")
        for name, value in line.xattrs.items():
            if not name.startswith("user.") and name != "security.capability":
                raise ProtocolError(
                    f"the guest tells an attribute of {line.path!r} that it may not: {name[:99]!r}"
                )
            file = self._contents / f"x{len(self.lines)}"
            file.write_bytes(value)
            self._add(f"ea_set -f {_word(bytes(file))} {where} {_word(name.encode())}")


def _epoch(seconds: int) -> int:
    """What the extra bits say of a time whose lower half is read with its sign."""
    low = (seconds & 0xFFFFFFFF) - (1 << 32 if seconds & 0x80000000 else 0)
    return (seconds - low) >> 32 & 3


def _word(name: bytes) -> str:
    """As debugfs reads one argument. A line break it cannot read."""
    if b"\n" in name or b"\r" in name:
        raise Unsupported(
            f"a name or link with a line break cannot be captured at this level: {name!r}",
            fix="rename it, or run where the disk can be mounted (`aenv doctor`)",
        )
    return '"' + name.decode(errors="surrogateescape").replace('"', '""') + '"'


def _relative(name: bytes) -> str:
    """A name that is in the working directory; alone it could be read as an inode's number."""
    return _word(b"./" + name)
