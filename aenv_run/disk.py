"""Root disks: qcow2 headers written and read directly, the block graph of a machine, and new ext4 images."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aenv_run import nbd_client, process
from aenv_run.errors import AenvError, CorruptData, InvalidInput, MissingDependency, NoSpace
from aenv_run.nbd import DiskLayer, ServedLayer

CLUSTER_BITS = 16
MAGIC = b"QFI\xfb"
#: Header fields of version 3 up to header_length (docs/interop/qcow2.txt of QEMU).
HEADER = struct.Struct(">4sIQIIQIIQQIIQ QQQII")
INCOMPATIBLE_DIRTY, INCOMPATIBLE_COMPRESSION, INCOMPATIBLE_EXTENDED_L2 = 1 << 0, 1 << 3, 1 << 4
#: Any other bit is refused. Above all an external data file (bit 2), which would let an image name any host file.
UNDERSTOOD = INCOMPATIBLE_DIRTY | INCOMPATIBLE_COMPRESSION | INCOMPATIBLE_EXTENDED_L2
#: The same for every image, so that equal trees give equal bytes. Two file systems never meet in one machine.
IMAGE_UUID = "5a1f1d6e-0a3b-4c55-9a3e-aeaeaeaeaeae"
IMAGE_TIME_S = 1_700_000_000

#: How long an engine waits for the next block server when one died. QEMU tries after 0, 1, 3, 7, 15, 31 s and then
#: every 16 s: with 30 a server that is back after 16 s would be noticed too late, and each read until the next try
#: would fail. A capture waits as long. An engine that begins has just seen the server: it waits less.
RECONNECT_S, OPEN_S = 120, 30

Node = dict[str, "NodeValue"]
NodeValue = str | int | bool | None | Node


@dataclass(frozen=True)
class ImageInfo:
    """What a qcow2 header says."""

    virtual_bytes: int


def read_header(layer: DiskLayer) -> ImageInfo:
    """The header of a qcow2 layer; CorruptData when it is none, or one that reaches outside itself.

    Backing names need no check: the block graph is given explicitly and overrides them.
    """
    path = layer if isinstance(layer, Path) else layer.name
    raw = _head(layer)
    if len(raw) < 72 or raw[:4] != MAGIC:
        raise CorruptData(f"disk layer {path} is no qcow2 image")
    fields = HEADER.unpack(raw.ljust(HEADER.size, b"\0"))
    version, virtual_bytes, encryption, incompatible = fields[1], fields[5], fields[6], fields[13]
    if version not in (2, 3) or encryption or (version == 3 and incompatible & ~UNDERSTOOD):
        raise CorruptData(f"disk layer {path} uses a qcow2 feature that is refused (features {incompatible:#x})")
    return ImageInfo(virtual_bytes)


def _head(layer: DiskLayer) -> bytes:
    if not isinstance(layer, Path):
        return nbd_client.read(layer, 0, min(HEADER.size, layer.size_bytes)) if layer.size_bytes else b""
    try:
        with layer.open("rb") as file:
            return file.read(HEADER.size)
    except FileNotFoundError as error:
        raise CorruptData(f"disk layer {layer} is missing") from error


def overlay_bytes(virtual_bytes: int) -> int:
    """The file size of an overlay that holds nothing yet."""
    return (3 + _l1_clusters(virtual_bytes)) << CLUSTER_BITS


def _l1_entries(virtual_bytes: int) -> int:
    covered = 1 << (2 * CLUSTER_BITS - 3)  # by one L2 table
    return -(-virtual_bytes // covered)


def _l1_clusters(virtual_bytes: int) -> int:
    return max(1, -(-_l1_entries(virtual_bytes) * 8 >> CLUSTER_BITS))


def write_overlay(path: Path, virtual_bytes: int) -> None:
    """Create an empty qcow2 image: header, refcount table, refcount block, L1 table; a cluster or more each.

    0.6 ms against 18 ms of `qemu-img create` (measured). It names no backing file: see ``read_header``.
    """
    cluster = 1 << CLUSTER_BITS
    l1_clusters = _l1_clusters(virtual_bytes)
    header = HEADER.pack(
        MAGIC, 3, 0, 0, CLUSTER_BITS, virtual_bytes, 0, _l1_entries(virtual_bytes), 3 * cluster,
        cluster, 1, 0, 0, 0, 0, 0, 4, HEADER.size,
    )  # fmt: skip
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, header, 0)
        os.pwrite(descriptor, struct.pack(">Q", 2 * cluster), cluster)
        os.pwrite(descriptor, struct.pack(">H", 1) * (3 + l1_clusters), 2 * cluster)
        os.ftruncate(descriptor, (3 + l1_clusters) * cluster)
    finally:
        os.close(descriptor)


def _file_node(path: Path, name: str, read_only: bool) -> Node:
    # no-flush: a sandbox's overlay need not survive a power cut; what is committed is fsynced by the repository.
    return {
        "driver": "file",
        "node-name": f"file-{name}",
        "filename": str(path),
        "read-only": read_only,
        # A sealed overlay is opened again at each later capture, and its mode forbids that its owner writes it.
        **({} if read_only else {"auto-read-only": True}),
        "discard": "unmap",
        "cache": {"no-flush": True, "direct": False},
    }


def _served_node(layer: ServedLayer, name: str) -> Node:
    """While its server is away requests wait for the next one, and then fail."""
    return {
        "driver": "nbd",
        "node-name": f"file-{name}",
        "server": {"type": "unix", "path": str(layer.socket)},
        "export": layer.export,
        "read-only": True,
        "reconnect-delay": RECONNECT_S,
        "open-timeout": OPEN_S,
    }


def layer_node(layer: DiskLayer, name: str, backing: str | None) -> Node:
    """A sealed layer. Opened with QEMU's image locks as they come: a live writer of it is an error."""
    return {
        "driver": "qcow2",
        "node-name": name,
        "read-only": True,
        "backing": backing,
        "file": _file_node(layer, name, True) if isinstance(layer, Path) else _served_node(layer, name),
    }


