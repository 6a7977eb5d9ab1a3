"""Starting a machine's processes: as a copy of a supervisor that is loaded already (``gvisor_template``)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import threading
import weakref
from pathlib import Path

from aenv_run.drivers import gvisor_host
from aenv_run.drivers.gvisor_machine import end_started
from aenv_run.errors import AenvError, SandboxDead
from aenv_run.process import Child, read_start_ticks

ANSWER_S = 20.0


class Copies:
    """The driver's end of the template, which is started by need and again when it is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._close: weakref.finalize[..., Copies] | None = None

    async def start(
        self, directory: Path, argv: list[str], answer_to: int, log: Path, *, ephemeral: bool
    ) -> Child:
        """Make one that runs ``gvisor_start`` in namespaces of its own. A cancel is delivered when it is made."""
        request = {
            "directory": str(directory),
            "argv": argv,
            "ephemeral": ephemeral,
            "environment": dict(os.environ),
        }
        data = json.dumps(request).encode()
        making = asyncio.ensure_future(asyncio.to_thread(self._make, data, answer_to, log))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            await asyncio.wait([making])
            if making.exception() is None:
                await asyncio.to_thread(end_started, making.result())
            raise

    def _make(self, data: bytes, answer_to: int, log: Path) -> Child:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            with self._lock:
                pid = self._ask(data, [answer_to, output]) or self._ask(data, [answer_to, output])
        finally:
            os.close(output)
        ticks = read_start_ticks(pid) if pid else None
        if not pid:
            raise AenvError("the process that machines are copied from ends as soon as it is started")
        if ticks is None:
            raise SandboxDead("the sandbox's supervisor ended as soon as it was started")
        return Child(pid, ticks)

    def _ask(self, data: bytes, descriptors: list[int]) -> int:
        """The new process's id; 0 when the template is gone."""
        connection = self._connection or self._begin()
        with contextlib.suppress(OSError, ValueError):
            socket.send_fds(connection, [data], descriptors)
            return int(connection.recv(64))
        self._end()
        return 0

    def _begin(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = gvisor_host.python("aenv_run.drivers.gvisor_template", "main(int(sys.argv[1]))")
            process = subprocess.Popen(
                [*argv, str(theirs.fileno())],
                cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        ours.settimeout(ANSWER_S)
        self._connection = ours
        self._close = weakref.finalize(self, _end, ours, process)
        return ours

    def _end(self) -> None:
        if self._close is not None:
            self._close()
        self._connection = self._close = None


def _end(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """It ends when it reads the end. Its machines live on, but those that are to end with us."""
    connection.close()
    try:
        process.wait(ANSWER_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
