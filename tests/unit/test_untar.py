"""Archives from a guest: what is honest is unpacked, nothing is written elsewhere."""

from __future__ import annotations

import errno
import io
import os
import stat
import tarfile
from pathlib import Path

import pytest

from aenv_run.errors import NoSpace, ProtocolError, TooLarge, from_os
from aenv_run.untar import MAX_DEPTH, Limit
from aenv_run.untar import extract as extract_within


def extract(archive: Path, directory: Path, max_bytes: int = 1 << 20) -> list[str]:
    return extract_within(archive, directory, Limit(max_bytes, "--max-size"))


def archive(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def entry(name: str, kind: bytes = tarfile.REGTYPE, *, to: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode = kind, to, mode
    return member


def test_files_modes_links(tmp_path: Path) -> None:
    made = archive(
        tmp_path / "a.tar",
        (entry("t/", tarfile.DIRTYPE, mode=0o755), b""),
        (entry("t/run", mode=0o4755), b"#!"),
        (entry("t/same", tarfile.LNKTYPE, to="t/run"), b""),
        (entry("t/sub/up", tarfile.SYMTYPE, to="../run"), b""),
    )
    assert extract(made, tmp_path / "out") == []
    run = tmp_path / "out" / "t" / "run"
    assert stat.S_IMODE(run.stat().st_mode) == 0o755 and run.read_bytes() == b"#!"
    assert (tmp_path / "out/t/same").stat().st_ino == run.stat().st_ino
    assert (tmp_path / "out/t/sub/up").read_bytes() == b"#!"


@pytest.mark.parametrize("name", ["../x", "/etc/x", "t/../../x", "t/./../../x"])
def test_paths_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProtocolError):
        extract(archive(tmp_path / "a.tar", (entry(name), b"x")), tmp_path / "out")
    assert list(tmp_path.rglob("x")) == []


@pytest.mark.parametrize("to", ["/etc", "..", "../..", "a/../../.."])
def test_links_that_lead_out_are_left_out_and_nothing_goes_through_them(tmp_path: Path, to: str) -> None:
    made = archive(
        tmp_path / "a.tar",
        (entry("t/link", tarfile.SYMTYPE, to=to), b""),
        (entry("t/link/file"), b"x"),
    )
    left = extract(made, tmp_path / "out")
    assert "t/link" in left and (tmp_path / "out/t/link/file").read_bytes() == b"x"
    assert not (tmp_path / "out/t/link").is_symlink()


def test_a_link_through_a_link_cannot_lead_out(tmp_path: Path) -> None:
    made = archive(
        tmp_path / "a.tar",
        (entry("t/deep/deeper/", tarfile.DIRTYPE), b""),
        (entry("t/here", tarfile.SYMTYPE, to="deep/deeper"), b""),
        (entry("t/out", tarfile.SYMTYPE, to="here/../../../.."), b""),
        (entry("t/deep/up", tarfile.SYMTYPE, to=".."), b""),
        (entry("t/deep/far", tarfile.SYMTYPE, to="up/../.."), b""),  # inside only if `up` were a directory
    )
    assert extract(made, tmp_path / "out") == ["t/out", "t/deep/far"]
    for path in (tmp_path / "out").rglob("*"):
        assert path.resolve().is_relative_to((tmp_path / "out").resolve()), path


def test_devices_and_hard_links_to_elsewhere_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    made = archive(
        tmp_path / "a.tar",
        (entry("t/null", tarfile.CHRTYPE), b""),
        (entry("t/pipe", tarfile.FIFOTYPE), b""),
        (entry("t/hard", tarfile.LNKTYPE, to="secret"), b""),
    )
    assert extract(made, tmp_path / "out") == ["t/null", "t/pipe", "t/hard"]
    assert not list((tmp_path / "out").rglob("*"))


def test_what_is_no_archive_or_is_cut_off_is_refused(tmp_path: Path) -> None:
    (tmp_path / "junk.tar").write_bytes(os.urandom(2048))
    with pytest.raises(ProtocolError):
        extract(tmp_path / "junk.tar", tmp_path / "one")
    whole = archive(tmp_path / "a.tar", (entry("big"), b"x" * 100_000)).read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[:50_000])
    with pytest.raises(ProtocolError):
        extract(tmp_path / "cut.tar", tmp_path / "two")


