"""A repository that others may change is used, and said to be one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aenv_run.check import check
from aenv_run.cli.command import run
from aenv_run.doctor import examine
from aenv_run.garbage.repair import repair
from aenv_run.paths import Home
from aenv_run.repository import Repository
from aenv_run.store.memory import MemoryStore
from aenv_run.store.posix import PosixStore
from aenv_run.store.posix_rights import concerns
from tests.bytes_half import commit


def made(home: Path) -> Repository:
    repository = Repository(PosixStore(home / "repository"))
    commit(repository, home, b"x")
    return repository


@pytest.mark.parametrize("mode, warned", [(0o700, False), (0o755, False), (0o2770, False), (0o777, True)])
def test_everybody_may_write_it(tmp_path: Path, mode: int, warned: bool) -> None:
    repository = made(tmp_path)
    assert concerns(repository.store) == ()
    (tmp_path / "repository").chmod(mode)
    report = check(repository)
    assert report.ok and len(report.warnings) == warned
    if warned:
        assert "0777" in report.warnings[0].detail and "chmod o-w" in report.warnings[0].fix
    assert not repair(repository).next_steps


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_it_belongs_to_another_user(tmp_path: Path) -> None:
    repository = made(tmp_path)
    os.chown(tmp_path / "repository", 12345, -1)
    (warned,) = check(repository).warnings
    assert "12345" in warned.detail and "chown" in warned.fix and "AENV_REQUIRE_SIGNATURE" in warned.fix


def test_other_stores_and_none_are_no_concern(tmp_path: Path) -> None:
    assert concerns(MemoryStore()) == () == concerns(PosixStore(tmp_path / "none"))


async def test_the_commands_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AENV_HOME", str(tmp_path))
    monkeypatch.delenv("AENV_REPOSITORY", raising=False)
    made(tmp_path)
    (tmp_path / "repository").chmod(0o777)
    (row,) = [row for row in (await examine(Home(tmp_path))).checks if row.name == "repository"]
    assert row.present and "0777" in row.detail and "chmod o-w" in row.detail
    assert run(["check"]) == 0
    assert "chmod o-w" in capsys.readouterr().err
