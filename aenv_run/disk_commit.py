"""The disk of a guest that wrote into memory: its own account of it, made a qcow2 layer above the chain it has.

Needs neither root nor a mount: a plain copy of the disk that it started with, debugfs, qemu-img.
"""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, TypeAdapter

from aenv_run import disk, disk_pack, erofs, process
from aenv_run.disk_pack import UNTOLD, Packed
from aenv_run.erofs import Node
from aenv_run.errors import AenvError, CorruptData, NoSpace
from aenv_run.ext4 import Ext4
from aenv_run.memory_files import copy_sparse, data_ranges
from aenv_run.threads import in_thread

COMMIT_TIMEOUT_S = 900.0
BLOCK_BYTES, READ_BYTES = 4096, 16 << 20
NO_ROOM = ("could not allocate", "no free space", "no space left")


class MapEntry(BaseModel):
    """One line of ``qemu-img map``: ``depth`` 0 is the chain's top."""

    start: int
    length: int
    depth: int


MAP = TypeAdapter(list[MapEntry])


@dataclass(frozen=True)
class Disk:
    """The disk that a guest was shown.

    ``metadata`` is a sparse raw file with all of the file system but the content of files, which has an empty file
    ``keep`` in the guest's /tmp. ``base`` are its layers, the first of ``chain``.
    """

    metadata: Path
    base: tuple[Path, ...]
    chain: tuple[Path, ...]
    keep: str


async def make_layer(pack: Path, shown: Disk, target: Path) -> None:
    """Write ``target``, the layer above the chain whose disk is what ``pack`` tells.

    Scratch is beside ``pack`` and removed. The layer is compared with what was told before it counts.
    """
    scratch = pack.with_name(pack.name + ".scratch")
    await in_thread(shutil.rmtree, scratch, ignore_errors=True)  # of a process that was killed
    scratch.mkdir()
    try:
        work = scratch / "work"
        await in_thread(copy_sparse, shown.metadata, work)
        root, script = await in_thread(_script, pack, work, scratch, shown.keep)
        done = await process.check(
            [disk.program("debugfs"), "-w", "-f", "-", str(work)],
            what="cannot write the sandbox's files into a disk image",
            stdin=script.encode(errors="surrogateescape"), timeout_s=COMMIT_TIMEOUT_S, limit_bytes=1 << 30,
        )  # fmt: skip
        await _check(work, root, done.stderr.decode(errors="replace"))
        changed = await in_thread(_changed, work, shown.metadata, root)
        made = scratch / "layer.qcow2"
        await _write_layer(made, work, changed, shown)
        made.rename(target)
    finally:
        await in_thread(shutil.rmtree, scratch, ignore_errors=True)


async def save_metadata(raw: Path, target: Path) -> None:
    """All of a file system but the content of files: what ``Disk.metadata`` is."""
    await process.check(
        [disk.program("e2image"), "-r", str(raw), str(target)], what="cannot save the metadata of a disk",
        timeout_s=COMMIT_TIMEOUT_S,
    )  # fmt: skip


async def replay(raw: Path) -> None:
    """Replay the journal and look at all of the file system; CorruptData when it is not sound."""
    # -p repairs nothing of doubt. Exit codes: e2fsck(8).
    for arguments, accepted in ((["-E", "journal_only", "-p"], (0, 1)), (["-f", "-n"], (0,))):
        done = await process.run([disk.program("e2fsck"), *arguments, str(raw)], timeout_s=COMMIT_TIMEOUT_S)
        if done.exit_code not in accepted:
            said = (done.stdout + done.stderr).decode(errors="replace").strip()[-1500:]
            raise CorruptData(
                f"the file system of the disk is damaged, it is not used: {said}",
                fix="restore the disk from another snapshot, or build it again",
            )


def _script(pack: Path, raw: Path, scratch: Path, keep: str) -> tuple[Packed, str]:
    contents = scratch / "files"
    contents.mkdir()
    with pack.open("rb") as source:
        root = disk_pack.read(source, contents, raw.stat().st_size)
    with Ext4(raw) as opened:
        tree = erofs.read_tree(opened, keep)
    return root, disk_pack.Script(tree.by_nid(), contents).make(root, tree.root)


async def _check(raw: Path, root: Packed, said: str) -> None:
    """debugfs goes on after an error, so the result is read again and compared."""
    if any(words in said.lower() for words in NO_ROOM):
        raise NoSpace(
            "the sandbox's files do not fit on its disk, so it cannot be captured; it runs on",
            fix="remove files, or use a machine with a larger disk",
        )

    def compare() -> str:
        with Ext4(raw) as opened:
            return _difference(root, erofs.read_tree(opened).root)

    if different := await in_thread(compare):
        raise AenvError(f"the sandbox's disk could not be written as it is: {different}; {said[-500:]}")
    await replay(raw)


