"""``sandbox.commands``: run programs in a sandbox. Names as users of E2B's SDK know them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Literal, overload

from aenv_run.errors import AenvError, CommandFailed, SandboxDead
from aenv_run.guest import Command, Ended, Guest, Output, Process, ProcessInfo
from aenv_run.sdk_guest import GuestCall

Sink = Callable[[str], None]
#: A login shell: bash where the image has one, else sh. Images need neither for ``run([...])``.
_LOGIN = 'if [ -x /bin/bash ]; then exec /bin/bash -l -c "$1"; else exec /bin/sh -l -c "$1"; fi'


@dataclass(frozen=True)
class CommandResult:
    """How a command ended. ``error`` says so when a signal or the daemon ended it, not the command."""

    stdout: str
    stderr: str
    exit_code: int
    error: str | None = None

    def check(self, cmd: object = "the command") -> CommandResult:
        """Itself, or ``CommandFailed`` for an exit code other than 0."""
        if self.exit_code == 0:
            return self
        last = "\n".join((self.stderr or self.stdout).strip().splitlines()[-20:])
        raise CommandFailed(f"{cmd} exited with {self.exit_code}: {self.error or last}".rstrip(": "))


def command_of(
    cmd: str | Sequence[str],
    *,
    envs: dict[str, str] | None = None,
    cwd: str | None = None,
    user: str | None = None,
    stdin: bool = False,
) -> Command:
    """A string goes to a login shell, a sequence is run as it is."""
    argv = ("/bin/sh", "-c", _LOGIN, "sh", cmd) if isinstance(cmd, str) else tuple(cmd)
    return Command(argv, env=envs or {}, cwd=cwd, user=user, stdin=stdin)


class AsyncCommandHandle:
    """A command that runs in the background. It runs on when the handle is dropped."""

    def __init__(self, process: Process, stack: AsyncExitStack, sinks: dict[str, Sink | None]) -> None:
        self._process = process
        self._stack = stack
        self._sinks = sinks
        self._parts: dict[str, list[bytes]] = {"stdout": [], "stderr": [], "pty": []}
        self._reader = asyncio.create_task(self._read())
        # Whoever waits gets its error; nobody has to wait (the sandbox may be paused under a background command).
        self._reader.add_done_callback(lambda task: task.cancelled() or task.exception())

    @property
    def pid(self) -> int:
        """Its process id in the sandbox."""
        return self._process.pid

    @property
    def stdout(self) -> str:
        """What it wrote so far."""
        return _text(self._parts["stdout"] + self._parts["pty"])

    @property
    def stderr(self) -> str:
        """What it wrote to its error output so far."""
        return _text(self._parts["stderr"])

    async def wait(self, *, check: bool = False) -> CommandResult:
        """Its result, once it has ended."""
        ended = await asyncio.shield(self._reader)
        result = CommandResult(self.stdout, self.stderr, ended.exit_code, ended.error or ended.signal)
        return result.check(f"process {self.pid}") if check else result

    async def kill(self) -> bool:
        """SIGKILL to it and what it started; False when it had ended before."""
        return not self._reader.done() and await self._process.kill()

    async def send_stdin(self, data: str | bytes) -> None:
        """Write to its standard input (start it with ``stdin=True``)."""
        await self._process.send_input(data.encode() if isinstance(data, str) else data)

    async def close_stdin(self) -> None:
        """End-of-file on its standard input."""
        await self._process.close_stdin()

    async def disconnect(self) -> None:
        """Stop following it; it runs on."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> Ended:
        async with self._stack:
            async for event in self._process.events():
                if isinstance(event, Ended):
                    return event
                self._take(event)
        raise SandboxDead(f"process {self.pid} ended without saying how")

    def _take(self, event: Output) -> None:
        self._parts[event.stream].append(event.data)
        if (sink := self._sinks.get(event.stream)) is not None:
            sink(event.data.decode(errors="replace"))


