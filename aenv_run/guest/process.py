"""A running process of the guest, seen through one output stream of the daemon."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from pydantic import BaseModel, Field

from aenv_run.errors import ProtocolError
from aenv_run.guest.connect import messages, parse, transport_faults
from aenv_run.later import later

if TYPE_CHECKING:
    import httpx
else:
    httpx = later("httpx")

Stream = Literal["stdout", "stderr", "pty"]


class Calls(Protocol):
    """What a process asks of the daemon."""

    async def unary(self, method: str, request: dict[str, object]) -> object:
        """One call of process.Process."""

    async def feed(self, pid: int, chunks: AsyncIterable[bytes]) -> None:
        """All of it to a process's standard input, then its end."""

    async def kill(self, pid: int) -> bool:
        """Kill a session."""


@dataclass(frozen=True)
class Output:
    """Bytes that the process wrote; a chunk may end inside a UTF-8 character."""

    stream: Stream
    data: bytes


@dataclass(frozen=True)
class Ended:
    """The process is gone; always the last event. ``signal`` is the text after "signal: "."""

    exit_code: int
    signal: str | None = None
    error: str | None = None


class _Start(BaseModel):
    pid: int


class _Data(BaseModel):
    stdout: str | None = None
    stderr: str | None = None
    pty: str | None = None


class _End(BaseModel):
    exit_code: int = Field(0, alias="exitCode")
    exited: bool = False
    status: str = ""
    error: str | None = None


class _Event(BaseModel):
    start: _Start | None = None
    data: _Data | None = None
    end: _End | None = None


class _Message(BaseModel):
    event: _Event


class Process:
    """Made by ``Guest.start`` and ``Guest.connect``. Leaving their context detaches; the process runs on."""

    def __init__(self, pid: int, events: AsyncIterator[bytes], calls: Calls) -> None:
        self.pid = pid
        self._events = events
        self._calls = calls
        self._pty = False

    @classmethod
    async def begin(cls, response: httpx.Response, calls: Calls, *, pty: bool) -> Process:
        """Read the first event, which names the pid; an error in its place is raised."""
        stream = messages(response)
        with transport_faults("start of a process"):
            async for payload in stream:
                event = parse(_Message, payload).event
                if event.start is not None:
                    process = cls(event.start.pid, stream, calls)
                    process._pty = pty
                    return process
        raise ProtocolError("the sandbox's daemon ended a process stream before it named the pid")

    async def events(self) -> AsyncIterator[Output | Ended]:
        """Output as it comes, then exactly one ``Ended``. May be read once."""
        with transport_faults(f"output of process {self.pid}"):
            async for payload in self._events:
                event = parse(_Message, payload).event
                if event.data is not None:
                    for output in _outputs(event.data):
                        yield output
                elif event.end is not None:
                    signal = event.end.status.removeprefix("signal: ")
                    killed = signal != event.end.status
                    yield Ended(event.end.exit_code, signal if killed else None, event.end.error)
                    return
        raise ProtocolError(f"the stream of process {self.pid} ended without saying how the process did")

    async def send_input(self, data: bytes) -> None:
        """Write to its standard input or terminal."""
        field = "pty" if self._pty else "stdin"
        await self._send("SendInput", {"input": {field: base64.b64encode(data).decode()}})

    async def feed(self, chunks: AsyncIterable[bytes]) -> None:
        """Write all chunks to its standard input through one call, then end-of-file."""
        await self._calls.feed(self.pid, chunks)

    async def kill(self) -> bool:
        """SIGKILL to its whole session: what it started ends with it. False when nothing of it was left."""
        return await self._calls.kill(self.pid)

    async def close_stdin(self) -> None:
        """End-of-file on its standard input."""
        await self._send("CloseStdin", {})

    async def signal(self, name: Literal["SIGTERM", "SIGKILL"]) -> None:
        """Send a signal to the process itself."""
        await self._send("SendSignal", {"signal": f"SIGNAL_{name}"})

    async def resize(self, cols: int, rows: int) -> None:
        """Tell its terminal the new size."""
        await self._send("Update", {"pty": {"size": {"cols": cols, "rows": rows}}})

    async def _send(self, method: str, request: dict[str, object]) -> None:
        await self._calls.unary(method, {"process": {"pid": self.pid}, **request})


def _outputs(data: _Data) -> list[Output]:
    streams: list[tuple[Stream, str | None]] = [
        ("stdout", data.stdout),
        ("stderr", data.stderr),
        ("pty", data.pty),
    ]
    try:
        return [Output(name, base64.b64decode(text, validate=True)) for name, text in streams if text]
    except ValueError as error:
        raise ProtocolError(f"the sandbox's daemon sent output that is not base64: {error}") from error
