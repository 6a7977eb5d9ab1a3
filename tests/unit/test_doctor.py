"""What ``aenv doctor`` says where nothing is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from aenv_run.cli.command import run
from aenv_run.doctor import examine
from aenv_run.paths import Home


async def test_each_missing_program_is_named_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "skopeo").write_text("#!/bin/sh\n")
    (programs / "skopeo").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    report = await examine(Home(tmp_path / "home"))
    assert report.chosen is None and not report.healthy and "runsc" in report.why
    rows = {row.name: row for row in report.programs}
    assert rows["skopeo"].present and rows["skopeo"].detail == str(programs / "skopeo")
    assert not rows["dot"].present and rows["dot"].fix == "apt install graphviz" and "svg" in rows["dot"].detail


def test_no_driver_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("AENV_HOME", str(tmp_path / "home"))
    assert run(["doctor"]) == 69
    told = capsys.readouterr().out
    assert told.count("no driver works here") == 1 and "apt install mmdebstrap" in told