def _difference(root: Packed, made: Node) -> str:
    """The first file that is not as it was told; empty when all are."""
    waiting = [(root, made)]
    while waiting:
        packed, node = waiting.pop()
        line, inode = packed.line, node.inode
        if line.mount or line.whole or line.same:
            continue
        same = (line.mode, line.uid, line.gid) == (inode.mode, inode.uid, inode.gid)
        if packed.kind == stat.S_IFREG and packed.content is not None:
            same = same and line.size == inode.size
        if packed.kind == stat.S_IFLNK:
            same = same and line.target == node.data
        if packed.kind in (stat.S_IFCHR, stat.S_IFBLK):
            same = same and line.device == inode.rdev
        untold = {name for name, one in node.children.items() if one.inode.kind in UNTOLD}
        if not same or packed.children.keys() - untold != node.children.keys() - untold:
            return repr(line.path)
        waiting += [(child, node.children[name]) for name, child in packed.children.items()]
    return ""


def _changed(work: Path, before: Path, root: Packed) -> list[tuple[int, int]]:
    """Offsets and lengths of what was written: what differs, and all blocks of new files, also those of zeroes."""
    blocks: set[int] = set()
    with work.open("rb") as new, before.open("rb") as old:
        for start, length in data_ranges(new.fileno()):
            for offset in range(start // BLOCK_BYTES * BLOCK_BYTES, start + length, BLOCK_BYTES):
                if os.pread(new.fileno(), BLOCK_BYTES, offset) != os.pread(old.fileno(), BLOCK_BYTES, offset):
                    blocks.add(offset // BLOCK_BYTES)
    with Ext4(work) as opened:
        each = opened.block_bytes // BLOCK_BYTES
        waiting = [(root, erofs.read_tree(opened).root)]
        while waiting:
            packed, node = waiting.pop()
            if packed.content is not None and not packed.line.mount:
                for one in opened.extents(node.inode):
                    blocks.update(range(one.physical * each, (one.physical + one.count) * each))
            waiting += [(child, node.children[name]) for name, child in packed.children.items()]
    return _ranges(sorted(blocks))


def _ranges(blocks: list[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for block in blocks:
        offset = block * BLOCK_BYTES
        if found and sum(found[-1]) == offset and found[-1][1] < READ_BYTES:
            found[-1] = (found[-1][0], found[-1][1] + BLOCK_BYTES)
        else:
            found.append((offset, BLOCK_BYTES))
    return found


async def _write_layer(made: Path, work: Path, changed: list[tuple[int, int]], shown: Disk) -> None:
    """What changed, from ``work``; and what layers above the base have and changed no more, from the base.

    qemu-io copies what it reads (-C). The layer's clusters are blocks, so nothing has to be filled up.
    """
    options = ["-f", "qcow2", "-o", f"cluster_size={BLOCK_BYTES}"]
    await _qemu(["qemu-img", "create", "-q", *options, str(made), str(work.stat().st_size)])
    await _copy(made, disk.raw_node(work), changed)
    if len(shown.chain) > len(shown.base):
        above = await _written_above(shown)
        await _copy(made, disk.chain_node(shown.base), above)


async def _written_above(shown: Disk) -> list[tuple[int, int]]:
    """Where the chain has something of a layer above the base."""
    above = len(shown.chain) - len(shown.base)
    told = await _qemu(["qemu-img", "map", "--output=json", disk.named(disk.chain_node(shown.chain))])
    found = []
    for entry in MAP.validate_json(told):
        if entry.depth < above:
            ends = range(entry.start, entry.start + entry.length, READ_BYTES)
            found += [(start, min(READ_BYTES, entry.start + entry.length - start)) for start in ends]
    return found


async def _copy(made: Path, source: disk.Node, ranges: list[tuple[int, int]]) -> None:
    if not ranges:
        return
    name = disk.named(disk.over(made, source))
    script = "".join(f"read -q {offset} {length}\n" for offset, length in ranges)
    said = await _qemu(["qemu-io", "-C", "-t", "unsafe", name], script.encode())
    if b"fail" in said or b"rror" in said:
        raise AenvError(f"cannot make the layer of a disk: {said.decode(errors='replace')[-500:]}")


async def _qemu(argv: list[str], stdin: bytes | None = None) -> bytes:
    done = await process.check(
        argv, what="cannot make the layer of a disk", fix="free disk space", timeout_s=COMMIT_TIMEOUT_S,
        stdin=stdin, limit_bytes=1 << 28,
    )  # fmt: skip
    return done.stdout + (done.stderr if stdin else b"")
