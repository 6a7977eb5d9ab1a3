"""Layers of images: what a container of them shows, kept attributes, and layers that lie."""

from __future__ import annotations

import gzip
import hashlib
import os
import stat
import tarfile
from pathlib import Path

import pytest

from aenv_build.bases.archive import LayerFile, unpack_layers
from aenv_run import disk, process
from aenv_run.errors import BaseUnavailable
from aenv_run.types import Digest
from tests.cases.image_layers import CASES, Case, Entry, entry, file, folder, hard, link, shown, tar_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="unpacking a root file system needs root")

#: As the kernel keeps it: cap_net_raw, effective and permitted.
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
#: user::rwx, user:5:r--, group::r--, mask::rwx, other::---
DEFAULT_ACL = bytes.fromhex(
    "02000000 01000700ffffffff 0200040005000000 04000400ffffffff 10000700ffffffff 20000000ffffffff"
)


def digest(data: bytes) -> Digest:
    return Digest(f"sha256:{hashlib.sha256(data).hexdigest()}")


def layer(folder: Path, data: bytes, packed: bytes | None = None) -> LayerFile:
    content = data if packed is None else packed
    path = folder / digest(content).hex
    path.write_bytes(content)
    return LayerFile(path, digest(content), digest(data))


async def unpack(folder: Path, *layers: LayerFile, disk_mib: int = 64, workdir: str = "/") -> Path:
    tree = folder / "tree"
    await unpack_layers(layers, tree, disk_mib=disk_mib, workdir=workdir, image="test")
    return tree


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_what_a_container_shows(tmp_path: Path, case: Case) -> None:
    layers = [layer(tmp_path, tar_of(*entries, end=number % 2 == 0)) for number, entries in enumerate(case.layers)]
    tree = await unpack(tmp_path, *layers)
    assert shown(tree) == case.tree
    again = tmp_path / "again"
    again.mkdir()
    other = await unpack(again, *layers)
    assert times(tree) == times(other), "what is made twice is the same, times too"
    assert {path.name for path in tmp_path.iterdir()} == {"tree", "again", *(one.path.name for one in layers)}


def times(root: Path) -> dict[Path, float]:
    return {path.relative_to(root): path.lstat().st_mtime for path in [root, *root.rglob("*")]}


async def test_owners_modes_times_and_attributes(tmp_path: Path) -> None:
    capable = {"SCHILY.xattr.security.capability": CAPABILITY.decode("utf-8", "surrogateescape")}
    lower = (
        folder("./", mode=0o711, mtime=5),
        folder("d", mode=0o2770, uid=10, gid=20, mtime=6, pax_headers={"SCHILY.xattr.user.old": "1"}),
        file("d/su", "x", mode=0o4755, uid=2_000_000_000, gid=3_000_000_000, mtime=7),
        file("cap", "x", mode=0o755, uid=7, pax_headers=capable),
        file("bin", pax_headers={"SCHILY.xattr.user.bin": b"\xff\n=\0".decode("utf-8", "surrogateescape")}),
        link("l", "cap"),
        file("n\udcff/\udcfe", "odd", mtime=1 << 40),
        file("early", mtime=-5),
        file("trusted", pax_headers={"SCHILY.xattr.trusted.overlay.opaque": "y"}),
    )
    acl = {"SCHILY.xattr.system.posix_acl_default": DEFAULT_ACL.decode("utf-8", "surrogateescape")}
    upper = (
        folder("acl", pax_headers=acl),
        file("acl/plain"),
        file("d/new", "y", mtime=9),
        folder("e", mode=0o1777, mtime=10),
        hard("hard", "d/su"),
    )
    last = (folder("d", mode=0o755, uid=11, gid=21, mtime=12),)
    tree = await unpack(tmp_path, *(layer(tmp_path, tar_of(*entries)) for entries in (lower, upper, last)))
    info = (tree / "d/su").stat()
    assert (stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid) == (0o4755, 2_000_000_000, 3_000_000_000)
    assert (info.st_nlink, info.st_mtime) == (2, 7)
    info = (tree / "d").stat()
    assert (stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid, info.st_mtime) == (0o755, 11, 21, 12)
    assert os.listxattr(tree / "d") == [], "the attributes are those of the last layer that has the directory"
    assert (stat.S_IMODE(tree.stat().st_mode), tree.stat().st_mtime) == (0o711, 5)
    assert os.getxattr(tree / "cap", "security.capability") == CAPABILITY
    assert os.getxattr(tree / "bin", "user.bin") == b"\xff\n=\0"
    assert os.listxattr(tree / "trusted") == os.listxattr(tree / "acl/plain") == []
    assert os.getxattr(tree / "acl", "system.posix_acl_default") == DEFAULT_ACL
    assert stat.S_IMODE((tree / "e").stat().st_mode) == 0o1777
    assert [path.name for path in (tree / "n\udcff").iterdir()] == ["\udcfe"]
    assert (tree / "early").stat().st_mtime == -5