class AsyncCommands:
    """``AsyncSandbox.commands``."""

    def __init__(self, call: GuestCall) -> None:
        self._call = call

    @overload
    async def run(
        self,
        cmd: str | Sequence[str],
        background: Literal[False] = False,
        *,
        envs: dict[str, str] | None = None,
        user: str | None = None,
        cwd: str | None = None,
        on_stdout: Sink | None = None,
        on_stderr: Sink | None = None,
        stdin: bool = False,
        timeout: float | None = 60,
        check: bool = False,
    ) -> CommandResult: ...

    @overload
    async def run(
        self,
        cmd: str | Sequence[str],
        background: Literal[True],
        *,
        envs: dict[str, str] | None = None,
        user: str | None = None,
        cwd: str | None = None,
        on_stdout: Sink | None = None,
        on_stderr: Sink | None = None,
        stdin: bool = False,
        timeout: float | None = 60,
        check: bool = False,
    ) -> AsyncCommandHandle: ...

    async def run(
        self,
        cmd: str | Sequence[str],
        background: bool = False,
        *,
        envs: dict[str, str] | None = None,
        user: str | None = None,
        cwd: str | None = None,
        on_stdout: Sink | None = None,
        on_stderr: Sink | None = None,
        stdin: bool = False,
        timeout: float | None = 60,
        check: bool = False,
    ) -> CommandResult | AsyncCommandHandle:
        """Run ``cmd`` (a string through a login shell, a sequence as it is).

        Unlike E2B's SDK an exit code other than 0 is a result; ``check=True`` raises ``CommandFailed`` for it.
        ``timeout`` seconds (None or 0: no limit) after which it is killed: ``CommandTimeout``. A sandbox that
        dies meanwhile is ``SandboxDead``.
        """
        command = command_of(cmd, envs=envs, cwd=cwd, user=user, stdin=stdin)
        handle = await self._begin(command, timeout or None, {"stdout": on_stdout, "stderr": on_stderr})
        if background:
            return handle
        try:
            result = await self._call(lambda _: handle.wait())
        except asyncio.CancelledError:
            await asyncio.shield(_kill_quietly(handle))
            raise
        return result.check(cmd) if check else result

    async def list(self) -> list[ProcessInfo]:
        """Commands that run."""
        return await self._call(lambda guest: guest.processes())

    async def kill(self, pid: int) -> bool:
        """SIGKILL a command and what it started; False when nothing of it is left."""
        return await self._call(lambda guest: guest.kill(pid))

    async def send_stdin(self, pid: int, data: str | bytes) -> None:
        """Write to the standard input of a command."""
        handle = await self.connect(pid)
        try:
            await handle.send_stdin(data)
        finally:
            await handle.disconnect()

    async def connect(self, pid: int, *, timeout: float | None = None) -> AsyncCommandHandle:
        """Follow a command that runs already."""

        async def begin(guest: Guest) -> AsyncCommandHandle:
            stack = AsyncExitStack()
            process = await stack.enter_async_context(guest.connect(pid, timeout_s=timeout))
            return AsyncCommandHandle(process, stack, {})

        return await self._call(begin)

    async def _begin(
        self, command: Command, timeout_s: float | None, sinks: dict[str, Sink | None]
    ) -> AsyncCommandHandle:
        async def begin(guest: Guest) -> AsyncCommandHandle:
            stack = AsyncExitStack()
            process = await stack.enter_async_context(guest.start(command, timeout_s=timeout_s))
            return AsyncCommandHandle(process, stack, sinks)

        return await self._call(begin)


async def _kill_quietly(handle: AsyncCommandHandle) -> None:
    try:
        async with asyncio.timeout(5):
            await handle.kill()
            await handle.disconnect()
    except (AenvError, TimeoutError):
        return


def _text(parts: Sequence[bytes]) -> str:
    return b"".join(parts).decode(errors="replace")
