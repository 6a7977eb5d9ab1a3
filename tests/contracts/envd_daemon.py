"""The real guest daemon on the loopback interface, and a client that speaks to it as an SDK does."""

from __future__ import annotations

import base64
import json
import os
import shutil
import struct
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contracts import envd_protobuf
from tests.contracts.envd_protobuf import METHODS

SOURCE = Path(__file__).resolve().parents[2] / "envd"
Json = dict[str, Any]


def build(into: Path) -> Path:
    """The binary named by AENV_ENVD, else one built from the source beside these tests."""
    given = os.environ.get("AENV_ENVD")
    if given:
        return Path(given).resolve()
    if shutil.which("go") is None:
        pytest.skip("no Go compiler here: name a built binary in AENV_ENVD")
    binary = into / "envd"
    command = ["go", "build", "-trimpath", "-ldflags=-s -w -buildid=", "-o", str(binary), "."]
    subprocess.run(command, cwd=SOURCE, check=True, env={**os.environ, "CGO_ENABLED": "0"})
    return binary


@contextmanager
def daemon(binary: Path, within: Sequence[str] = ()) -> Iterator[str]:
    """One daemon on a free port; its base URL. It ends with all that it started.

    ``within`` is a command that runs it, as in a mount namespace.
    """
    command = [*within, str(binary), "serve", "--listen", "127.0.0.1", "--port", "0", "--host-test"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            word, _version, address = process.stdout.readline().split()
            assert word == "aenv-ready"
            yield f"http://{address}"
            httpx.post(f"http://{address}/aenv/settle", timeout=30)
        finally:
            process.terminate()
            assert process.wait(10) == 0


def envelope(payload: bytes) -> bytes:
    return b"\0" + struct.pack(">I", len(payload)) + payload


async def envelopes(chunks: AsyncIterator[bytes]) -> AsyncIterator[tuple[int, bytes]]:
    buffer = b""
    async for chunk in chunks:
        buffer += chunk
        while len(buffer) >= 5:
            size = struct.unpack(">I", buffer[1:5])[0]
            if len(buffer) < 5 + size:
                break
            yield buffer[0], buffer[5 : 5 + size]
            buffer = buffer[5 + size :]
    assert buffer == b"", "the stream ends inside an envelope"


@dataclass
class Outcome:
    """What a stream told, to its end."""

    pid: int = 0
    stdout: bytes = b""
    stderr: bytes = b""
    pty: bytes = b""
    end: Json | None = None
    error: Json | None = None
    keepalives: int = 0
    finished: bool = False
    order: list[str] = field(default_factory=list)

    def take(self, flags: int, message: Json) -> None:
        assert not self.finished, "a message after the end envelope"
        if flags == 2:
            self.finished, self.error = True, message.get("error")
            return
        assert flags == 0
        if "event" not in message:  # of a watch: its start
            return
        (kind, value), *others = message["event"].items()
        assert not others
        self.order.append(kind)
        if kind == "start":
            self.pid = value["pid"]
        elif kind == "end":
            self.end = value
        elif kind == "keepalive":
            self.keepalives += 1
        else:
            ((name, text),) = value.items()
            setattr(self, name, getattr(self, name) + base64.b64decode(text))


def auth(user: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:".encode()).decode()}


def start_request(cmd: str, *args: str, cwd: str | None = None, **fields: Any) -> Json:
    process: Json = {"cmd": cmd, "args": list(args), "envs": fields.pop("envs", {})}
    if cwd is not None:
        process["cwd"] = cwd
    return {"process": process, "stdin": False, **fields}


class Client:
    """Methods of the daemon by their protocol names, in one of its codecs."""

    def __init__(self, base: str, codec: str = "json") -> None:
        self.http = httpx.AsyncClient(base_url=base, timeout=30)
        self.base = base
        self.codec = codec

    def encode(self, method: str, message: Json) -> bytes:
        if self.codec == "json":
            return json.dumps(message).encode()
        return envd_protobuf.encode(METHODS.get(method, ("Empty", "Empty"))[0], message)

    def decode(self, method: str, payload: bytes) -> Json:
        if self.codec == "json":
            answer: Json = json.loads(payload)
            return answer
        return envd_protobuf.decode(METHODS[method][1], payload)

    def frame(self, method: str, message: Json) -> bytes:
        return envelope(self.encode(method, message))

    async def call(self, method: str, message: Json, **headers: str) -> httpx.Response:
        content = self.encode(method, message)
        everything = {"Content-Type": f"application/{self.codec}", **headers}
        return await self.http.post(f"/{method}", content=content, headers=everything)

    async def ok(self, method: str, message: Json) -> Json:
        response = await self.call(method, message)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == f"application/{self.codec}"
        return self.decode(method, response.content)

    async def code(self, method: str, message: Json) -> str:
        """The error code of a unary call that must fail, its HTTP status checked."""
        response = await self.call(method, message)
        error = response.json()
        statuses = {"not_found": 404, "already_exists": 409, "invalid_argument": 400, "unauthenticated": 401}
        statuses |= {"unimplemented": 501, "internal": 500, "unknown": 500, "failed_precondition": 400}
        assert response.status_code == statuses[error["code"]]
        assert error["message"]
        return str(error["code"])

    @asynccontextmanager
    async def stream(
        self, method: str, message: Json, headers: dict[str, str] | None = None
    ) -> AsyncIterator[AsyncIterator[tuple[int, Json]]]:
        content_type = f"application/connect+{self.codec}"
        everything = {"Content-Type": content_type, "Connect-Protocol-Version": "1", **(headers or {})}
        content = self.frame(method, message)
        request = self.http.stream("POST", f"/{method}", content=content, headers=everything)
        async with request as response:
            assert response.status_code == 200
            assert response.headers["content-type"] == content_type
            yield self.messages(method, response)

    async def messages(self, method: str, response: httpx.Response) -> AsyncIterator[tuple[int, Json]]:
        """The end is JSON in every codec."""
        async for flags, payload in envelopes(response.aiter_bytes()):
            yield flags, json.loads(payload) if flags == 2 else self.decode(method, payload)

    async def follow(self, method: str, message: Json, headers: dict[str, str] | None = None) -> Outcome:
        outcome = Outcome()
        async with self.stream(method, message, headers) as events:
            async for flags, event in events:
                outcome.take(flags, event)
        assert outcome.finished, "the stream has no end envelope"
        return outcome

    async def run(self, request: Json, headers: dict[str, str] | None = None) -> Outcome:
        return await self.follow("process.Process/Start", request, headers)

    async def shell(self, script: str, headers: dict[str, str] | None = None, **fields: Any) -> Outcome:
        return await self.run(start_request("/bin/sh", "-c", script, cwd="/", **fields), headers)
