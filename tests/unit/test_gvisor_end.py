"""The end of a machine that was not recorded yet, and what the daemon must answer before a capture."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from aenv_run import process
from aenv_run.drivers.gvisor_machine import end_started
from aenv_run.drivers.gvisor_sentry import NotDisconnectedError, connect, disconnect

#: Its first thread ends, the other stays: to /proc a zombie, and yet alive. As a supervisor that is ending.
HALF_ENDED = """
import ctypes, os, platform, sys, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
open(sys.argv[1] + "_", "w").write(str(os.getpid()))
os.rename(sys.argv[1] + "_", sys.argv[1])
ctypes.CDLL(None).syscall(60 if platform.machine() == "x86_64" else 93, 0)
"""


def threads_of(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return [path.name for path in Path(f"/proc/{pid}/task").iterdir()]
    return []


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"


async def test_a_supervisor_that_is_ending_is_waited_for(tmp_path: Path) -> None:
    program, told = tmp_path / "half.py", tmp_path / "pid"
    program.write_text(HALF_ENDED)
    argv = ["/bin/sh", "-c", f"{sys.executable} {program} {told}; true"]
    child = await process.spawn(argv, log=tmp_path / "log", ephemeral=True)
    while not told.exists():  # noqa: ASYNC110 - another process, no event
        await asyncio.sleep(0.01)
    pid = int(told.read_text())
    while not is_zombie(pid):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert len(threads_of(pid)) == 2
    end_started(child)
    assert len(threads_of(pid)) <= 1  # none, or a zombie that its new parent has yet to reap
    assert not child.alive


def say_disconnect(listener: socket.socket, timeout_s: float) -> None:
    with connect("127.0.0.1", listener.getsockname()[1], timeout_s) as connection:
        disconnect(connection, timeout_s)


@pytest.mark.parametrize(
    ("reply", "said", "answered"),
    [(b"", "does not answer", False), (b"HTTP/1.1 503 no\r\n\r\n", "kept its connections.*503", True)],
)
def test_a_daemon_that_keeps_its_connections_fails_the_capture(reply: bytes, said: str, answered: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                assert b'{"restored": true}' in connection.recv(4096)
                connection.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(NotDisconnectedError, match=said) as failed:
            say_disconnect(listener, 5.0)
        thread.join()
    assert failed.value.answered is answered


def test_a_daemon_that_never_ends_its_answer_is_left_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts by its backlog, says nothing
        started = time.monotonic()
        with pytest.raises(NotDisconnectedError, match="unreachable"):
            say_disconnect(listener, 0.2)
    assert time.monotonic() - started < 2.0
