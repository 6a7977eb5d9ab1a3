"""Commands that the server runs on its own machine for a client, whose JSON the client prints."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aenv_run.api.node_calls.route import CallRoute
from aenv_run.api.server import Serving
from aenv_run.config import REPOSITORY_VARIABLE, repository_name
from aenv_run.credentials import KEY_VARIABLE, URL_VARIABLE
from aenv_run.errors import Interrupted
from aenv_run.host_commands import ALIVE_S, MAX_LINE_BYTES, MAX_OUTPUT_BYTES, HostLine, HostRequest
from aenv_run.node_api import while_connected
from aenv_run.paths import Home
from aenv_run.process import kill_group
from aenv_run.server_link import CALLS, VERSION_HEADER
from aenv_run.version import VERSION

#: For a command to end in order when its caller hung up, as at Ctrl-C.
INTERRUPT_S = 10.0
#: A server in the background of a shell ignores interrupts, and so would what it starts.
START = """
import signal
from aenv_run.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""
router = APIRouter(prefix=CALLS, route_class=CallRoute, include_in_schema=False)


@router.post("/host")
async def run(body: HostRequest, request: Request, serving: Serving) -> Response:
    """What it says as it says it, then its exit code and output. A caller who hangs up interrupts it."""
    return Lines(_run(body.argv(), serving.home))


class Lines(Response):
    """Lines as they come."""

    def __init__(self, lines: AsyncGenerator[HostLine, None]) -> None:
        super().__init__()
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        async with aclosing(self._lines):
            with suppress(Interrupted):  # nobody is left to be told
                await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        kind = [(b"content-type", b"application/x-ndjson"), (VERSION_HEADER.lower().encode(), VERSION.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        async for line in self._lines:
            data = line.model_dump_json(exclude_defaults=True).encode() + b"\n"
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _run(argv: list[str], home: Home) -> AsyncGenerator[HostLine, None]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", START, "--local", *argv),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=_environment(home),
        start_new_session=True,
        limit=MAX_LINE_BYTES,
    )
    assert process.stdout is not None and process.stderr is not None
    output = asyncio.ensure_future(_bounded(process.stdout))
    try:
        async for line in _said(process.stderr):
            yield line
        while not output.done():
            await asyncio.wait([output], timeout=ALIVE_S)
            yield HostLine()
        yield HostLine(exit_code=await process.wait(), output=output.result())
    finally:
        output.cancel()
        await asyncio.shield(_end(process))


async def _said(stream: asyncio.StreamReader) -> AsyncGenerator[HostLine, None]:
    """Line by line, and a sign of life where nothing comes for a while."""
    reading: asyncio.Future[bytes] | None = None
    try:
        while True:
            reading = reading or asyncio.ensure_future(_line(stream))
            await asyncio.wait([reading], timeout=ALIVE_S)
            if not reading.done():
                yield HostLine()
                continue
            data, reading = reading.result(), None
            if not data:
                return
            yield HostLine(says=data.decode(errors="replace").rstrip("\n"))
    finally:
        if reading is not None:
            reading.cancel()


async def _line(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.readuntil()
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.read(error.consumed)


async def _bounded(stream: asyncio.StreamReader) -> str:
    data = bytearray()
    while chunk := await stream.read(1 << 16):
        if len(data) <= MAX_OUTPUT_BYTES:
            data += chunk
    return data.decode(errors="replace") if len(data) <= MAX_OUTPUT_BYTES else ""


async def _end(process: asyncio.subprocess.Process) -> None:
    """As Ctrl-C ends it, or not at all gently after a while; nothing when it has ended."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), INTERRUPT_S)
    kill_group(process.pid)
    await process.wait()


def _environment(home: Home) -> dict[str, str]:
    package = str(Path(__file__).resolve().parents[3])
    kept = {name: value for name, value in os.environ.items() if name not in (URL_VARIABLE, KEY_VARIABLE)}
    paths = [package, *(path for path in kept.get("PYTHONPATH", "").split(os.pathsep) if path)]
    return kept | {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "AENV_HOME": str(home.root),
        REPOSITORY_VARIABLE: repository_name(None, home),
    }
