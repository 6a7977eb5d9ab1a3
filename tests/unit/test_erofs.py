"""An ext4 read without a mount and written as EROFS: what arrives, and what a damaged one may cause."""

from __future__ import annotations

import os
import random
import shutil
import stat
import struct
from pathlib import Path

import pytest
import pytest_asyncio

from aenv_run import disk, erofs
from aenv_run.disk_commit import save_metadata
from aenv_run.erofs import Node
from aenv_run.errors import AenvError, CorruptData, Unsupported
from aenv_run.ext4 import Ext4, Inode

MANY = 700
LONG_LINK = "/" + "x/" * 150 + "x"  # no part of it is longer than a name may be


def make_tree(root: Path) -> Path:
    root.mkdir()
    for name in ("dev", "many", "odd"):
        (root / name).mkdir()
    for number in range(MANY):
        (root / "many" / f"a file with a long name, {number:05}").touch()
    (root / "odd" / "new\nline").write_text("odd")
    (root / "odd" / ("n" * 255)).write_text("long")
    (root / "short").symlink_to("odd")
    (root / "long").symlink_to(LONG_LINK)
    (root / "hard").write_bytes(b"h" * 5000)
    (root / "odd" / "hard").hardlink_to(root / "hard")
    with (root / "sparse").open("wb") as file:
        file.seek(3 << 20)
        file.write(b"end")
    (root / "tmp").symlink_to("/etc")
    if os.geteuid() == 0:
        os.chown(root / "hard", 70000, 80000)
        os.mknod(root / "dev" / "node", stat.S_IFCHR | 0o620, os.makedev(300, 70000))
    os.mkfifo(root / "fifo")
    (root / "hard").chmod(0o4751)
    return root


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree above as a raw ext4."""
    root = tmp_path_factory.mktemp("erofs")
    await disk.make_image(make_tree(root / "tree"), 64, root / "image.qcow2")
    await disk.flatten((root / "image.qcow2",), root / "raw")
    return root / "raw"


def read_back(image: Path) -> dict[str, tuple[int, int, int, int, bytes]]:
    """Mode, owner, group, number and content of every file of an EROFS image, read by its format alone."""
    data = image.read_bytes()
    found: dict[str, tuple[int, int, int, int, bytes]] = {}
    (root,) = struct.unpack_from("<H", data, 1024 + 14)

    def visit(nid: int, path: str) -> None:
        at = nid * 32
        layout, _, mode, _, size, where, number, uid, gid, *_ = erofs.INODE.unpack_from(data, at)
        start = at + erofs.INODE.size if layout >> 1 == erofs.INLINE else where * erofs.BLOCK_BYTES
        has_content = stat.S_IFMT(mode) in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
        content = data[start : start + size] if has_content else struct.pack("<I", where)
        found[path] = (mode, uid, gid, number, content)
        if not stat.S_ISDIR(mode):
            return
        assert size % erofs.MEMORY_ENTRY_BYTES, path
        names = []
        for block_at in range(0, size, erofs.BLOCK_BYTES):
            block = content[block_at : block_at + erofs.BLOCK_BYTES]
            count = erofs.DIRENT.unpack_from(block)[1] // erofs.DIRENT.size
            entries = [erofs.DIRENT.unpack_from(block, index * erofs.DIRENT.size) for index in range(count)]
            ends = [entry[1] for entry in entries[1:]] + [len(block)]
            assert len(block) - entries[-1][1] <= 255, "gVisor takes the padding for a part of the name"
            names += [(block[e[1] : end].rstrip(b"\0"), e[0]) for e, end in zip(entries, ends, strict=True)]
        assert [name for name, _ in names] == sorted(name for name, _ in names)
        for name, child in names:
            if name not in (b".", b".."):
                visit(child, f"{path}/{os.fsdecode(name)}")

    visit(root, "")
    return found


def write(raw: Path, target: Path) -> dict[str, tuple[int, int, int, int, bytes]]:
    with Ext4(raw) as source:
        erofs.write(source, erofs.read_tree(source, ".keep"), target)
    return read_back(target)


async def test_everything_arrives_as_it_was(raw: Path, tmp_path: Path) -> None:
    found = write(raw, tmp_path / "image")
    tree = raw.parent / "tree"
    for path in tree.rglob("*"):
        name = f"/{path.relative_to(tree)}"
        if name == "/tmp":
            continue
        facts = path.lstat()
        mode, uid, gid, _, content = found.pop(name)
        assert (mode, uid, gid) == (facts.st_mode, facts.st_uid, facts.st_gid), name
        if path.is_symlink():
            assert content == os.fsencode(path.readlink())
        elif path.is_file():
            assert content == path.read_bytes(), name
    assert found.pop("/tmp/.keep")[4] == b""
    assert stat.S_IMODE(found.pop("/tmp")[0]) == 0o1777  # a real directory, whatever the image had there
    assert set(found) == {"", "/lost+found", "/proc", "/run", "/sys"}


async def test_the_same_disk_gives_the_same_image_and_numbers(raw: Path, tmp_path: Path) -> None:
    assert write(raw, tmp_path / "one") and write(raw, tmp_path / "other")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    with Ext4(raw) as source:
        tree = erofs.read_tree(source, ".keep")
    hard = tree.root.children[b"hard"]
    assert tree.by_nid()[hard.nid] is hard is tree.root.children[b"odd"].children[b"hard"]


async def test_the_metadata_alone_says_the_same_of_all_but_content(raw: Path, tmp_path: Path) -> None:
    await save_metadata(raw, tmp_path / "metadata")

    def told(path: Path) -> list[tuple[int, int, bytes, list[bytes]]]:
        with Ext4(path) as source:
            return [
                (node.inode.mode, node.inode.size, node.data, list(node.children))
                for node in erofs.read_tree(source).files
            ]

    assert told(tmp_path / "metadata") == told(raw)


async def test_a_damaged_file_system_is_an_error_of_ours(raw: Path, tmp_path: Path) -> None:
    numbers = random.Random(20)
    whole = raw.read_bytes()
    with Ext4(raw) as source:
        used = [source.inode(number) for number in (2, 12, 13, 14)]
        places = [1024 + at for at in range(0, 344, 4)]
        places += [extent.physical * source.block_bytes for inode in used for extent in source.extents(inode)]
        table = source._table(0) * source.block_bytes
    failed = 0
    for _ in range(60):
        bad = bytearray(whole)
        for _ in range(3):
            at = numbers.choice([*places, table + numbers.randrange(40 * 256), 4096 + numbers.randrange(64)])
            bad[at : at + 4] = numbers.choice([b"\xff\xff\xff\xff", b"\0\0\0\0", numbers.randbytes(4)])
        path = tmp_path / "bad"
        path.write_bytes(bad)
        (tmp_path / "image").unlink(missing_ok=True)
        try:
            with Ext4(path) as source:
                erofs.write(source, erofs.read_tree(source), tmp_path / "image")
        except AenvError as error:
            assert isinstance(error, CorruptData | Unsupported)
            failed += 1
    assert failed > 10


@pytest.mark.parametrize("kind", ["extents", "pointers"])
def test_blocks_that_name_one_block_many_times_are_no_forest(raw: Path, tmp_path: Path, kind: str) -> None:
    """A few blocks could make a tree of a billion extents, in which a reader would be lost."""
    copy = tmp_path / "raw"
    shutil.copy(raw, copy)
    with Ext4(copy) as source:
        above, below = source.blocks - 2, source.blocks - 1
        size = source.block_bytes
    with copy.open("r+b") as file:
        file.seek(above * size)
        if kind == "extents":
            file.write(struct.pack("<HHHHI", 0xF30A, 340, 340, 1, 0) + struct.pack("<IIHH", 0, below, 0, 0) * 340)
            file.seek(below * size)
            file.write(struct.pack("<HHHHI", 0xF30A, 0, 340, 0, 0))
            content = struct.pack("<HHHHI", 0xF30A, 1, 4, 2, 0) + struct.pack("<IIHH", 0, above, 0, 0)
        else:
            file.write(struct.pack("<I", below) * (size // 4))
            content = struct.pack("<15I", *[0] * 13, above, 0)
    flags = 0x80000 if kind == "extents" else 0
    inode = Inode(12, stat.S_IFREG | 0o644, 0, 0, 1 << 50, 0, 0, 1, (0, 0), flags, content.ljust(60, b"\0"))
    with Ext4(copy) as source, pytest.raises(CorruptData, match="twice"):
        source.extents(inode)


def test_a_directory_that_gvisor_would_misread_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="long names"):
        erofs._directory(_directory_of([b"%d" % number + b"x" * 249 for number in range(10, 40)]))


def _directory_of(names: list[bytes]) -> Node:
    inode = Inode(2, stat.S_IFDIR | 0o755, 0, 0, 0, 0, 0, 2, (0, 0), 0, b"")
    return Node(inode, {name: Node(inode) for name in names})
