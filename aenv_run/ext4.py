"""Reading an ext4 file system in a plain file: no mount, no root, nothing of the image ever becomes a host's name.

What the image says is bounded and checked where it is used; whatever is not as it must be is ``CorruptData``.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from aenv_run.errors import CorruptData

ROOT_INODE = 2
SUPERBLOCK_AT, SUPERBLOCK_BYTES, MAGIC = 1024, 1024, 0xEF53
#: filetype, extents, 64bit, flex_bg, csum_seed, largedir. Above all not "recover": its journal was not replayed.
UNDERSTOOD = 0x0002 | 0x0040 | 0x0080 | 0x0200 | 0x2000 | 0x4000
EXTENTS_FLAG, INLINE_FLAG, ENCRYPTED_FLAG = 0x80000, 0x10000000, 0x800
EXTENT_MAGIC, MAX_DEPTH, UNWRITTEN = 0xF30A, 5, 32768
DIRECTORY_BYTES, LINK_BYTES, NAME_BYTES = 1 << 28, 4096, 255
#: Pointers to blocks in an inode without extents: direct ones, then trees of depth 1, 2 and 3.
DIRECT, TREES = 12, 3


@dataclass(frozen=True, slots=True)
class Inode:
    """One inode: what ``stat`` shows, and where its content is."""

    number: int
    mode: int
    uid: int
    gid: int
    size: int
    mtime_s: int
    mtime_ns: int
    links: int
    rdev: tuple[int, int]
    flags: int
    content: bytes

    @property
    def kind(self) -> int:
        """S_IFREG and so on."""
        return stat.S_IFMT(self.mode)


@dataclass(frozen=True, slots=True)
class Extent:
    """``count`` blocks of a file from its block ``logical`` on are those of the disk from ``physical`` on."""

    logical: int
    physical: int
    count: int


class Ext4:
    """A file system that is open for reading."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._file_bytes = os.fstat(self._descriptor).st_size
        try:
            self._open()
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    @property
    def descriptor(self) -> int:
        """Of the file that holds it."""
        return self._descriptor

    def _open(self) -> None:
        raw = os.pread(self._descriptor, SUPERBLOCK_BYTES, SUPERBLOCK_AT)
        if len(raw) < SUPERBLOCK_BYTES or struct.unpack_from("<H", raw, 56)[0] != MAGIC:
            raise CorruptData(f"{self._path} holds no ext4 file system")
        self.inodes, low_blocks = struct.unpack_from("<II", raw, 0)
        first, log_block = struct.unpack_from("<II", raw, 20)
        self._per_group = struct.unpack_from("<I", raw, 40)[0]
        self._inode_bytes = struct.unpack_from("<H", raw, 88)[0]
        incompatible = struct.unpack_from("<I", raw, 96)[0]
        wide = bool(incompatible & 0x80)
        self._descriptor_bytes = struct.unpack_from("<H", raw, 254)[0] if wide else 32
        self.blocks = low_blocks | (struct.unpack_from("<I", raw, 336)[0] << 32 if wide else 0)
        if incompatible & ~UNDERSTOOD:
            raise CorruptData(f"{self._path} has ext4 features that are not read: {incompatible & ~UNDERSTOOD:#x}")
        sane = log_block <= 6 and self._per_group > 0 and 128 <= self._inode_bytes <= 4096
        if not sane or self._descriptor_bytes not in (32, 64):
            raise CorruptData(f"{self._path} has an impossible superblock")
        self.block_bytes = 1024 << log_block
        self._groups_at = (first + 1) * self.block_bytes
        self._tables: dict[int, int] = {}

    def _bad(self, what: str) -> CorruptData:
        return CorruptData(f"the file system in {self._path.name} is damaged: {what}")

    def _pread(self, length: int, at: int) -> bytes:
        if at + length > self._file_bytes:
            raise self._bad(f"it says to go on at byte {at}, outside of it")
        return os.pread(self._descriptor, length, at)

    def _table(self, group: int) -> int:
        found = self._tables.get(group)
        if found is None:
            at = self._groups_at + group * self._descriptor_bytes
            raw = self._pread(self._descriptor_bytes, at).ljust(64, b"\0")
            found = struct.unpack_from("<I", raw, 8)[0]
            if self._descriptor_bytes == 64:
                found |= struct.unpack_from("<I", raw, 0x28)[0] << 32
            self._tables[group] = found
        return found

    def inode(self, number: int) -> Inode:
        """The inode of that number."""
        if not 1 <= number <= self.inodes:
            raise self._bad(f"inode {number} does not exist")
        group, index = divmod(number - 1, self._per_group)
        at = self._table(group) * self.block_bytes + index * self._inode_bytes
        raw = self._pread(self._inode_bytes, at)
        mode, uid, size = struct.unpack_from("<HHI", raw, 0)
        mtime_s = struct.unpack_from("<i", raw, 16)[0]
        gid, links, _, flags = struct.unpack_from("<HHII", raw, 24)
        size |= struct.unpack_from("<I", raw, 108)[0] << 32
        uid |= struct.unpack_from("<H", raw, 120)[0] << 16
        gid |= struct.unpack_from("<H", raw, 122)[0] << 16
        mtime_ns = 0
        if self._inode_bytes >= 160 and struct.unpack_from("<H", raw, 128)[0] >= 12:
            extra = struct.unpack_from("<I", raw, 136)[0]
            mtime_s, mtime_ns = mtime_s + ((extra & 3) << 32), extra >> 2
        if flags & (INLINE_FLAG | ENCRYPTED_FLAG):
            raise self._bad(f"inode {number} has content of a kind that is not read")
        content = raw[40:100]
        old, new = struct.unpack_from("<II", content)
        rdev = (old >> 8 & 0xFF, old & 0xFF) if old else (new >> 8 & 0xFFF, new & 0xFF | new >> 12 & 0xFFF00)
        return Inode(number, mode, uid, gid, size, mtime_s, mtime_ns, links, rdev, flags, content)

    # -- content -------------------------------------------------------------------------------------------

    def extents(self, inode: Inode) -> list[Extent]:
        """Where its content is, in order; what is missing reads as zeroes."""
        if inode.flags & EXTENTS_FLAG:
            found = list(self._extent_node(inode, inode.content, MAX_DEPTH + 1, set()))
        else:
            found = list(self._pointers(inode))
        last = 0
        for one in found:
            if one.logical < last or one.physical < 1 or one.physical + one.count > self.blocks:
                raise self._bad(f"inode {inode.number} has an impossible extent")
            last = one.logical + one.count
        return found

    def _extent_node(self, inode: Inode, node: bytes, below: int, seen: set[int]) -> Iterator[Extent]:
        magic, entries, _, depth = struct.unpack_from("<HHHH", node)
        if magic != EXTENT_MAGIC or depth >= below or 12 + entries * 12 > len(node):
            raise self._bad(f"inode {inode.number} has a damaged extent tree")
        for at in range(12, 12 + entries * 12, 12):
            if depth:
                _, low, high = struct.unpack_from("<IIH", node, at)
                if (number := low | high << 32) in seen:  # a few blocks that name each other would be a forest
                    raise self._bad(f"inode {inode.number} has a block twice in its extent tree")
                seen.add(number)
                yield from self._extent_node(inode, self._block(number), depth, seen)
                continue
            logical, count, high, low = struct.unpack_from("<IHHI", node, at)
            if count <= UNWRITTEN:  # one that is unwritten reads as zeroes
                yield Extent(logical, low | high << 32, count)

    def _pointers(self, inode: Inode) -> Iterator[Extent]:
        pointers = struct.unpack("<15I", inode.content)
        needed = -(-inode.size // self.block_bytes)
        for logical, physical in enumerate(pointers[:DIRECT]):
            if physical and logical < needed:
                yield Extent(logical, physical, 1)
        start, each = DIRECT, self.block_bytes // 4
        seen: set[int] = set()
        for depth in range(1, TREES + 1):
            yield from self._pointer_tree(pointers[DIRECT - 1 + depth], start, depth, needed, seen)
            start += each**depth

    def _pointer_tree(self, block: int, start: int, depth: int, needed: int, seen: set[int]) -> Iterator[Extent]:
        if not block or start >= needed:
            return
        if block in seen:
            raise self._bad(f"block {block} is twice among those that hold pointers of an inode")
        seen.add(block)
        each = (self.block_bytes // 4) ** (depth - 1)
        for index, physical in enumerate(struct.unpack(f"<{self.block_bytes // 4}I", self._block(block))):
            logical = start + index * each
            if depth > 1:
                yield from self._pointer_tree(physical, logical, depth - 1, needed, seen)
            elif physical and logical < needed:
                yield Extent(logical, physical, 1)

    def _block(self, number: int) -> bytes:
        if not 0 < number < self.blocks:
            raise self._bad(f"block {number} does not exist")
        return self._pread(self.block_bytes, number * self.block_bytes)

    def read(self, inode: Inode, limit_bytes: int) -> bytes:
        """Its whole content, which must not be larger than the limit."""
        if inode.size > limit_bytes:
            raise self._bad(f"inode {inode.number} has {inode.size} bytes where at most {limit_bytes} are right")
        out = bytearray(inode.size)
        for extent in self.extents(inode):
            at = extent.logical * self.block_bytes
            length = min(extent.count * self.block_bytes, inode.size - at)
            if length > 0:
                out[at : at + length] = self._pread(length, extent.physical * self.block_bytes)
        return bytes(out)

    def link_target(self, inode: Inode) -> bytes:
        """Where a symbolic link points."""
        if inode.size < len(inode.content) and not inode.flags & EXTENTS_FLAG:
            return inode.content[: inode.size]
        return self.read(inode, LINK_BYTES)

    def entries(self, inode: Inode) -> list[tuple[bytes, int]]:
        """Names and inode numbers of a directory, without ``.`` and ``..``."""
        found: dict[bytes, int] = {}
        raw = self.read(inode, DIRECTORY_BYTES)
        for start in range(0, len(raw), self.block_bytes):
            at, end = start, min(start + self.block_bytes, len(raw))
            while at + 8 <= end:
                number, length, name_bytes = struct.unpack_from("<IHB", raw, at)
                length = length if length not in (0, 65535) else self.block_bytes
                if length < 8 or at + length > end or 8 + name_bytes > length:
                    raise self._bad(f"directory {inode.number} has an impossible entry")
                name = raw[at + 8 : at + 8 + name_bytes]
                at += length
                if not number or not name_bytes or name in (b".", b".."):
                    continue
                if b"/" in name or b"\0" in name or name in found:
                    raise self._bad(f"directory {inode.number} has the impossible name {name!r}")
                found[name] = number
        return list(found.items())
