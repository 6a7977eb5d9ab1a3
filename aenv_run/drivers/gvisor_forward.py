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
WAIT_S = 60.0


class Forwarder:
    """Listens on a free port. Threads: a connection lives for seconds and moves bytes, nothing else."""

    def __init__(self, children: Children, argv: Sequence[str], port: int = 0) -> None:
        self._children, self._argv = children, tuple(argv)
        self._listener = socket.create_server(("127.0.0.1", port), backlog=BACKLOG)
        self._open: set[socket.socket] = set()
        self._changed = threading.Condition()
        self._closed = False
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close_gate(self, timeout_s: float) -> bool:
        """End every connection and hold new ones back: whether every bridge has ended in the guest.

        One that has not holds descriptors of the host, and an image with those cannot be restored. It is not
        killed: that would end runsc's half alone. The guest must run, or none can end.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closed = True
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            return self._changed.wait_for(lambda: not self._open, deadline - time.monotonic())

    def open_gate(self) -> None:
        """Let connections in again."""
        with self._changed:
            self._closed = False
            self._changed.notify_all()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._open.add(connection)  # before there is a bridge, so that none is missed by a gate that closes
        try:
            with connection:
                self._bridge(connection)
        finally:
            with self._changed:
                self._open.discard(connection)
                self._changed.notify_all()

    def _bridge(self, connection: socket.socket) -> None:
        """Return when the bridge has ended in the guest, however long that takes: a paused one cannot."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        guest_in, to_guest = os.pipe2(os.O_CLOEXEC)
        from_guest, guest_out = os.pipe2(os.O_CLOEXEC)
        log = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            pid = self._children.spawn(self._argv, stdin=guest_in, stdout=guest_out, stderr=log)
        finally:
            for descriptor in (guest_in, guest_out, log):
                os.close(descriptor)
        threading.Thread(target=_pump_in, args=(connection, to_guest), daemon=True).start()
        _pump_out(from_guest, connection)
        while self._children.wait(pid, WAIT_S) is None:
            pass


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
