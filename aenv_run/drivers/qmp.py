"""A client of QEMU's machine protocol (QMP): bounded lines, a time-out on every command."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from aenv_run.errors import AenvError, ProtocolError, SandboxDead

#: One reply; the largest that we ask for is 64 KiB of console in base64.
MAX_LINE_BYTES = 1 << 20
Json = dict[str, "JsonValue"]
JsonValue = str | int | float | bool | None | list["JsonValue"] | Json
Arguments = Mapping[str, object]


class QmpError(AenvError):
    """QEMU refused a command; the message is its own."""

    code = "vmm_refused"


class Qmp:
    """One connection. ``events`` keeps the last events; ``closed`` is set when QEMU is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[JsonValue]] = {}
        self.events: deque[Json] = deque(maxlen=256)
        self.changed = asyncio.Event()
        self.closed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, directory: Path, name: str, timeout_s: float) -> Qmp:
        """Connect to the socket ``name`` in ``directory`` and negotiate.

        The path goes through a descriptor of the directory: a socket's path may have 107 bytes only.
        Raises OSError while nobody listens, and ProtocolError or TimeoutError when it is not QEMU.
        """
        # asyncio.timeout throughout: wait_for of Python 3.11 may swallow a cancellation.
        descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_unix_connection(
                    f"/proc/self/fd/{descriptor}/{name}", limit=MAX_LINE_BYTES
                )
        finally:
            os.close(descriptor)
        client = cls(reader, writer)
        try:
            async with asyncio.timeout(timeout_s):
                greeting = await reader.readline()
            if b'"QMP"' not in greeting:
                raise ProtocolError(f"no QMP greeting on {name}: {greeting[:80]!r}")
            client._task = asyncio.create_task(client._receive())
            await client.execute("qmp_capabilities", timeout_s=timeout_s)
        except BaseException:
            client.close()
            raise
        return client

    def close(self) -> None:
        """Let go of the connection; QEMU runs on. Idempotent."""
        if self._task is not None:
            self._task.cancel()
        with contextlib.suppress(RuntimeError):  # the loop it belonged to may be closed already
            self._writer.close()
        self._end()

    def _end(self) -> None:
        self.closed.set()
        self.changed.set()
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(SandboxDead("the virtual machine monitor is gone"))
        self._waiting.clear()

    async def _receive(self) -> None:
        try:
            while line := await self._reader.readline():
                self._dispatch(line)
        except (OSError, ValueError):
            return  # a line beyond the limit or no JSON: the peer is not to be trusted any further
        finally:
            self._end()

    def _dispatch(self, line: bytes) -> None:
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("not an object")
        if "event" in message:
            self.events.append(message)
            self.changed.set()
            return
        waiter = self._waiting.pop(message.get("id", 0), None)
        if waiter is None or waiter.done():
            return
        if "return" in message:
            waiter.set_result(message["return"])
        else:
            waiter.set_exception(QmpError(str(message.get("error", {}).get("desc", "unknown error"))[:2000]))

    async def execute(
        self, command: str, arguments: Arguments | None = None, *, timeout_s: float = 30.0
    ) -> JsonValue:
        """Run one command and return its result; QmpError when refused, SandboxDead when QEMU is gone."""
        if self.closed.is_set():
            raise SandboxDead("the virtual machine monitor is gone")
        number = next(self._ids)
        waiter: asyncio.Future[JsonValue] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiter
        request: dict[str, object] = {"execute": command, "id": number}
        if arguments is not None:
            request["arguments"] = arguments
        try:
            self._writer.write(json.dumps(request).encode() + b"\n")
            async with asyncio.timeout(timeout_s):
                return await waiter
        except (TimeoutError, OSError) as error:
            raise SandboxDead(
                f"the virtual machine monitor did not answer {command} in {timeout_s:g} s"
            ) from error
        finally:
            self._waiting.pop(number, None)

    async def status(self) -> str:
        """QEMU's run state."""
        reply = await self.execute("query-status")
        return str(reply.get("status", "")) if isinstance(reply, dict) else ""

    def seen(self, *names: str) -> str | None:
        """The first kept event that has one of ``names``."""
        return next((str(one["event"]) for one in self.events if one["event"] in names), None)
