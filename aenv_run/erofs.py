"""From an ext4 file system to an EROFS image, which gVisor reads by itself: no mount, owners and modes are kept.

Uncompressed and flat, as gVisor wants it (Linux: Documentation/filesystems/erofs.rst). The same file system gives
the same bytes, and an inode's place follows from the tree alone: ``plan`` tells which file a guest's number means.
"""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path

from aenv_run.disk_mount import MOUNT_POINTS
from aenv_run.errors import CorruptData, Unsupported
from aenv_run.ext4 import NAME_BYTES, ROOT_INODE, Ext4, Inode

BLOCK_BYTES = 4096
SUPERBLOCK = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQB23s")
MAGIC = 0xE0F5E1E2
INODE = struct.Struct("<HHHHQIIIIQII16x")
DIRENT = struct.Struct("<QHBx")
FLAT, INLINE = 0, 2
#: A path cannot be longer. What the files take in all, with their holes: gVisor maps it.
MAX_DEPTH, MAX_BYTES = 2048, 1 << 40
#: How much an entry adds to the size of a directory in gVisor's memory; see the daemon's archive/pack.go.
MEMORY_ENTRY_BYTES = 20
KINDS = {
    stat.S_IFREG: 1, stat.S_IFDIR: 2, stat.S_IFCHR: 3, stat.S_IFBLK: 4, stat.S_IFIFO: 5, stat.S_IFSOCK: 6,
    stat.S_IFLNK: 7,
}  # fmt: skip


@dataclass(slots=True)
class Node:
    """A file of the image. ``children`` of a directory by name; ``data`` of a link."""

    inode: Inode
    children: dict[bytes, Node] = field(default_factory=dict)
    data: bytes = b""
    parent: Node | None = None
    nid: int = 0
    data_block: int = 0

    @property
    def is_directory(self) -> bool:
        """Whether it has children."""
        return self.inode.kind == stat.S_IFDIR


@dataclass(frozen=True)
class Tree:
    """A file system, and every file's place in the image.

    ``root`` is the disk's own, ``guest_root`` what a guest is shown: with the mount points as real directories.
    ``files`` has each inode of the latter once, in the order of their places.
    """

    root: Node
    guest_root: Node
    files: list[Node]
    meta_bytes: int

    def by_nid(self) -> dict[int, Node]:
        """Which file has which number in a guest."""
        return {node.nid: node for node in self.files}


def read_tree(source: Ext4, keep: str = "") -> Tree:
    """Every file of a file system, and its place. ``keep`` is an empty file in a guest's /tmp."""
    files: dict[int, Node] = {}
    root = Node(source.inode(ROOT_INODE))
    if not root.is_directory:
        raise CorruptData("the disk's root is no directory")
    files[ROOT_INODE] = root
    waiting = [(root, 0)]
    while waiting:
        node, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise CorruptData("the disk's directories are deeper than a path can be long")
        for name, number in sorted(source.entries(node.inode)):
            known = files.get(number)
            if known is None:
                known = files[number] = Node(source.inode(number))
                if known.inode.kind not in KINDS:
                    raise CorruptData(f"inode {number} of the disk is of no known kind")
                if known.inode.kind == stat.S_IFLNK:
                    known.data = source.link_target(known.inode)
                if known.is_directory:
                    waiting.append((known, depth + 1))
            elif known.is_directory:
                raise CorruptData(f"directory {number} of the disk has two names")
            node.children[name] = known
    return _place(root, _with_mount_points(root, keep))


def _with_mount_points(root: Node, keep: str) -> Node:
    """A copy of the root in which they are real directories: an image can put links there."""
    shown = Node(root.inode, dict(root.children))
    for text in MOUNT_POINTS:
        name = text.encode()
        is_tmp = text == "tmp"
        found = root.children.get(name)
        if found is not None and found.is_directory:
            if not is_tmp:
                continue
            made = Node(found.inode, dict(found.children))
        else:
            mode = stat.S_IFDIR | (0o1777 if is_tmp else 0o755)
            made = Node(replace(root.inode, number=0, mode=mode, uid=0, gid=0))
        if is_tmp and keep:
            empty = replace(root.inode, number=0, mode=stat.S_IFREG | 0o600, uid=0, gid=0, size=0, links=1)
            made.children[keep.encode()] = Node(empty)
        shown.children[name] = made
    return shown


