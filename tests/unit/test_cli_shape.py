"""The command line without a node: help, speed, errors, parsing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from aenv_run.amounts import duration, size
from aenv_run.cli.arguments import pairs, parse_duration, parse_size
from aenv_run.cli.command import COMMANDS, cli, report, run
from aenv_run.cli.copy import _split
from aenv_run.cli.output import print_json, print_table
from aenv_run.cli.terminal import exit_code_of
from aenv_run.errors import InvalidInput, SandboxDead
from aenv_run.printable import printable, printable_lines

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
    code = "import sys, aenv_run.cli.command as c; c.run(['--help']); print(sorted(sys.modules), file=sys.stderr)"
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
    assert run(["satrt"]) == 64
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


@pytest.mark.parametrize("command", ["start x", "ls", "doctor", "check", "catalog ls", "rm --all", "exec x -- y"])
@pytest.mark.parametrize("home", ["/proc/nope", "/dev/null", "/dev/null/below"])
def test_a_home_that_cannot_be_is_an_error_with_a_fix(
    command: str, home: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AENV_HOME", home)
    assert run(command.split()) in (0, 64, 65, 66, 69, 74, 75, 78)
    said = capsys.readouterr()
    if command == "doctor":
        assert "set AENV_HOME to a directory that you may write" in said.out
    elif "error:" in said.err:
        assert "fix:" in said.err and home.split("/")[1] in said.err


def test_usage_errors_have_one_exit_code() -> None:
    for wrong in (["nonsense"], ["start"], ["fork", "x", "-n", "0"], ["ls", "--nonsense"], ["completion", "tcsh"]):
        assert run(wrong) == 64, wrong


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        ("aenv_run.cli --help", "aenv [OPTIONS] COMMAND [ARGS]..."),
        ("aenv_run.cli snapshot create --help", "aenv snapshot create [OPTIONS] ID"),
        ("aenv_build.cli --help", "aenv-build build [OPTIONS] RECIPE"),
        ("aenv_build.cli cache --help", "aenv-build cache [OPTIONS]"),
        ("aenv_run.cli --version", "aenv, version "),
        ("aenv_build.cli --version", "aenv-build, version "),
    ],
)
def test_a_command_has_its_own_name_however_it_was_started(words: str, usage: str) -> None:
    argv = [sys.executable, "-m", *words.split()]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0].removeprefix("Usage: ").startswith(usage)


SLOW_IMPORT = """
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == {slow!r}:
            print("importing", flush=True)
            try:
                time.sleep(30)
            except BaseException as error:
                raise ImportError("as some libraries do") from error
sys.meta_path.insert(0, Slow())
from {package}.cli import main
sys.argv[1:] = {arguments!r}
main()
"""


@pytest.mark.parametrize(
    ("package", "slow", "arguments"),
    [
        ("aenv_run", "click", ["start", "x"]),
        ("aenv_run", "aenv_run.cli.sandboxes", ["start", "x"]),
        ("aenv_build", "click", ["x.yaml"]),
        ("aenv_build", "pydantic", ["x.yaml"]),
    ],
)
def test_an_interrupt_while_modules_are_imported_is_no_traceback(
    package: str, slow: str, arguments: list[str]
) -> None:
    script = SLOW_IMPORT.format(package=package, slow=slow, arguments=arguments)
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (130, "error: interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_let_a_command_clean_up(number: signal.Signals) -> None:
    script = """
import asyncio
from aenv_run.cli.signals import heeding_signals, run_async
from aenv_run.errors import Interrupted
async def work():
    try:
        print("working", flush=True)
        await asyncio.sleep(30)
    finally:
        await asyncio.sleep(0)
        print("clean", flush=True)
with heeding_signals():
    try:
        run_async(work())
    except Interrupted:
        print("interrupted")
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "working\n"
    process.send_signal(number)
    assert process.communicate(timeout=10)[0] == "clean\ninterrupted\n"


EVIL = "a\x1b]0;title\x07\x9b31m\u202eb\nc\udc9b"


def test_text_of_others_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert printable(EVIL) == "a�]0;title��31m�b�c�"
    assert printable_lines("a\tb\nc\x1b") == "a\tb\nc�"
    report(SandboxDead(f"said {EVIL}", fix=EVIL))
    print_table(["X"], [[EVIL]])
    print_json({"name": EVIL})
    said = capsys.readouterr()
    assert all(c.isprintable() or c in "\n\t" for c in said.out + said.err)
    assert json.loads(said.out[said.out.index("{") :]) == {"name": EVIL}


def test_sizes() -> None:
    assert [parse_size(text) for text in ("1", "4KiB", "512MiB", "2GiB")] == [1, 4096, 512 << 20, 2 << 30]
    for wrong in ("", "0", "-1", "1GB", "1.5GiB", "x"):
        with pytest.raises(InvalidInput):
            parse_size(wrong)


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "1e300"])
def test_a_number_that_cannot_be_is_invalid_input(seconds: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["start", "tiny", "--max-seconds", seconds]) == InvalidInput.exit_code
    said = capfd.readouterr().err
    assert "max" in said and "Traceback" not in said
