"""Talking to a sandbox's supervisor: one request, one answer, on its unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from aenv_run.disk_mount import JsonValue
from aenv_run.drivers.gvisor_supervisor import CONTROL
from aenv_run.drivers.protocol import Endpoint
from aenv_run.errors import AenvError, Conflict, CorruptData, SandboxDead

MAX_ANSWER_BYTES = 1 << 20
FIRST_ATTEMPT_S, LAST_ATTEMPT_S, RETRY_S = 0.05, 5.0, 0.002
Json = dict[str, JsonValue]


class DeletedFile(BaseModel):
    """A file of the guest's disk that is open there and has no name any more, as the guest tells it."""

    pid: int
    command: str
    path: str

    def __str__(self) -> str:
        return f"{self.path!r}, open in process {self.pid} ({self.command!r})"


def _deleted_files(lines: JsonValue) -> tuple[DeletedFile, ...]:
    """What can be read of it: the guest is not to be trusted."""
    found = []
    for line in lines if isinstance(lines, list) else []:
        with contextlib.suppress(ValueError):
            found.append(DeletedFile.model_validate_json(str(line)))
    return tuple(found)


class CheckpointFailed(AenvError):
    """runsc could not save the memory; the message is its own."""

    code = "checkpoint_failed"

    def __init__(self, message: str, deleted: tuple[DeletedFile, ...]) -> None:
        super().__init__(message)
        self.deleted = deleted


def error_of(answer: Json) -> AenvError:
    """Our error for a failed request."""
    message = str(answer.get("error"))
    match answer.get("kind"):
        case "corrupt":
            return CorruptData(message, fix="restore the disk from another snapshot, or build it again")
        case "unreachable":
            return SandboxDead(message)
        case "dead":
            return SandboxDead(f"the sandbox is dead: {message}")
        case "busy":
            return Conflict(message, fix="detach the guest (Guest.detach) and capture again")
        case "checkpoint":
            return CheckpointFailed(message, _deleted_files(answer.get("deleted")))
        case _:
            return AenvError(message)


async def request(directory: Path, message: Json, *, timeout_s: float, descriptor: int | None = None) -> Json:
    """The supervisor's answer; its error as ours; SandboxDead when there is nobody to answer.

    ``descriptor`` goes along: the supervisor has its own mounts, and a path may lead it elsewhere.
    """
    loop = asyncio.get_running_loop()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    connection.setblocking(False)
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            with _address(directory) as address:
                await loop.sock_connect(connection, address)
            data = json.dumps(message).encode() + b"\n"
            socket.send_fds(connection, [data], [] if descriptor is None else [descriptor])
            reader, writer = await asyncio.open_unix_connection(sock=connection, limit=MAX_ANSWER_BYTES)
            line = await reader.readline()
    except TimeoutError as error:
        raise SandboxDead(f"the sandbox's supervisor did not answer {message['op']} in {timeout_s:g} s") from error
    except OSError as error:
        raise SandboxDead("the sandbox's supervisor is gone") from error
    finally:
        if writer is not None:
            writer.close()
        connection.close()
    if not line:
        raise SandboxDead(f"the sandbox ended during {message['op']}")
    answer: Json = json.loads(line)
    if "error" in answer:
        raise error_of(answer)
    return answer


async def first_reply(endpoint: Endpoint, timeout_s: float, *, patient: bool) -> bool:
    """Whether the guest's daemon has answered within ``timeout_s``; asked in plain HTTP, again and again.

    A packet that comes before the sandbox reads its interface is lost, and TCP sends the next after 1 s: so the
    first attempts are short, unless ``patient``: a bridge loses nothing, and each attempt costs a process.
    """
    deadline_s = time.monotonic() + timeout_s
    attempt_s = LAST_ATTEMPT_S if patient else FIRST_ATTEMPT_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        with contextlib.suppress(OSError, ValueError, TimeoutError):  # ValueError: an endless line
            async with asyncio.timeout(min(attempt_s, left_s)):
                if (await _first_line(endpoint)).startswith(b"HTTP/1.1 2"):
                    return True
        await asyncio.sleep(RETRY_S)
        attempt_s = min(attempt_s * 1.2, LAST_ATTEMPT_S)
    return False


async def _first_line(endpoint: Endpoint) -> bytes:
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    try:
        writer.write(b"GET /health HTTP/1.1\r\nHost: sandbox\r\nConnection: close\r\n\r\n")
        return await reader.readline()
    finally:
        writer.close()


def peer_pid(directory: Path) -> int:
    """The supervisor's process id as this process sees it (inside its own namespace it is 1)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        with _address(directory) as address:
            connection.connect(address)
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid: int = struct.unpack("3i", raw)[0]
    if pid <= 0:
        raise Conflict("the sandbox's supervisor runs in another pid namespace")
    return pid


@contextlib.contextmanager
def _address(directory: Path) -> Iterator[str]:
    """A socket's path may have 107 bytes only: through a descriptor of its directory it always fits."""
    try:
        descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SandboxDead(f"the sandbox's directory {directory} is gone") from error
    try:
        yield f"/proc/self/fd/{descriptor}/{CONTROL}"
    finally:
        os.close(descriptor)
