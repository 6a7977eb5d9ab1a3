"""Archives from a guest: what is honest is unpacked, nothing is written elsewhere."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from pathlib import Path

import pytest

from aenv_run.errors import ProtocolError
from aenv_run.untar import extract


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