def overlay_node(path: Path, name: str, backing: str | None) -> Node:
    """The writable top. ``discard`` on both nodes gives blocks that the guest trims back to the host."""
    return {
        "driver": "qcow2",
        "node-name": name,
        "read-only": False,
        "discard": "unmap",
        "cache": {"no-flush": True, "direct": False},
        "backing": backing,
        "file": _file_node(path, name, False),
    }


def absolute(layers: Iterable[DiskLayer]) -> tuple[DiskLayer, ...]:
    """The same, wherever the process stands that looks at them."""
    return tuple(one.absolute() if isinstance(one, Path) else one for one in layers)


def located(layers: Iterable[DiskLayer], directory: Path) -> tuple[DiskLayer, ...]:
    """As an engine in ``directory`` opens them."""
    return tuple(one.absolute() if isinstance(one, Path) else one.seen_from(directory) for one in layers)


def local(layers: Iterable[DiskLayer]) -> tuple[Path, ...]:
    """They are files, all of them; InvalidInput for one that is served."""
    found = tuple(one.absolute() for one in layers if isinstance(one, Path))
    if served := [one.name for one in layers if not isinstance(one, Path)]:
        raise InvalidInput(f"disk layer {served[0]} is not a file here, and this needs it to be one")
    return found


def graph(layers: tuple[DiskLayer, ...], overlay: Path, overlay_name: str) -> list[Node]:
    """The whole chain as ``-blockdev`` values, base first. Explicit, so no string of a header is followed."""
    nodes: list[Node] = []
    below: str | None = None
    for index, layer in enumerate(layers):
        nodes.append(layer_node(layer, f"layer{index}", below))
        below = f"layer{index}"
    return [*nodes, overlay_node(overlay, overlay_name, below)]


def over(layer: Path, backing: Node | None) -> Node:
    """A layer above ``backing``, for qemu-img and qemu-io. As explicit as ``graph``."""
    return {"driver": "qcow2", "file": {"driver": "file", "filename": str(layer.absolute())}, "backing": backing}


def chain_node(layers: tuple[Path, ...]) -> Node:
    """A whole chain."""
    node: Node | None = None
    for layer in layers:
        node = over(layer, node)
    assert node is not None
    return node


def raw_node(path: Path) -> Node:
    """A raw image."""
    return {"driver": "raw", "file": {"driver": "file", "filename": str(path.absolute())}}


def named(node: Node) -> str:
    """The name by which these programs open a node."""
    return "json:" + json.dumps(node)


async def flatten(layers: tuple[Path, ...], target: Path, *, timeout_s: float = 900.0) -> None:
    """Write the whole disk of a chain as one sparse raw file."""
    await process.check(
        ["qemu-img", "convert", "-O", "raw", named(chain_node(layers)), str(target)],
        what="cannot read the disk's layers", fix="free disk space", timeout_s=timeout_s,
    )  # fmt: skip


def check_chain(layers: Sequence[DiskLayer], disk_mib: int) -> int:
    """The disk's size in bytes, equal in every layer and to the machine's; an error names what is not."""
    if not layers:
        raise InvalidInput("a machine needs at least one disk layer")
    expected = disk_mib << 20
    for layer in layers:
        found = read_header(layer).virtual_bytes
        if found != expected:
            raise InvalidInput(
                f"disk layer {layer.name} has {found / (1 << 20):g} MiB and the machine's disk {disk_mib} MiB",
                fix=f"use a machine with disk_mib={found >> 20}, or build the base again with that disk size",
            )
    return expected


