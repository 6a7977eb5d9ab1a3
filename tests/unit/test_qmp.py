"""The QMP client against peers that misbehave. Every wait is bounded."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aenv_run.drivers.qmp import Qmp, QmpError
from aenv_run.errors import ProtocolError, SandboxDead

GREETING = b'{"QMP": {"version": {}, "capabilities": []}}\n'
Reply = Callable[[str, int], bytes]
Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def done(number: int, value: object = None) -> bytes:
    return json.dumps({"return": {} if value is None else value, "id": number}).encode() + b"\n"


def peer(reply: Reply, greeting: bytes = GREETING) -> Connected:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        while line := await reader.readline():
            request = json.loads(line)
            name = request["execute"]
            writer.write(done(request["id"]) if name == "qmp_capabilities" else reply(name, request["id"]))
        writer.close()

    return serve


@asynccontextmanager
async def connected(directory: Path, reply: Reply) -> AsyncIterator[Qmp]:
    async with await serving(directory, peer(reply)):
        client = await Qmp.connect(directory, "s", 5.0)
        try:
            yield client
        finally:
            client.close()


async def serving(directory: Path, serve: Connected) -> asyncio.Server:
    # bind(2) has the same limit as connect(2), so the server is reached by a relative path
    descriptor = os.open(directory, os.O_PATH)
    try:
        return await asyncio.start_unix_server(serve, f"/proc/self/fd/{descriptor}/s")
    finally:
        os.close(descriptor)


async def test_a_long_path_is_no_problem_and_events_are_kept(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 100) / ("e" * 100)
    directory.mkdir(parents=True)

    def reply(name: str, number: int) -> bytes:
        return b'{"event": "STOP"}\n' + done(number, {"status": "paused"})

    async with connected(directory, reply) as client:
        assert await client.status() == "paused"
        assert client.seen("SHUTDOWN", "STOP") == "STOP"


async def test_a_refusal_is_an_error_and_the_connection_lives_on(tmp_path: Path) -> None:
    def reply(name: str, number: int) -> bytes:
        if name == "good":
            return done(number, 1)
        return json.dumps({"error": {"class": "X", "desc": "it is locked"}, "id": number}).encode() + b"\n"

    async with connected(tmp_path, reply) as client:
        with pytest.raises(QmpError, match="it is locked"):
            await client.execute("bad")
        assert await client.execute("good") == 1


async def test_a_late_reply_is_not_taken_for_the_next_one(tmp_path: Path) -> None:
    late: list[bytes] = []

    def reply(name: str, number: int) -> bytes:
        if name == "slow":
            late.append(done(number, "slow"))
            return b""
        return late.pop() + done(number, "quick")

    async with connected(tmp_path, reply) as client:
        with pytest.raises(SandboxDead, match=r"did not answer slow in 0\.05 s"):
            await client.execute("slow", timeout_s=0.05)
        assert await client.execute("quick") == "quick"


@pytest.mark.parametrize("line", [b"x" * (2 << 20) + b"\n", b"no json\n", b"[]\n"], ids=["long", "text", "list"])
async def test_a_peer_that_is_no_qemu_is_dead(tmp_path: Path, line: bytes) -> None:
    async with connected(tmp_path, lambda name, number: line) as client:
        with pytest.raises(SandboxDead):
            await client.execute("anything", timeout_s=5.0)
        assert client.closed.is_set()
        with pytest.raises(SandboxDead):
            await client.execute("anything")


async def test_a_wrong_greeting_is_refused(tmp_path: Path) -> None:
    async with await serving(tmp_path, peer(lambda name, number: b"", greeting=b"220 mail ready\n")):
        with pytest.raises(ProtocolError, match="220 mail"):
            await Qmp.connect(tmp_path, "s", 5.0)


async def test_a_cancelled_command_is_cancelled(tmp_path: Path) -> None:
    async with connected(tmp_path, lambda name, number: done(number)) as client:
        for _ in range(50):  # wait_for of Python 3.11 swallowed some of these
            task = asyncio.create_task(client.execute("x"))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await client.execute("x") == {}


async def test_nobody_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        await Qmp.connect(tmp_path, "s", 5.0)
