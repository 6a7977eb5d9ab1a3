"""The command line without a node: help, speed, errors, parsing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from aenv_run.cli import COMMANDS, cli, report, run
from aenv_run.cli.arguments import pairs, parse_duration
from aenv_run.cli.copy import _split
from aenv_run.cli.output import duration, size
from aenv_run.cli.terminal import exit_code_of
from aenv_run.errors import InvalidInput, SandboxDead

ROOT = Path(__file__).parents[2]


def commands(group: click.Group, prefix: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    found: list[tuple[tuple[str, ...], click.Command]] = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found.append(((*prefix, name), command))
        if isinstance(command, click.Group):
            found += commands(command, (*prefix, name))
    return found


def test_every_command_has_help_and_an_example() -> None:
    for path, command in commands(cli):
        assert command.help, path
        if not isinstance(command, click.Group):
            assert command.epilog and f"aenv {' '.join(path)}" in command.epilog, path
            assert all(p.help for p in command.params if isinstance(p, click.Option)), path


def test_every_listing_has_json() -> None:
    for path, command in commands(cli):
        if path[-1] in ("ls", "show", "start", "fork", "doctor", "check", "status", "create"):
            assert "--json" in [option for p in command.params for option in p.opts], path


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, aenv_run.cli as c; c.run(['--help']); print(sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    for heavy in ("pydantic", "httpx", "rich", "fastapi", "asyncio", "boto3"):
        assert f"'{heavy}'" not in done.stderr, heavy
    assert all(name in done.stdout for name in COMMANDS)


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["satrt"]) == 2
    assert "Did you mean 'start'?" in capsys.readouterr().err


def test_errors_have_a_fix_and_their_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(SandboxDead("it is gone", fix="start another")) == 72
    assert capsys.readouterr().err == "error: it is gone\n  fix: start another\n"


def test_bad_arguments_start_no_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AENV_HOME", str(tmp_path / "home"))
    assert run(["start", "x", "--ttl", "forever"]) == 64
    assert run(["start", "x", "--env", "NOVALUE"]) == 64
    assert run(["rm"]) == 64
    assert run(["cp", "a", "b"]) == 64
    assert run(["rm", "--all"]) == 0
    assert run(["ls", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == [] and "Traceback" not in captured.err
    assert run(["node", "status"]) == 3
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    assert "_AENV_COMPLETE" in capsys.readouterr().out


def test_durations() -> None:
    assert [parse_duration(text) for text in ("300", "90s", "5m", "2h", "0.5")] == [300, 90, 300, 7200, 0.5]
    for wrong in ("", "m", "-1", "0", "25h", "nan", "inf", "1e9"):
        with pytest.raises(InvalidInput):
            parse_duration(wrong)
    assert [duration(s) for s in (0, 59, 125, 7300, 90000, -3)] == ["0s", "59s", "2m", "2h", "1d", "0s"]
    assert [size(n) for n in (0, 1023, 1536, 512 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "512 MiB",
        "3072 GiB",
    ]


def test_pairs_and_paths() -> None:
    assert pairs(("A=1", "B=x=y", "C="), "--env") == {"A": "1", "B": "x=y", "C": ""}
    assert _split("s4f:/a:b") == ("s4f", "/a:b")
    assert _split("./s4f:/x") is None and _split("/a:b") is None and _split("plain") is None
    with pytest.raises(InvalidInput):
        _split("s4f:")


def test_exit_codes_as_shells_give_them() -> None:
    assert [exit_code_of(3, None), exit_code_of(-1, "killed"), exit_code_of(-1, "terminated")] == [3, 137, 143]


def test_check_tells_whole_from_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENV_HOME", str(tmp_path))
    assert run(["check"]) == 0
    strange = tmp_path / "repository" / "strange"
    strange.parent.mkdir(parents=True, exist_ok=True)
    strange.write_text("not ours")
    assert run(["check", "--json"]) == 74
