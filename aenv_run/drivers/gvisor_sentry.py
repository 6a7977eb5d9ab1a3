"""Pause, resume and checkpoint by the sandbox kernel's own control socket: 30 ms less than with runsc's commands.

The socket is runsc's, not documented: whatever is not as expected makes the caller use the command instead.
Seen with 20240729 (gVisor's pkg/urpc: a JSON object each way). Also what the guest's daemon must do before a
checkpoint. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time

TIMEOUT_S, CHECKPOINT_S = 10.0, 600.0
#: Those whose commands were watched: the lock that is taken first, what is sent for a checkpoint.
KNOWN_VERSIONS = ("0.0~20240729.",)
CHECKPOINT_FILES = ("checkpoint.img", "pages_meta.img", "pages.img")
MAX_REPLY_BYTES, MAX_INIT_BYTES = 1 << 20, 1 << 16


def call(path: str, method: str, argument: dict[str, str | int] | None = None) -> bool:
    """Whether the call succeeded; False says that nothing is known to have happened."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(TIMEOUT_S)
        try:
            connection.connect(path)
            connection.sendall(json.dumps({"method": f"containerManager.{method}", "arg": argument}).encode())
            return _reply(connection).get("success") is True
        except (OSError, ValueError):
            return False  # another version may keep it elsewhere, or not at all


class NoAnswerError(Exception):
    """The kernel did not answer, or not as expected."""


def checkpoint(path: str, directory: str) -> str:
    """Save the memory into new files in ``directory``; the sandbox runs on. Returns what is wrong, or nothing.

    ``NoAnswerError`` when that is not known; the files are gone then.
    """
    options: dict[str, object] = {"key": None, "metadata": {"compression": "none"}, "have_pages_file": True}
    options |= {"MemoryFileSaveOpts": {"ExcludeCommittedZeroPages": False}, "Resume": True}
    message = json.dumps({"method": "containerManager.Checkpoint", "arg": options}).encode()
    names = [f"{directory}/{name}" for name in CHECKPOINT_FILES]
    files: list[int] = []
    try:
        for name in names:
            files.append(os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
            connection.settimeout(CHECKPOINT_S)
            connection.connect(path)
            socket.send_fds(connection, [message], files)
            reply = _reply(connection)
        return "" if reply.get("success") is True else str(reply.get("err") or reply)[:MAX_INIT_BYTES]
    except (OSError, ValueError) as error:
        for name in names[: len(files)]:
            with contextlib.suppress(OSError):
                os.unlink(name)  # noqa: PTH108
        raise NoAnswerError(str(error)) from error
    finally:
        for file in files:
            os.close(file)


def _reply(connection: socket.socket) -> dict[str, object]:
    """One JSON object, however it comes in; ValueError when it is none."""
    data = b""
    while len(data) < MAX_REPLY_BYTES and (chunk := connection.recv(65536)):
        data += chunk
        with contextlib.suppress(ValueError):
            reply = json.loads(data)
            if isinstance(reply, dict):
                return reply
            break
    raise ValueError("no reply, or none that is understood")


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
