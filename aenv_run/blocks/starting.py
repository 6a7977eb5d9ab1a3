"""The block server as those see it who need one: there when it is asked for, and started anew when it dies."""

from __future__ import annotations

import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from aenv_run import nbd
from aenv_run.errors import StoreUnavailable
from aenv_run.nbd_client import connected
from aenv_run.node_socket import FileLock
from aenv_run.paths import Home
from aenv_run.stopping import STOP

log = logging.getLogger(__name__)

MODULE = "aenv_run.blocks.process"
START_TIMEOUT_S = 60.0
POLL_S = 0.02
#: The exit code of a process that found another one serving.
ALREADY_RUNS = 75


class BlockServerProcess:
    """The one of a home. Thread-safe. ``hold`` keeps it there for as long as this process lives.

    One that is started here meets the store of ``repository`` at once, before anybody waits for that.
    """

    def __init__(self, home: Home, repository: str = "") -> None:
        self.home = home
        self._repository = repository
        self._guard = threading.Lock()
        self._children: list[subprocess.Popen[bytes]] = []
        self._holding = False

    def hold(self) -> None:
        """Return when it serves; from now on it is started anew whenever it ends. Blocking."""
        self.ensure()
        with self._guard:
            if self._holding:
                return
            self._holding = True
        threading.Thread(target=self._keep, name="block server", daemon=True).start()

    def ensure(self) -> None:
        """Return when it serves; of many callers one starts it. Blocking."""
        if self._answers():
            return
        lock = FileLock(self.home.locks / "blocks-start.lock")
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not lock.acquire():
            time.sleep(POLL_S)
            if self._answers():
                return
            if time.monotonic() > deadline_s:
                raise self._fails("another process is starting it and does not get there")
        try:
            self._start(deadline_s)
        finally:
            lock.release()

    def pid(self) -> int:
        """The server's process id, 0 when none serves."""
        try:
            with connected(self.home.block_socket, 10.0) as connection:
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                return int(struct.unpack("3i", credentials)[0])
        except OSError:
            return 0

    def stop(self) -> None:
        """End it, and start it no more. Blocking."""
        with self._guard:
            self._holding = False
        for child in self._children:
            child.terminate()
        lock = FileLock(self.home.locks / "blocks.lock")
        while not lock.acquire():  # held by the one that serves, and by the one that looks after it
            if pid := self.pid():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            time.sleep(POLL_S)
        lock.release()
        for child in self._children:
            child.wait()

    def _start(self, deadline_s: float) -> None:
        child: subprocess.Popen[bytes] | None = None
        while not self._answers():
            if time.monotonic() > deadline_s:
                raise self._fails(f"it did not answer within {START_TIMEOUT_S:g} s")
            if child is None:
                if not self._is_looked_after():
                    child = self._spawn()
            elif (code := child.poll()) is not None:
                if code != ALREADY_RUNS:
                    raise self._fails(f"it ended as soon as it was started (exit code {code})")
                child = None
            time.sleep(POLL_S)

    def _is_looked_after(self) -> bool:
        """A server is there that begins or ends, or the one that starts the next."""
        lock = FileLock(self.home.locks / "blocks.lock")
        if not lock.acquire():
            return True
        lock.release()
        return False

    def _spawn(self) -> subprocess.Popen[bytes]:
        package = str(Path(__file__).resolve().parent.parent.parent)
        paths = [package, *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
        with self.home.block_log.open("ab") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", MODULE, "--home", str(self.home.root), "--meet", self._repository],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/", env=environment,
                start_new_session=True,
            )  # fmt: skip
        STOP.lasting.add(child.pid)
        with self._guard:
            self._children = [one for one in self._children if one.poll() is None] + [child]
        return child

    def _answers(self) -> bool:
        try:
            with connected(self.home.block_socket, 10.0) as connection:
                return connection.recv(len(nbd.GREETING)) == nbd.GREETING
        except OSError:
            return False

    def _keep(self) -> None:
        """A connection that asks for nothing: the server stays for it, and its end tells that the server died."""
        while self._holding:
            with ExitStack() as stack, suppress(OSError):
                connection = stack.enter_context(connected(self.home.block_socket, None))
                while connection.recv(4096):
                    pass
            time.sleep(POLL_S)
            if not self._holding or not self.home.root.exists():
                return
            try:
                self.ensure()
            except (StoreUnavailable, OSError) as error:
                log.error("the block server cannot be started: %s", error)
                time.sleep(1.0)
            for child in self._children:
                child.poll()

    def _fails(self, why: str) -> StoreUnavailable:
        return StoreUnavailable(
            f"the block server of {self.home.root} cannot be used: {why}", fix=f"see {self.home.block_log}"
        )
