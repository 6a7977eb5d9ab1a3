"""qcow2 headers that QEMU agrees with, images that are the same each time, hostile layers that are refused."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from aenv_run import disk, process
from aenv_run.digest import digest_file
from aenv_run.errors import CorruptData, InvalidInput, NoSpace

MIB = 1 << 20


@pytest.mark.parametrize("size_bytes", [64 * MIB, 4096 * MIB, 512 * MIB + 4096, 16 << 40])
def test_qemu_takes_the_overlay(tmp_path: Path, size_bytes: int) -> None:
    path = tmp_path / "overlay.qcow2"
    disk.write_overlay(path, size_bytes)
    assert path.stat().st_size == disk.overlay_bytes(size_bytes)
    info = json.loads(
        subprocess.run(["qemu-img", "info", "--output=json", path], capture_output=True, check=True).stdout
    )
    assert (info["format"], info["virtual-size"]) == ("qcow2", size_bytes)
    assert "backing-filename" not in info
    subprocess.run(["qemu-img", "check", path], check=True, capture_output=True)
    assert disk.read_header(path).virtual_bytes == size_bytes
    with pytest.raises(FileExistsError):
        disk.write_overlay(path, size_bytes)


@pytest.mark.parametrize(
    ("offset", "value"),
    [(0, b"RAWX"), (4, struct.pack(">I", 9)), (32, struct.pack(">I", 1)), (72, struct.pack(">Q", 4))],
    ids=["magic", "version", "encrypted", "data-file"],
)
def test_a_layer_that_could_reach_outside_itself_is_refused(tmp_path: Path, offset: int, value: bytes) -> None:
    path = tmp_path / "layer.qcow2"
    disk.write_overlay(path, 64 * MIB)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(value)
    with pytest.raises(CorruptData, match=r"layer\.qcow2"):
        disk.check_chain((path,), 64)


def test_an_external_data_file_of_qemu_img_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "layer.qcow2"
    subprocess.run(
        ["qemu-img", "create", "-q", "-f", "qcow2", "-o", f"data_file={tmp_path}/secret", path, "64M"], check=True
    )
    with pytest.raises(CorruptData, match="refused"):
        disk.read_header(path)


def test_a_missing_or_other_sized_layer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorruptData, match="missing"):
        disk.check_chain((tmp_path / "absent.qcow2",), 64)
    disk.write_overlay(tmp_path / "a.qcow2", 64 * MIB)
    disk.write_overlay(tmp_path / "b.qcow2", 65 * MIB)
    assert disk.check_chain((tmp_path / "a.qcow2",), 64) == 64 * MIB
    with pytest.raises(InvalidInput, match=r"b\.qcow2 has 65 MiB and the machine's disk 64 MiB"):
        disk.check_chain((tmp_path / "a.qcow2", tmp_path / "b.qcow2"), 64)
    with pytest.raises(InvalidInput, match="at least one"):
        disk.check_chain((), 64)


def test_the_graph_names_every_file_and_follows_no_header(tmp_path: Path) -> None:
    nodes = disk.graph((tmp_path / "a", tmp_path / "b,x"), tmp_path / "top", "disk-001")
    assert [node["backing"] for node in nodes] == [None, "layer0", "layer1"]
    assert [node["read-only"] for node in nodes] == [True, True, False]
    assert nodes[2]["discard"] == "unmap"


def make_tree(root: Path) -> Path:
    (root / "d").mkdir(parents=True)
    for index in range(50):
        (root / "d" / f"f{index}").write_text(str(index))
    (root / "d" / "link").symlink_to("f1")
    (root / "d" / "hard").hardlink_to(root / "d" / "f2")
    return root


async def test_the_same_tree_gives_the_same_image_and_so_does_its_copy(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    copy = tmp_path / "copy"
    shutil.copytree(tree, copy, symlinks=True)
    (copy / "d" / "hard").unlink()
    (copy / "d" / "hard").hardlink_to(copy / "d" / "f2")
    for path in (copy, copy / "d"):
        shutil.copystat(tree / path.relative_to(copy), path)
    os.utime(copy / "d" / "f3", ns=(0, (tree / "d" / "f3").stat().st_mtime_ns))
    images = [tmp_path / f"{index}.qcow2" for index in range(3)]
    for image, source in zip(images, (tree, tree, copy), strict=True):
        await disk.make_image(source, 64, image)
    assert len({digest_file(image) for image in images}) == 1
    assert images[0].stat().st_size < 4 * MIB
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.qcow2", "1.qcow2", "2.qcow2", "copy", "tree"]
    raw = tmp_path / "raw"
    await process.check(
        ["qemu-img", "convert", "-O", "raw", str(images[0]), str(raw)], what="no raw image", timeout_s=60
    )
    await process.check([disk.program("e2fsck"), "-fn", str(raw)], what="the file system is broken", timeout_s=60)
    # root, d, 50 files and the link (hard shares f2's), lost+found
    assert len(disk.used_inodes(raw)) == 1 + 1 + 50 + 1 + 1


async def test_a_tree_that_does_not_fit_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "big").write_bytes(os.urandom(70 * MIB))
    with pytest.raises(NoSpace, match="does not fit on a disk of 64 MiB"):
        await disk.make_image(tree, 64, tmp_path / "image.qcow2")
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]
