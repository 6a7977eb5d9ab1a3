"""``aenv exec`` as a pipe and a shell expect it: descriptors, signals, exit codes, a daemon that is silent."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from aenv_run import Sandbox
from aenv_run.errors import CommandNotExecutable, CommandNotFound, InvalidInput
from aenv_run.paths import Home
from tests.e2e.conftest import ROOT, Aenv, environment

AENV = [sys.executable, "-m", "aenv_run.cli"]


@pytest.fixture(scope="module")
def shared(home: Home) -> Iterator[Sandbox]:
    with Sandbox.create("tiny", home=home, timeout=600) as made:
        yield made


def sleepers(sandbox: Sandbox, seconds: int) -> int:
    return sum(f"sleep {seconds}" in line for line in sandbox.commands.run(["/bin/ps"]).stdout.splitlines())


def wait_for_sleepers(sandbox: Sandbox, seconds: int, count: int) -> None:
    deadline = time.monotonic() + 20
    while sleepers(sandbox, seconds) != count:
        assert time.monotonic() < deadline, (seconds, count)
        time.sleep(0.1)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_all_that_the_command_started(
    home: Home, shared: Sandbox, number: signal.Signals, code: int
) -> None:
    seconds = 4000 + number
    argv = [*AENV, "exec", shared.sandbox_id, "--", "sh", "-c", f"echo here; sleep {seconds}; true"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(argv, env=environment(home), cwd=ROOT, text=True, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"  # so it knows what it started
    wait_for_sleepers(shared, seconds, 2)  # the shell's command line names it too
    process.send_signal(number)
    errors = process.communicate(timeout=30)[1]
    assert process.returncode == code and "Traceback" not in errors
    wait_for_sleepers(shared, seconds, 0)


def test_a_reader_that_leaves_ends_it_too(home: Home, shared: Sandbox) -> None:
    script = "while :; do echo x; sleep 0.123; done"
    argv = [*AENV, "exec", shared.sandbox_id, "--", "sh", "-c", script]
    process = subprocess.Popen(argv, env=environment(home), cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(2) == b"x\n"
    process.stdout.close()
    assert process.wait(30) == 141
    assert "0.123" not in shared.commands.run(["/bin/ps"]).stdout


def test_kill_of_the_sdk_ends_all_that_the_command_started(shared: Sandbox) -> None:
    one = shared.commands.run("sleep 4101; true", background=True, timeout=None)
    two = shared.commands.run("sleep 4101; true", background=True, timeout=None)
    wait_for_sleepers(shared, 4101, 4)
    assert one.kill() and shared.commands.kill(two.pid)
    assert (one.wait().error, two.wait().error) == ("signal: killed", "signal: killed")
    wait_for_sleepers(shared, 4101, 0)
    assert not one.kill() and not shared.commands.kill(two.pid)


@pytest.mark.parametrize(
    ("redirection", "tail", "output", "code"),
    [
        ("<&-", "-i {} -- cat", "", 0),
        (">&-", "{} -- echo hi", "", 0),
        ("2>&-", "{} -- sh -c 'echo no >&2; echo hi'", "hi\n", 0),
        ("<&- >&- 2>&-", "-i {} -- sh -c 'cat; exit 3'", "", 3),
        ("<&-", "-t {} -- sh", "", 64),
    ],
)
def test_closed_descriptors(
    home: Home, shared: Sandbox, redirection: str, tail: str, output: str, code: int
) -> None:
    arguments = tail.format(shared.sandbox_id)
    command = f"exec {sys.executable} -m aenv_run.cli exec {arguments} {redirection}"
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(home),
        cwd=ROOT,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, output), done.stderr
    assert "Traceback" not in done.stderr


def test_large_input_is_quick_and_whole(home: Home, shared: Sandbox) -> None:
    data = os.urandom(1 << 20) * 50
    begin = time.monotonic()
    done = subprocess.run(
        [*AENV, "exec", "-i", shared.sandbox_id, "--", "cat"],
        input=data,
        capture_output=True,
        timeout=60,
        env=environment(home),
        cwd=ROOT,
        check=True,
    )
    took_s = time.monotonic() - begin
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(data).digest()
    print(f"50 MB through cat: {took_s:.1f} s")
    assert took_s < 30
    # One that ends before it read all is no error.
    quick = [*AENV, "exec", "-i", shared.sandbox_id, "--", "true"]
    assert (
        subprocess.run(quick, input=data, timeout=60, env=environment(home), cwd=ROOT, check=False).returncode == 0
    )


def test_exit_codes_are_those_of_a_shell(aenv: Aenv, shared: Sandbox) -> None:
    shared.files.write("/srv/plain", "x")
    shared.commands.run("echo '#!/none' >/srv/script; busybox chmod +x /srv/script")
    for argv, code in (
        (["nonesuch"], 127),
        (["/bin/nonesuch"], 127),
        (["/srv/plain"], 126),
        (["/srv"], 126),
        (["/srv/script"], 126),
    ):
        done = aenv("exec", shared.sandbox_id, "--", *argv, code=code)
        assert done.stderr.startswith("error:") and not done.stdout
    aenv("exec", shared.sandbox_id, "-w", "/none", "--", "true", code=126)
    with pytest.raises(CommandNotFound):
        shared.commands.run(["nonesuch"])
    with pytest.raises(CommandNotExecutable):
        shared.commands.run(["/srv/plain"])
    assert issubclass(CommandNotFound, InvalidInput) and issubclass(CommandNotExecutable, InvalidInput)
    assert shared.commands.run("nonesuch").exit_code == 127


def test_a_daemon_that_is_silent_is_said_to_be(home: Home) -> None:
    with Sandbox.create("tiny", home=home) as sandbox:
        (line,) = [row for row in sandbox.commands.run(["/bin/ps"]).stdout.splitlines() if "envd serve" in row]
        shell = ["/bin/sh", "-c", f"sleep 1; kill -STOP {line.split()[0]}; sleep 9; kill -CONT {line.split()[0]}"]
        sandbox.commands.run(shell, background=True, timeout=None)
        time.sleep(2)
        argv = [*AENV, "exec", sandbox.sandbox_id, "--", "echo", "after all"]
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=60, env=environment(home), cwd=ROOT, check=False
        )
        assert (done.returncode, done.stdout) == (0, "after all\n")
        assert "does not answer yet" in done.stderr