async def test_sparse_files_stay_sparse(tmp_path: Path) -> None:
    """GNU tar's four ways to store a file with holes; on a disk that the whole of it would not fit on."""
    source = tmp_path / "source"
    source.mkdir()
    with (source / "s").open("wb") as sparse:
        for offset in (0, 1 << 30, 5 << 30):
            sparse.seek(offset)
            sparse.write(b"data")
        sparse.truncate(6 << 30)
    forms = ["--format=gnu"], *(["--format=posix", f"--sparse-version={v}"] for v in ("0.0", "0.1", "1.0"))
    for number, form in enumerate(forms):
        folder = tmp_path / str(number)
        folder.mkdir()
        argv = ["tar", *form, "--sparse", "-C", str(source), "-cf", "-", "s"]
        data = (await process.check(argv, what="cannot write the archive", timeout_s=60)).stdout
        assert len(data) < 100_000
        tree = await unpack(folder, layer(folder, data), disk_mib=8)
        info = (tree / "s").stat()
        assert info.st_size == 6 << 30 and info.st_blocks * 512 < 1 << 20
        with (tree / "s").open("rb") as sparse:
            for offset in (0, 1 << 30, 5 << 30):
                sparse.seek(offset)
                assert sparse.read(6) == b"data\0\0"


async def test_the_disk_has_it_all_and_is_the_same_twice(tmp_path: Path) -> None:
    """Capabilities, access lists, setuid, odd owners, names and devices reach the guest's file system."""
    capable = {"SCHILY.xattr.security.capability": CAPABILITY.decode("utf-8", "surrogateescape")}
    acl = {"SCHILY.xattr.system.posix_acl_default": DEFAULT_ACL.decode("utf-8", "surrogateescape")}
    lower = [
        file("cap", "x", mode=0o755, pax_headers=capable),
        folder("acl", pax_headers=acl),
        file("su", "x", mode=0o6755, uid=2_000_000_000, gid=70_000, mtime=7),
        entry("c", tarfile.CHRTYPE, devmajor=1, devminor=3),
        folder("n\udcff"),
        hard("hard", "su"),
    ]
    data = tar_of(*lower), tar_of(file("implied/new", "y"), file(".wh.c"))
    digests = set()
    for number in range(2):
        place = tmp_path / str(number)
        place.mkdir()
        tree = await unpack(place, *(layer(place, one) for one in data))
        image, raw = place / "disk.qcow2", place / "disk.raw"
        await disk.make_image(tree, 64, image)
        digests.add(digest(image.read_bytes()))
    assert len(digests) == 1
    argv = ["qemu-img", "convert", "-O", "raw", str(image), str(raw)]
    await process.check(argv, what="cannot convert the disk", timeout_s=60)
    questions = b"ea_list cap\nea_list acl\nstat su\nls -l\n"
    argv = [disk.program("debugfs"), "-f", "-", str(raw)]
    said = (await process.check(argv, what="cannot read the disk", stdin=questions, timeout_s=60)).stdout
    assert b"security.capability (20) = 01 00 00 02" in said and b"system.posix_acl_default" in said
    assert b"Mode:  06755" in said and b"User: 2000000000   Group: 70000" in said and b"Links: 2" in said
    assert (b"n\\xff" in said or b"n\xff" in said) and b" c\n" not in said