def test_the_same_name_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError):
        extract(archive(tmp_path / "a.tar", (entry("x"), b"1"), (entry("x"), b"2")), tmp_path / "out")


def test_more_than_the_limit_is_refused_and_what_fits_is_not(tmp_path: Path) -> None:
    made = archive(tmp_path / "a.tar", (entry("t/a"), b"x" * 700), (entry("t/b"), b"x" * 300))
    assert extract(made, tmp_path / "fits", 1000) == []
    with pytest.raises(TooLarge, match=r"--max-size \(999 bytes\)"):
        extract(made, tmp_path / "over", 999)
    assert not (tmp_path / "over/t/b").exists()


def sparse(kind: str) -> bytes:
    """A tar of a few KiB that claims a sparse file of 3 GB, in each form that tarfile knows."""
    size = 3_000_000_000
    if kind == "old":
        header = bytearray(entry("big", tarfile.GNUTYPE_SPARSE).tobuf(tarfile.GNU_FORMAT))
        header[386:410] = b"%011o\0%011o\0" % (0, 0)
        header[483:495] = b"%011o\0" % size
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        return bytes(header) + bytes(1024)
    member = entry("big")
    headers = {
        "0.0": {"GNU.sparse.size": str(size), "GNU.sparse.numblocks": "1", "GNU.sparse.offset": "0"},
        "0.1": {"GNU.sparse.size": str(size), "GNU.sparse.map": "0,0"},
        "1.0": {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(size)},
    }
    member.pax_headers = headers[kind]
    return member.tobuf(tarfile.PAX_FORMAT) + bytes(1024)


@pytest.mark.parametrize("kind", ["old", "0.0", "0.1", "1.0"])
def test_sparse_files_are_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.tar").write_bytes(sparse(kind))
    with pytest.raises(ProtocolError, match="sparse"):
        extract(tmp_path / "a.tar", tmp_path / "out", 1 << 40)
    assert [path for path in (tmp_path / "out").rglob("*") if path.stat().st_size > 4096] == []


def deep_headers() -> bytes:
    one = tarfile.TarInfo("x")
    one.type, one.size = tarfile.GNUTYPE_LONGNAME, 2
    return (one.tobuf(tarfile.GNU_FORMAT) + b"a\0".ljust(512, b"\0")) * 3000


def size_of(number: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo("x")
    member.type, member.size = kind, number
    return member.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(deep_headers(), id="headers without end"),
        pytest.param(size_of(-512), id="negative size"),
        pytest.param(size_of(3 << 30, tarfile.XHDTYPE), id="huge header"),
        pytest.param(size_of(3 << 30, tarfile.GNUTYPE_LONGLINK), id="huge link name"),
    ],
)
def test_headers_that_lie_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(ProtocolError):
        extract(tmp_path / "a.tar", tmp_path / "out")


@pytest.mark.parametrize(
    "member",
    [
        pytest.param(entry("t/" + "n" * 300), id="name too long"),
        pytest.param(entry("/".join("d" * 1500) + "/x"), id="1500 levels"),
        pytest.param(entry("/".join("d" * (MAX_DEPTH + 1))), id="one level too many"),
        pytest.param(entry("t/link", tarfile.SYMTYPE, to=""), id="empty link"),
        pytest.param(entry("t/link", tarfile.SYMTYPE, to="a" * 5000), id="link too long"),
        pytest.param(entry("."), id="a file where the directory is"),
    ],
)
def test_names_that_the_host_cannot_have_are_errors_of_the_archive(
    tmp_path: Path, member: tarfile.TarInfo
) -> None:
    with pytest.raises(ProtocolError):
        extract(archive(tmp_path / "a.tar", (member, b"")), tmp_path / "out")


def test_a_nul_in_a_link_is_an_error_of_the_archive(tmp_path: Path) -> None:
    member = entry("t/link", tarfile.SYMTYPE)
    member.pax_headers = {"linkpath": "a\0b"}
    with pytest.raises(ProtocolError):
        extract(archive(tmp_path / "a.tar", (member, b"")), tmp_path / "out")


def test_the_hosts_own_trouble_keeps_its_kind() -> None:
    assert isinstance(from_os(OSError(errno.ENOSPC, "No space left on device", "/x"), "unpacking"), NoSpace)
    error = from_os(PermissionError(errno.EACCES, "Permission denied", "/x"))
    assert error.message == "/x: Permission denied" and error.fix and error.code == "host_refused"
