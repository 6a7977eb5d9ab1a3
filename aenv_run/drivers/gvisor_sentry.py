"""Pause and resume by the sandbox kernel's own control socket: 1 ms, where ``runsc pause`` costs 30.

The socket is runsc's, not documented: whatever is not as expected makes the caller use the command instead.
Seen with 20240729 (gVisor's pkg/urpc: a JSON object each way). Also what the guest's daemon must do before a
checkpoint. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time

TIMEOUT_S = 10.0
MAX_REPLY_BYTES, MAX_INIT_BYTES = 1 << 20, 1 << 16


def call(path: str, method: str, argument: dict[str, str | int] | None = None) -> bool:
    """Whether the call succeeded; False says that nothing is known to have happened."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(TIMEOUT_S)
        try:
            connection.connect(path)
            connection.sendall(json.dumps({"method": f"containerManager.{method}", "arg": argument}).encode())
            data = b""
            while len(data) < MAX_REPLY_BYTES and (chunk := connection.recv(65536)):
                data += chunk
                with contextlib.suppress(ValueError):
                    reply = json.loads(data)
                    return isinstance(reply, dict) and reply.get("success") is True
        except OSError:
            pass  # another version may keep it elsewhere, or not at all
    return False


class NotDisconnectedError(Exception):
    """The daemon did not close its connections; the text says why. ``answered``: it is there, but refused."""

    def __init__(self, message: str, *, answered: bool = False) -> None:
        super().__init__(message)
        self.answered = answered


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """A connection to the guest's daemon."""
    try:
        return socket.create_connection((host, port), timeout_s)
    except OSError as error:
        raise NotDisconnectedError(f"the sandbox's daemon is unreachable before a capture: {error}") from error


def disconnect(connection: socket.socket, timeout_s: float) -> None:
    """Have the guest's daemon close every connection but this one, which ends with it.

    One that is established at the checkpoint poisons the image: the restored guest never listens (measured).
    """
    body = json.dumps({"restored": True})
    request = (
        "POST /init HTTP/1.1\r\nHost: sandbox\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    )
    reply = b""
    deadline = time.monotonic() + timeout_s  # of it all: the guest may answer a byte at a time
    try:
        connection.sendall(request.encode())
        while len(reply) < MAX_INIT_BYTES:  # to its end: the daemon has closed it then
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            if not (chunk := connection.recv(4096)):
                break
            reply += chunk
    except OSError as error:
        raise NotDisconnectedError(f"the sandbox's daemon is unreachable before a capture: {error}") from error
    if not reply:
        raise NotDisconnectedError("the sandbox's daemon does not answer before a capture")
    if not reply.startswith((b"HTTP/1.1 2", b"HTTP/1.0 2")):
        said = reply.partition(b"\r\n")[0].decode(errors="replace")[:100]
        raise NotDisconnectedError(f"the sandbox's daemon kept its connections: {said}", answered=True)
