"""Archives that attack the host: every one is refused or stays inside, without a machine."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest

from aenv_build.bases.archive import unpack_archive
from aenv_run.errors import BaseUnavailable

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="unpacking a root file system needs root")


def entry(
    name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", **fields: object
) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.size = kind, len(data)
    for field, value in fields.items():
        setattr(member, field, value)
    return member, data


def tar_of(path: Path, *entries: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for member, data in entries:
            tar.addfile(member, io.BytesIO(data))
    return path


def zstd(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-c"], input=data, capture_output=True, check=True).stdout


async def unpack(archive: Path, disk_mib: int = 64) -> Path:
    tree = archive.with_name("tree")
    await unpack_archive(archive, tree, disk_mib=disk_mib)
    return tree


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([entry("../outside", data=b"x")], "points out of the archive"),
        ([entry("a/../../outside", data=b"x")], "points out of the archive"),
        ([entry("a", tarfile.LNKTYPE, linkname="../../../etc/passwd")], "points out of the archive"),
        ([entry("a", tarfile.LNKTYPE, linkname="/etc/passwd")], "No such file"),
        ([entry("a", b"Z")], "unknown type"),
        ([entry("big", data=b"\0" * (3 << 20))], "more than the 2 MiB"),
        ([entry("d", tarfile.DIRTYPE), entry("d/x", data=b"x"), entry("d", data=b"x")], "not empty"),
    ],
)
async def test_refused(tmp_path: Path, entries: list[tuple[tarfile.TarInfo, bytes]], reason: str) -> None:
    (tmp_path / "in").mkdir()
    archive = tar_of(tmp_path / "in" / "a.tar", *entries)
    with pytest.raises(BaseUnavailable, match=reason):
        await unpack(archive, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


async def test_links_that_point_out_stay_inside(tmp_path: Path) -> None:
    """A write through a link to / lands below the new root; the host's file of that name is not touched."""
    victim = tmp_path / "victim"
    victim.mkdir()
    archive = tar_of(
        tmp_path / "a.tar",
        entry("up", tarfile.SYMTYPE, linkname=str(victim)),
        entry(str(victim).lstrip("/"), tarfile.DIRTYPE, mode=0o755),
        entry("up/file", data=b"evil"),
        entry("etc", tarfile.SYMTYPE, linkname="/../../../../../.." + str(victim)),
        entry("etc/shadow", data=b"evil"),
    )
    tree = await unpack(archive)
    assert list(victim.iterdir()) == []
    inside = tree / str(victim).lstrip("/")
    assert (inside / "file").read_bytes() == b"evil" and (inside / "shadow").read_bytes() == b"evil"


async def test_what_a_root_file_system_has(tmp_path: Path) -> None:
    archive = tar_of(
        tmp_path / "a.tar",
        entry("./", tarfile.DIRTYPE, mode=0o755),
        entry("/abs/file", data=b"1", mode=0o4755, uid=12, gid=34, pax_headers={"SCHILY.xattr.user.k": "v"}),
        entry("hard", tarfile.LNKTYPE, linkname="./abs/file"),
        entry("soft", tarfile.SYMTYPE, linkname="/nowhere", uid=5, gid=6),
        entry("pipe", tarfile.FIFOTYPE),
        entry("null", tarfile.CHRTYPE, devmajor=1, devminor=3, mode=0o666),
        entry("twice", data=b"old"),
        entry("twice", data=b"new", mtime=1000),
        entry("n\udcff", data=b"odd name"),
    )
    tree = await unpack(archive)
    info = (tree / "abs/file").stat()
    assert (stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid, info.st_nlink) == (0o4755, 12, 34, 2)
    assert os.getxattr(tree / "abs/file", "user.k") == b"v"
    assert (tree / "soft").readlink() == Path("/nowhere") and (tree / "soft").lstat().st_uid == 5
    assert stat.S_ISFIFO((tree / "pipe").stat().st_mode)
    assert (tree / "null").stat().st_rdev == os.makedev(1, 3)
    assert (tree / "twice").read_bytes() == b"new" and (tree / "twice").stat().st_mtime == 1000
    assert "n\udcff" in {path.name for path in tree.iterdir()}


@pytest.mark.parametrize("kind", ["gz", "xz", "zst"])
async def test_compressions_whole_and_cut_off(tmp_path: Path, kind: str) -> None:
    plain = tar_of(tmp_path / "a.tar", entry("file", data=os.urandom(200_000))).read_bytes()
    packed = {"gz": gzip.compress, "xz": lzma.compress, "zst": zstd}[kind](plain)
    archive = tmp_path / "packed"
    archive.write_bytes(packed)
    assert (await unpack(archive) / "file").stat().st_size == 200_000
    archive.write_bytes(packed[:-5000])
    (tmp_path / "tree").rename(tmp_path / "tree1")
    with pytest.raises(BaseUnavailable, match=r"damaged|cut off|ends in the middle"):
        await unpack(archive)


async def test_bomb_is_stopped_at_the_size_of_the_disk(tmp_path: Path) -> None:
    archive = tmp_path / "bomb.gz"
    member = tarfile.TarInfo("zeros")
    member.size = 1 << 30
    with gzip.open(archive, "wb", compresslevel=1) as file:
        file.write(member.tobuf())
        for _ in range(64):
            file.write(bytes(1 << 20))
    with pytest.raises(BaseUnavailable, match="more than the 8 MiB"):
        await unpack(archive, 8)


async def test_cut_off_between_two_entries(tmp_path: Path) -> None:
    """Whole entries and no mark of the end: tarfile alone takes it for a whole archive."""
    archive = tar_of(tmp_path / "a.tar", entry("a", data=b"1"), entry("b", data=b"2"))
    archive.write_bytes(archive.read_bytes()[:1024])
    with pytest.raises(BaseUnavailable, match="cut off"):
        await unpack(archive)
    archive.write_bytes(archive.read_bytes()[:1024] + b"\x01" * 512)
    (tmp_path / "tree").rename(tmp_path / "tree1")
    with pytest.raises(BaseUnavailable, match="damaged"):
        await unpack(archive)


@pytest.mark.parametrize("data", [b"", b"not a tar" * 100, b"\x1f\x8b nonsense"])
async def test_not_an_archive(tmp_path: Path, data: bytes) -> None:
    archive = tmp_path / "x.tar"
    archive.write_bytes(data)
    with pytest.raises(BaseUnavailable, match=r"damaged|no files"):
        await unpack(archive)