async def make_image(tree: Path, size_mib: int, target: Path, *, timeout_s: float = 900.0) -> None:
    """Make ``target``, a sparse qcow2 image with an ext4 of ``size_mib`` that holds ``tree``.

    Needs neither root nor a mount. The same tree gives the same bytes, and so does a copy of it that keeps names,
    modes, owners and mtimes: ids, hash seed and all other times are fixed. The journal is kept, small: a sandbox
    may be captured while it writes.
    """
    raw = target.with_name(target.name + ".raw")
    try:
        await _make_ext4(tree, size_mib, raw, timeout_s)
        await _level_times(raw, timeout_s)
        await process.check(
            ["qemu-img", "convert", "-f", "raw", "-O", "qcow2", "-o", f"cluster_size={1 << CLUSTER_BITS}",
             str(raw), str(target)],
            what=f"cannot write the disk image {target}", fix="install qemu-utils; free disk space",
            timeout_s=timeout_s,
        )  # fmt: skip
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    finally:
        raw.unlink(missing_ok=True)


def program(name: str) -> str:
    """Its path: a user's PATH often lacks the sbin directories."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin")
    if found is None:
        raise MissingDependency(f"{name} is not installed", fix="apt install e2fsprogs")
    return found


#: Said in full: releases of e2fsprogs have other defaults (1.47.1 adds orphan_file); equal trees must give equal
#: images that every kernel since 4.4 mounts.
FEATURES = (
    "has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,flex_bg,sparse_super,large_file,huge_file,"
    "dir_nlink,extra_isize,metadata_csum"
)


def _fixed_time() -> dict[str, str]:
    return {**os.environ, "E2FSPROGS_FAKE_TIME": str(IMAGE_TIME_S), "LC_ALL": "C"}


async def _make_ext4(tree: Path, size_mib: int, raw: Path, timeout_s: float) -> None:
    with raw.open("xb") as file:
        file.truncate(size_mib << 20)
    extended = f"hash_seed={IMAGE_UUID},lazy_itable_init=0,lazy_journal_init=0,nodiscard"
    argv = [
        program("mke2fs"),
        "-b",
        "4096",
        "-t",
        "ext4",
        "-q",
        "-F",
        "-m",
        "0",
        "-U",
        IMAGE_UUID,
        "-L",
        "aenv-root",
        "-O",
        f"none,{FEATURES}",
        "-E",
        extended,
    ]
    argv += ["-J", "size=8"] if size_mib >= 256 else ["-J", "size=4"]
    done = await process.run(
        [*argv, "-d", str(tree), str(raw)],
        timeout_s=timeout_s,
        env=_fixed_time(),
    )
    if done.exit_code == 0:
        return
    said = done.stderr.decode(errors="replace").strip()
    if "Could not allocate" in said or "No free space" in said:
        raise NoSpace(f"{tree} does not fit on a disk of {size_mib} MiB", fix="give the machine a larger disk")
    raise AenvError(f"cannot make a file system of {tree}: mke2fs exited with {done.exit_code}: {said[-2000:]}")


def used_inodes(raw: Path) -> list[int]:
    """The inodes in use of a fresh ext4 image: the root and all from the first that is not reserved."""
    with raw.open("rb") as file:
        file.seek(1024)
        superblock = file.read(1024)
        (count,) = struct.unpack_from("<I", superblock, 0)
        first_block, log_block, per_group = (struct.unpack_from("<I", superblock, at)[0] for at in (20, 24, 40))
        (first_inode,), (descriptor_size,) = (
            struct.unpack_from(form, superblock, at) for form, at in (("<I", 84), ("<H", 254))
        )
        descriptor_size = descriptor_size or 32
        block = 1024 << log_block
        file.seek((first_block + 1) * block)
        descriptors = file.read(-(-count // per_group) * descriptor_size)
        found = [2]
        for group in range(-(-count // per_group)):
            at = group * descriptor_size
            low, flags = struct.unpack_from("<I", descriptors, at + 4)[0], descriptors[at + 0x12]
            high = struct.unpack_from("<I", descriptors, at + 0x24)[0] if descriptor_size >= 64 else 0
            if flags & 1:  # no inode of this group was ever used
                continue
            file.seek((high << 32 | low) * block)
            bitmap = int.from_bytes(file.read(per_group // 8), "little")
            numbers = range(group * per_group + 1, (group + 1) * per_group + 1)
            found += [one for index, one in enumerate(numbers) if bitmap >> index & 1 and one >= first_inode]
    return found


async def _level_times(raw: Path, timeout_s: float) -> None:
    """mke2fs copies ctime and atime of the tree, which nobody can set; debugfs overwrites them."""
    commands = "".join(
        f"sif <{inode}> ctime @{IMAGE_TIME_S}\nsif <{inode}> atime @{IMAGE_TIME_S}\n" for inode in used_inodes(raw)
    )
    await process.check(
        [program("debugfs"), "-w", "-f", "-", str(raw)],
        what=f"cannot set the times in {raw}", stdin=commands.encode(), timeout_s=timeout_s, limit_bytes=1 << 30,
        env=_fixed_time(),
    )  # fmt: skip
