"""A command that is stopped while its store neither answers nor refuses: bounded, with the signal's exit code."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from aenv_run.process import is_alive, read_start_ticks
from aenv_run.stopping import Stopping
from tests.s3.server import CREDENTIALS, Server

ROOT = Path(__file__).parents[2]
#: Far more than a stop takes, and less than one read of a store that does not answer.
ENOUGH_S = 25


class Silent:
    """A server that takes connections and never says a word."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.asked = threading.Event()
        self.connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return Server(f"http://127.0.0.1:{self.listener.getsockname()[1]}").url("x")

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection = self.listener.accept()[0]
                self.connections.append(connection)
                if connection.recv(1):
                    self.asked.set()

    def close(self) -> None:
        for connection in (self.listener, *self.connections):
            connection.close()


@pytest.fixture
def silent() -> Iterator[Silent]:
    server = Silent()
    yield server
    server.close()


@contextmanager
def running(tmp_path: Path, *argv: str, url: str = "") -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, **CREDENTIALS, "AENV_HOME": str(tmp_path / "h"), "AENV_REPOSITORY": url}
    process = subprocess.Popen(
        [sys.executable, *argv],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


COMMANDS = [
    (["-m", "aenv_run.cli", "catalog", "ls"], signal.SIGINT, 130, "error: interrupted"),
    (["-m", "aenv_run.cli", "gc"], signal.SIGTERM, 143, "error: interrupted"),
    # Here a thread asks, and the event loop waits for it.
    (["-m", "aenv_run.cli", "doctor"], signal.SIGINT, 130, "error: interrupted"),
    (["-m", "aenv_build.cli", "lock", "{recipe}"], signal.SIGTERM, 143, "error: interrupted: every machine"),
]


@pytest.mark.parametrize(("argv", "number", "code", "says"), COMMANDS, ids=lambda value: str(value))
def test_a_store_that_never_answers_holds_up_nobody_who_stops(
    silent: Silent, tmp_path: Path, argv: list[str], number: signal.Signals, code: int, says: str
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("version: 1\nname: x\nbase: {snapshot: tiny}\n")
    words = [word.replace("{recipe}", str(recipe)) for word in argv]
    with running(tmp_path, *words, url=silent.url) as process:
        assert silent.asked.wait(60)
        process.send_signal(number)
        _, errors = process.communicate(timeout=ENOUGH_S)
    assert process.returncode == code, errors
    stopping = next(line for line in errors.splitlines() if line.startswith("stopping: giving up "))
    assert " in s3://aenv-tests/x" in stopping, errors
    assert any(line.startswith(says) for line in errors.splitlines()) and "Traceback" not in errors


def test_a_command_that_waits_for_its_store_says_so_once(silent: Silent, tmp_path: Path) -> None:
    with running(tmp_path, "-m", "aenv_run.cli", "catalog", "ls", "--json", url=silent.url) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=ENOUGH_S)
    assert said.startswith("waiting for the store: ") and " in s3://aenv-tests/x" in said
    assert out == "" and "waiting" not in errors and process.returncode == 130


def test_what_is_waited_for_is_known_by_how_long_it_takes() -> None:
    stop = Stopping()
    with stop.doing("first"), stop.doing("second"):
        assert stop.waits_for(0.0) == "first" and stop.waits_for(3600.0) == ""
    assert stop.waits_for(0.0) == ""


WORK = """
import asyncio, sys, time
from pathlib import Path
from aenv_run import process
from aenv_run.cli import signals
from aenv_run.errors import AenvError
from aenv_run.stopping import STOP
from aenv_run.threads import in_thread

def hang(pid):
    with STOP.doing("asking a store"):
        print(pid, flush=True)
        time.sleep(1000)

async def work():
    child = await process.spawn(["sleep", "1000"], log=Path(sys.argv[1]), ephemeral=True)
    program = asyncio.create_task(process.run(["sleep", "1000"], timeout_s=1000))
    try:
        await in_thread(hang, child.pid)
    finally:
        program.cancel()
        await asyncio.gather(program, return_exceptions=True)
        if sys.argv[2] == "clean":
            child.kill_group()
            print("clean", flush=True)
        else:
            await asyncio.sleep(1000)

with signals.heeding_signals(worst_s=float(sys.argv[3])) as heeding:
    try:
        signals.run_async(work())
    except AenvError as error:
        print(error.code, flush=True)
signals.leave(heeding.exit_code)
"""


def test_a_thread_that_hangs_is_left_alone_once_the_rest_is_clean(tmp_path: Path) -> None:
    with running(tmp_path, "-c", WORK, str(tmp_path / "log"), "clean", "60") as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=ENOUGH_S)
    assert (process.returncode, out) == (143, "clean\ninterrupted\n")
    assert errors == "stopping: giving up asking a store (a second signal ends it at once)\n"
    assert read_start_ticks(child) is None


@pytest.mark.parametrize("second", [signal.SIGINT, None], ids=["a second signal", "the worst case"])
def test_what_cannot_be_cleaned_up_is_ended_with_its_machines(
    tmp_path: Path, second: signal.Signals | None
) -> None:
    with running(tmp_path, "-c", WORK, str(tmp_path / "log"), "never", "60" if second else "0.5") as process:
        assert process.stdout is not None and process.stderr is not None
        child = int(process.stdout.readline())
        ticks = read_start_ticks(child)
        assert ticks is not None
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline().startswith("stopping: ")
        if second is not None:
            process.send_signal(second)
        process.communicate(timeout=ENOUGH_S)
    assert process.returncode == 130
    assert not is_alive(child, ticks)
