"""The command ``aenv`` as people use it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from aenv_run import Sandbox
from aenv_run.paths import Home
from tests.e2e.conftest import ROOT, Aenv, environment


@pytest.fixture
def started(aenv: Aenv) -> Iterator[str]:
    """The id of a sandbox."""
    sandbox_id = aenv("start", "tiny", "--env", "SEED=7", "--metadata", "run=1").stdout.strip()
    yield sandbox_id
    aenv("rm", sandbox_id, code=None)


def test_exec_passes_output_input_and_exit_code_on(aenv: Aenv, started: str) -> None:
    done = aenv("exec", started, "--", "sh", "-c", "echo $SEED; echo no >&2; exit 9", code=9)
    assert (done.stdout, done.stderr) == ("7\n", "no\n")
    assert aenv("exec", "-i", started, "--", "wc", "-c", stdin="12345").stdout.strip() == "5"
    assert aenv("exec", started, "--", "sh", "-c", "kill -9 $$", code=137)
    assert aenv("exec", started, "--timeout", "1", "--", "sleep", "60", code=124).stderr.startswith("error:")
    assert "not found" in aenv("exec", started, "--", "nonesuch", code=None).stderr


def test_life_on_the_command_line(aenv: Aenv, started: str) -> None:
    assert started in aenv("ls").stdout
    (row,) = [row for row in json.loads(aenv("ls", "--json").stdout) if row["sandbox_id"] == started]
    assert row["metadata"] == {"run": "1"} and row["access_token"] is None
    child = aenv("fork", started[:8], "-n", "1").stdout.strip()
    assert json.loads(aenv("ls", "--json").stdout)[-1]["parent"] == started
    aenv("pause", child)
    refused = aenv("exec", child, "--", "true", code=65)
    assert "fix: resume it first" in refused.stderr
    aenv("resume", child)
    aenv("timeout", child, "10m")
    made = aenv("snapshot", "create", child, "--name", "cli-made", "--tag", "latest").stdout.strip()
    assert made == "cli-made:1" and made in aenv("catalog", "ls").stdout
    shown = aenv("catalog", "show", made).stdout
    assert "lineage" in shown and "tiny:1" in shown and "devices" in shown
    aenv("catalog", "tag", made, "stable")
    assert "cli-made:1" in aenv("catalog", "rm", made).stdout
    assert aenv("rm", child).stdout.strip() == child
    assert aenv("rm", child, code=66).stderr.startswith("error: there is no sandbox")


def test_cp_both_ways(aenv: Aenv, started: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tree / "sub" / "run.sh").chmod(0o755)
    (tree / "link").symlink_to("sub/run.sh")
    aenv("cp", str(tree), f"{started}:/srv/")
    assert aenv("exec", started, "--", "/srv/tree/link").stdout == "ran\n"
    aenv("exec", started, "--", "sh", "-c", "ln -s /etc/passwd /srv/tree/out; echo more >/srv/tree/sub/new")
    done = aenv("cp", f"{started}:/srv/tree", str(tmp_path / "back"))
    assert "left out" in done.stderr and not (tmp_path / "back" / "out").exists()
    assert (tmp_path / "back" / "sub" / "new").read_text() == "more\n"
    assert os.access(tmp_path / "back" / "link", os.X_OK)
    aenv("cp", f"{started}:/srv/tree/sub/new", str(tmp_path))
    assert (tmp_path / "new").read_text() == "more\n"
    assert "NotFound" not in aenv("cp", f"{started}:/none", str(tmp_path), code=66).stderr
    assert not list(tmp_path.glob(".aenv-cp-*"))


def test_cp_out_is_bounded_clean_and_says_what_is_in_the_way(aenv: Aenv, started: str, tmp_path: Path) -> None:
    script = (
        "mkdir /srv/d; dd if=/dev/zero of=/srv/d/big bs=1M count=3; ln -s /etc \"/srv/d/$(printf 'x\\033[31my')\""
    )
    aenv("exec", started, "--", "sh", "-c", script)
    over = aenv("cp", "--max-size", "1MiB", f"{started}:/srv/d", str(tmp_path / "d"), code=65)
    assert "--max-size" in over.stderr and not list(tmp_path.iterdir())
    done = aenv("cp", "--max-size", "4MiB", f"{started}:/srv/d", str(tmp_path / "d"))
    assert "left out: d/x�[31my" in done.stderr and (tmp_path / "d/big").stat().st_size == 3 << 20
    # A hole is as large as it says: one file must not fill this host's disk.
    aenv("exec", started, "--", "dd", "if=/dev/null", "of=/srv/hole", "bs=1M", "seek=500")
    hole = aenv("cp", f"{started}:/srv/hole", str(tmp_path), code=65)
    assert "the size of the sandbox's disk" in hole.stderr and not (tmp_path / "hole").exists()
    (tmp_path / "file").write_text("mine")
    refused = aenv("cp", f"{started}:/srv/d", str(tmp_path / "file"), code=65)
    assert "Traceback" not in refused.stderr and (tmp_path / "file").read_text() == "mine"
    nowhere = aenv("cp", f"{started}:/srv/d/big", "/proc/x", code=None)
    assert nowhere.returncode == 66 and "error: /proc" in nowhere.stderr and "fix:" in nowhere.stderr
    assert not list(tmp_path.glob(".aenv-cp-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_cp_that_is_ended_leaves_nothing(
    home: Home, aenv: Aenv, started: str, tmp_path: Path, number: signal.Signals
) -> None:
    # Enough that the copy is still under way when its file is there.
    aenv("exec", started, "--", "dd", "if=/dev/zero", "of=/srv/slow", "bs=1M", "count=90")
    process = subprocess.Popen(
        [sys.executable, "-m", "aenv_run.cli", "cp", f"{started}:/srv/slow", str(tmp_path)],
        env=environment(home),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 20
    while not list(tmp_path.glob(".aenv-cp-*/out.tar")) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (128 + number, "error: interrupted\n")
    assert not list(tmp_path.iterdir())


def test_connect_is_a_real_terminal(home: Home, started: str) -> None:
    shell = pexpect.spawn(
        sys.executable,
        ["-m", "aenv_run.cli", "connect", started],
        env=environment(home),
        cwd=str(ROOT),
        dimensions=(30, 100),
        timeout=30,
        encoding="utf-8",
    )
    shell.expect("[#$] ")
    shell.sendline("stty size; test -t 0 && echo is-a-tty")
    shell.expect("30 100")
    shell.expect("is-a-tty\r")
    shell.setwinsize(40, 120)
    time.sleep(0.5)
    shell.sendline("stty size")
    shell.expect("40 120")
    shell.sendline("sleep 100")
    time.sleep(0.5)
    shell.sendcontrol("c")  # goes to the sandbox, not to aenv
    shell.sendline("echo after=$((40+2))")
    shell.expect("after=42")
    shell.sendline("exit 5")
    shell.expect(pexpect.EOF)
    shell.close()
    assert shell.exitstatus == 5


def test_connect_without_a_terminal_says_what_to_use(aenv: Aenv, started: str) -> None:
    assert "aenv exec -i" in aenv("connect", started, code=64).stderr


def test_interrupted_start_leaves_nothing(home: Home, aenv: Aenv) -> None:
    before = {info.sandbox_id for info in Sandbox.list(home=home)}
    process = subprocess.Popen(
        [sys.executable, "-m", "aenv_run.cli", "start", "tiny", "--cold"],
        env=environment(home),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 20
    while {i.sandbox_id for i in Sandbox.list(home=home)} == before and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and errors.strip() == "error: interrupted"
    while {i.sandbox_id for i in Sandbox.list(home=home)} != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert {info.sandbox_id for info in Sandbox.list(home=home)} == before


def test_doctor_and_node_status(aenv: Aenv, started: str) -> None:
    report = json.loads(aenv("doctor", "--json").stdout)
    assert report["chosen"] in ("qemu", "gvisor") and all(check["present"] for check in report["checks"])
    assert "auto picks" in aenv("doctor").stdout
    status = json.loads(aenv("node", "status", "--json").stdout)
    assert status["running"] and status["live"] >= 1 and status["driver"]


def test_unknown_snapshot_says_what_exists(aenv: Aenv) -> None:
    done = aenv("start", "tinny", code=66)
    assert "tiny" in done.stderr and "Traceback" not in done.stderr
