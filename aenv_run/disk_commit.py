"""The disk of a guest that wrote into memory: its own account of it, made a qcow2 layer above the chain it has.

Needs neither root nor a mount: a plain copy of the disk that it started with, debugfs, qemu-img.
"""

from __future__ import annotations

import asyncio
import shutil
import stat
from pathlib import Path

from aenv_run import disk, disk_pack, erofs, process
from aenv_run.disk_pack import Packed
from aenv_run.erofs import Node
from aenv_run.errors import AenvError, CorruptData, NoSpace
from aenv_run.ext4 import Ext4

COMMIT_TIMEOUT_S = 900.0
NO_ROOM = ("could not allocate", "no free space", "no space left")


async def make_layer(pack: Path, base: tuple[Path, ...], chain: tuple[Path, ...], target: Path, keep: str) -> None:
    """Write ``target``, the layer above ``chain`` whose disk is what ``pack`` tells.

    ``base`` is the part of the chain that the guest was shown, with an empty file ``keep`` in its /tmp. Scratch is
    beside ``pack`` and removed. The layer is compared with what was told before it counts.
    """
    scratch = pack.with_name(pack.name + ".scratch")
    scratch.mkdir()
    try:
        raw = scratch / "raw"
        await disk.flatten(base, raw)
        await replay(raw)
        root, script = await asyncio.to_thread(_script, pack, raw, scratch, keep)
        done = await process.check(
            [disk.program("debugfs"), "-w", "-f", "-", str(raw)],
            what="cannot write the sandbox's files into a disk image",
            stdin=script.encode(errors="surrogateescape"), timeout_s=COMMIT_TIMEOUT_S, limit_bytes=1 << 30,
        )  # fmt: skip
        await _check(raw, root, done.stderr.decode(errors="replace"))
        await _delta(raw, chain, target)
    finally:
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)


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

    if different := await asyncio.to_thread(compare):
        raise AenvError(f"the sandbox's disk could not be written as it is: {different}; {said[-500:]}")
    await replay(raw)


def _difference(root: Packed, made: Node) -> str:
    """The first file that is not as it was told; empty when all are."""
    waiting = [(root, made)]
    while waiting:
        packed, node = waiting.pop()
        line, inode = packed.line, node.inode
        if line.mount:
            continue
        same = (line.mode, line.uid, line.gid) == (inode.mode, inode.uid, inode.gid)
        if packed.kind == stat.S_IFREG and packed.content is not None:
            same = same and line.size == inode.size
        if packed.kind == stat.S_IFLNK:
            same = same and line.target == node.data
        sockets = {name for name, one in node.children.items() if one.inode.kind == stat.S_IFSOCK}
        if not same or packed.children.keys() != node.children.keys() - sockets:
            return repr(line.path)
        waiting += [(child, node.children[name]) for name, child in packed.children.items()]
    return ""


async def _delta(raw: Path, chain: tuple[Path, ...], target: Path) -> None:
    """Only what differs from the chain. The layer names no backing file, as no layer does."""
    made = raw.with_name("layer.qcow2")
    options = [
        "-f",
        "qcow2",
        "-o",
        f"cluster_size={1 << disk.CLUSTER_BITS}",
        "-b",
        disk.raw_name(raw),
        "-F",
        "raw",
    ]
    for arguments in (
        ["create", *options, str(made)],
        ["rebase", "-f", "qcow2", "-b", disk.chain_name(chain), "-F", "qcow2", str(made)],
        ["rebase", "-u", "-f", "qcow2", "-b", "", str(made)],
    ):
        await process.check(
            ["qemu-img", *arguments], what="cannot make the layer of a disk", fix="free disk space",
            timeout_s=COMMIT_TIMEOUT_S,
        )  # fmt: skip
    made.rename(target)