async def test_replaced_files_do_not_count(tmp_path: Path) -> None:
    """What must fit on the disk is what is left, not the sum of the layers."""
    layers = [layer(tmp_path, tar_of(entry("big", data=bytes([n]) * (3 << 20)))) for n in range(1, 6)]
    tree = await unpack(tmp_path, *layers, disk_mib=7)
    assert (tree / "big").stat().st_size == 3 << 20


async def test_the_working_directory_is_made(tmp_path: Path) -> None:
    tree = await unpack(tmp_path, layer(tmp_path, tar_of(link("srv", "/data"))), workdir="/srv/app")
    assert shown(tree) == {"srv": "l:/data", "data": "d", "data/app": "d"}


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([file("../x")], "points out of the archive"),
        ([file("a/../../x")], "points out of the archive"),
        ([hard("a", "../../etc/passwd")], "points out of the archive"),
        ([hard("a", "etc/passwd")], "No such file"),
        ([file("d/.wh...")], "hides a directory itself"),
        ([file("d/.wh..")], "hides a directory itself"),
        ([file("d/.wh.")], "hides a directory itself"),
        ([link("a", "b"), link("b", "a"), file("a/x")], "File exists"),
        ([file("a"), file("a/x")], "File exists"),
        ([folder("d"), file("d/x"), file("d")], "not empty"),
        ([file("/".join(["d"] * 300))], "levels deep"),
        ([file("a", uid=(1 << 32) - 1)], "owner that no Linux has"),
        ([file("a", gid=1 << 40)], "owner that no Linux has"),
        ([entry("big", data=bytes(3 << 20))], "more than the 2 MiB"),
    ],
)
async def test_layers_that_lie(tmp_path: Path, entries: list[Entry], reason: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    with pytest.raises(BaseUnavailable, match=reason):
        await unpack(folder, layer(folder, tar_of(*entries)), disk_mib=2)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


async def test_content_is_compared_with_both_digests(tmp_path: Path) -> None:
    data = tar_of(file("a", "1"))
    good = layer(tmp_path, data, gzip.compress(data))
    other = digest(b"other")
    with pytest.raises(BaseUnavailable, match=f"not {other}"):
        await unpack(tmp_path, LayerFile(good.path, other, good.diff_id))
    assert shown(tmp_path / "tree") == {}, "nothing is unpacked of what has the wrong digest"
    (tmp_path / "tree").rmdir()
    with pytest.raises(BaseUnavailable, match="config says"):
        await unpack(tmp_path, LayerFile(good.path, good.digest, other))


@pytest.mark.parametrize("at", [700, 1024, 1200, 1536])
async def test_a_layer_cut_off_or_damaged_inside(tmp_path: Path, at: int) -> None:
    """Also where its digest is that of the damaged bytes."""
    data = tar_of(file("a", "1" * 500), file("b", "2" * 500))
    damaged = data[:at] + b"\x01" * 100
    with pytest.raises(BaseUnavailable, match=r"damaged|cut off|ends in the middle"):
        await unpack(tmp_path, layer(tmp_path, damaged))


async def test_a_bomb_of_padding_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    with gzip.open(path, "wb", compresslevel=1) as stream:
        stream.write(tar_of(file("a")))
        for _ in range(80):
            stream.write(bytes(1 << 20))
    bomb = LayerFile(path, digest(path.read_bytes()), digest(b""))
    with pytest.raises(BaseUnavailable, match="far more than fits"):
        await unpack(tmp_path, bomb, disk_mib=1)


def test_every_kind_of_entry_is_in_the_table() -> None:
    kinds = {member.type for case in CASES for entries in case.layers for member, _ in entries}
    links = {tarfile.SYMTYPE, tarfile.LNKTYPE}
    assert kinds >= {tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE} | links
