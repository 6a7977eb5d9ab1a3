"""From the host's loopback to the daemon of a sandbox without a network: a ``runsc exec`` per connection."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence

from aenv_run.drivers.gvisor_children import Children

CHUNK_BYTES = 1 << 17
BACKLOG = 128


class Forwarder:
    """Listens on a free port. Threads: a connection lives for seconds and moves bytes, nothing else."""

    def __init__(self, children: Children, argv: Sequence[str], port: int = 0) -> None:
        self._children, self._argv = children, tuple(argv)
        self._listener = socket.create_server(("127.0.0.1", port), backlog=BACKLOG)
        self._open: dict[int, socket.socket] = {}
        self._changed = threading.Condition()
        self._gate = threading.Event()
        self._gate.set()
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close_gate(self, timeout_s: float) -> None:
        """End every connection and hold new ones back. The bridges end in the guest: none is in a memory image."""
        self._gate.clear()
        deadline = time.monotonic() + timeout_s
        with self._changed:
            for connection in self._open.values():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            while self._open and self._changed.wait(deadline - time.monotonic()):
                pass
            left = list(self._open)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    def open_gate(self) -> None:
        """Let connections in again."""
        self._gate.set()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        self._gate.wait()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        guest_in, to_guest = os.pipe2(os.O_CLOEXEC)
        from_guest, guest_out = os.pipe2(os.O_CLOEXEC)
        log = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            pid = self._children.spawn(self._argv, stdin=guest_in, stdout=guest_out, stderr=log)
        finally:
            for descriptor in (guest_in, guest_out, log):
                os.close(descriptor)
        with self._changed:
            self._open[pid] = connection
        threading.Thread(target=_pump_in, args=(connection, to_guest), daemon=True).start()
        _pump_out(from_guest, connection)
        self._children.wait(pid, 10.0)
        with self._changed:
            del self._open[pid]
            self._changed.notify_all()
        connection.close()


def _pump_in(connection: socket.socket, target: int) -> None:
    try:
        while data := connection.recv(CHUNK_BYTES):
            view = memoryview(data)
            while view:
                view = view[os.write(target, view) :]
    except OSError:
        pass
    finally:
        os.close(target)


def _pump_out(source: int, connection: socket.socket) -> None:
    try:
        while data := os.read(source, CHUNK_BYTES):
            connection.sendall(data)
    except OSError:
        pass  # the client is gone: closing the pipe tells the bridge
    finally:
        os.close(source)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