def _place(root: Node, shown: Node) -> Tree:
    """Give each its number: the place of its inode in units of 32 bytes. The root's must be a small one."""
    files: list[Node] = []
    seen: set[int] = set()
    waiting = [shown]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        files.append(node)
        for _, child in sorted(node.children.items(), reverse=True):
            if child.is_directory:
                child.parent = node
            waiting.append(child)
    at = BLOCK_BYTES
    for node in files:
        inline = _inline_bytes(node)
        if at % BLOCK_BYTES + INODE.size + inline > BLOCK_BYTES:
            at = -(-at // BLOCK_BYTES) * BLOCK_BYTES
        node.nid = at // 32
        at += -(-(INODE.size + inline) // 32) * 32
    return Tree(root, shown, files, -(-at // BLOCK_BYTES) * BLOCK_BYTES)


def _inline_bytes(node: Node) -> int:
    """How much of its content follows the inode; 0 when it has blocks."""
    size = 0
    if node.is_directory:
        size = sum(DIRENT.size + len(name) for name in (b".", b"..", *node.children)) + 1
    elif node.inode.kind == stat.S_IFLNK:
        size = len(node.data)
    if size > BLOCK_BYTES - INODE.size:
        return 0
    return len(_directory(node)) if node.is_directory else size


def _directory(node: Node) -> bytes:
    """Its entries in the order of their names, in whole blocks but for the last.

    No size is one that a directory in memory can have: so the daemon tells those that were written.
    """
    parent = node.parent or node
    entries = sorted([*node.children.items(), (b".", node), (b"..", parent)])
    blocks: list[list[tuple[bytes, Node]]] = [[]]
    used = 0
    for name, child in entries:
        need = DIRENT.size + len(name)
        if used + need > BLOCK_BYTES:
            if BLOCK_BYTES - used + len(blocks[-1][-1][0]) > NAME_BYTES:
                raise Unsupported(
                    f"a directory of the disk has too many long names for gVisor: {blocks[-1][-1][0]!r}",
                    fix="run where the disk can be mounted (`aenv doctor`)",
                )
            blocks.append([])
            used = 0
        blocks[-1].append((name, child))
        used += need
    packed = b"".join(_directory_block(block).ljust(BLOCK_BYTES, b"\0") for block in blocks[:-1])
    last = _directory_block(blocks[-1])
    could_be_memory = (len(packed) + len(last)) % MEMORY_ENTRY_BYTES == 0
    if could_be_memory and used < BLOCK_BYTES and len(entries[-1][0]) < NAME_BYTES:
        last += b"\0"
    return packed + last


def _directory_block(block: list[tuple[bytes, Node]]) -> bytes:
    at = len(block) * DIRENT.size
    heads, names = bytearray(), bytearray()
    for name, child in block:
        heads += DIRENT.pack(child.nid, at + len(names), KINDS[child.inode.kind])
        names += name
    return bytes(heads + names)


def write_empty(target: Path) -> None:
    """An image with nothing but the mount points, to try with."""
    root = Node(Inode(ROOT_INODE, stat.S_IFDIR | 0o755, 0, 0, 0, 0, 0, 2, (0, 0), 0, b""))
    write(None, _place(root, _with_mount_points(root, "")), target)


def write(source: Ext4 | None, tree: Tree, target: Path) -> None:
    """Write the image; its size is that of the files' content and little more."""
    descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        end = tree.meta_bytes
        for node in tree.files:
            end = _write_node(descriptor, source, node, end)
        os.ftruncate(descriptor, end)
        superblock = SUPERBLOCK.pack(
            MAGIC, 0, 0, 12, 0, tree.guest_root.nid, len(tree.files), 0, 0, end // BLOCK_BYTES, 0, 0, bytes(16),
            bytes(16), 0, 0, 0, 0, 0, 0, 0, 0, 0, bytes(23),
        )  # fmt: skip
        os.pwrite(descriptor, superblock, 1024)
    finally:
        os.close(descriptor)


def _write_node(descriptor: int, source: Ext4 | None, node: Node, end: int) -> int:
    """Write one file, its content from ``end`` on; the new end."""
    inode, data, size = node.inode, node.data, 0
    if node.is_directory:
        data = _directory(node)
    if inode.kind in (stat.S_IFDIR, stat.S_IFLNK):
        size = len(data)
    elif inode.kind == stat.S_IFREG:
        size = inode.size
    where, layout = 0, FLAT
    if _inline_bytes(node):
        layout = INLINE
    elif size:
        where = end // BLOCK_BYTES
        end += -(-size // BLOCK_BYTES) * BLOCK_BYTES
        if end > MAX_BYTES:
            raise Unsupported(f"the disk's files have more than {MAX_BYTES >> 40} TiB, with their holes")
        if data:
            os.pwrite(descriptor, data, where * BLOCK_BYTES)
        elif source is not None:
            _copy(source, inode, descriptor, where * BLOCK_BYTES)
    if inode.kind in (stat.S_IFCHR, stat.S_IFBLK):
        major, minor = inode.rdev
        where = minor & 0xFF | major << 8 | (minor & ~0xFF) << 12
    mtime_s = max(0, inode.mtime_s)
    head = INODE.pack(
        1 | layout << 1, 0, inode.mode, 0, size, where, inode.number, inode.uid, inode.gid, mtime_s,
        inode.mtime_ns % 1_000_000_000, max(1, inode.links),
    )  # fmt: skip
    os.pwrite(descriptor, head + (data if layout == INLINE else b""), node.nid * 32)
    return end


def _copy(source: Ext4, inode: Inode, target: int, start: int) -> None:
    """The content of a regular file; holes stay holes."""
    for extent in source.extents(inode):
        at = extent.logical * source.block_bytes
        length = min(extent.count * source.block_bytes, inode.size - at)
        offset = extent.physical * source.block_bytes
        done = 0
        while done < length:
            copied = os.copy_file_range(source.descriptor, target, length - done, offset + done, start + at + done)
            if not copied:
                raise CorruptData(f"inode {inode.number} of the disk has content outside of it")
            done += copied
