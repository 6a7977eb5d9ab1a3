"""``Sandbox``: ``AsyncSandbox`` without ``await``. Each call runs on one event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar, overload

from aenv_run.credentials import ServerAddress
from aenv_run.errors import AenvError
from aenv_run.guest import EntryInfo, ProcessInfo
from aenv_run.network import NetworkPolicy
from aenv_run.node_wire import SandboxInfo, SnapshotReply
from aenv_run.paths import Home
from aenv_run.sdk_async import DEFAULT_TIMEOUT_S, AsyncSandbox
from aenv_run.sdk_commands import AsyncCommandHandle, AsyncCommands, CommandResult
from aenv_run.sdk_files import AsyncFiles

T = TypeVar("T")
Sink = Callable[[str], None]


class _Loop:
    """The one event loop of all ``Sandbox`` objects, started at the first call, ended with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, work: Coroutine[object, object, T]) -> T:
        """The result of ``work``. Ctrl-C cancels it and waits until it has cleaned up."""
        future = asyncio.run_coroutine_threadsafe(work, self._started())
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            self.run(_settle())
            raise

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="aenv", daemon=True).start()
            return self._loop


async def _settle() -> None:
    """A cancelled call closes its connection when it next runs; the node then cancels its side."""
    await asyncio.sleep(0.1)


async def _next(each: AsyncGenerator[T, None]) -> T | None:
    return await anext(each, None)


async def _close(each: AsyncGenerator[T, None]) -> None:
    await each.aclose()


_loop = _Loop()


class CommandHandle:
    """A command that runs in the background."""

    def __init__(self, handle: AsyncCommandHandle) -> None:
        self._handle = handle

    @property
    def pid(self) -> int:
        """Its process id in the sandbox."""
        return self._handle.pid

    @property
    def stdout(self) -> str:
        """What it wrote so far."""
        return self._handle.stdout

    @property
    def stderr(self) -> str:
        """What it wrote to its error output so far."""
        return self._handle.stderr

    def wait(self, *, check: bool = False) -> CommandResult:
        """Its result, once it has ended."""
        return _loop.run(self._handle.wait(check=check))

    def kill(self) -> bool:
        """SIGKILL; False when it had ended before."""
        return _loop.run(self._handle.kill())

    def send_stdin(self, data: str | bytes) -> None:
        """Write to its standard input (start it with ``stdin=True``)."""
        _loop.run(self._handle.send_stdin(data))

    def close_stdin(self) -> None:
        """End-of-file on its standard input."""
        _loop.run(self._handle.close_stdin())

    def disconnect(self) -> None:
        """Stop following it; it runs on."""
        _loop.run(self._handle.disconnect())


class Commands:
    """``Sandbox.commands``; see ``AsyncCommands``."""

    def __init__(self, commands: AsyncCommands) -> None:
        self._commands = commands

    @overload
    def run(
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
    def run(
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
    ) -> CommandHandle: ...

    def run(
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
    ) -> CommandResult | CommandHandle:
        """Run ``cmd``. An exit code is a result, unless ``check``. The sinks are called on another thread."""
        work = self._commands.run(
            cmd,
            background,  # type: ignore[call-overload, misc]  # mypy does not spread a bool over the overloads
            envs=envs,
            user=user,
            cwd=cwd,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
            stdin=stdin,
            timeout=timeout,
            check=check,
        )
        result: CommandResult | AsyncCommandHandle = _loop.run(work)
        return CommandHandle(result) if isinstance(result, AsyncCommandHandle) else result

    def list(self) -> list[ProcessInfo]:
        """Commands that run."""
        return _loop.run(self._commands.list())

    def kill(self, pid: int) -> bool:
        """SIGKILL a command; False when there is none with that pid."""
        return _loop.run(self._commands.kill(pid))

    def send_stdin(self, pid: int, data: str | bytes) -> None:
        """Write to the standard input of a command."""
        _loop.run(self._commands.send_stdin(pid, data))

    def connect(self, pid: int, *, timeout: float | None = None) -> CommandHandle:
        """Follow a command that runs already."""
        return CommandHandle(_loop.run(self._commands.connect(pid, timeout=timeout)))


class Files:
    """``Sandbox.files``; see ``AsyncFiles``."""

    def __init__(self, files: AsyncFiles) -> None:
        self._files = files

    @overload
    def read(self, path: str, format: Literal["text"] = "text", *, user: str | None = None) -> str: ...

    @overload
    def read(self, path: str, format: Literal["bytes"], *, user: str | None = None) -> bytes: ...

    def read(
        self, path: str, format: Literal["text", "bytes"] = "text", *, user: str | None = None
    ) -> str | bytes:
        """The whole file, as text or as bytes."""
        if format == "bytes":
            return _loop.run(self._files.read(path, "bytes", user=user))
        return _loop.run(self._files.read(path, user=user))

    def write(self, path: str, data: str | bytes | Path, *, user: str | None = None) -> EntryInfo:
        """Create or replace a file; missing parents are made."""
        return _loop.run(self._files.write(path, data, user=user))

    def list(self, path: str, depth: int = 1, *, user: str | None = None) -> list[EntryInfo]:
        """What is in a directory, to ``depth`` levels."""
        return _loop.run(self._files.list(path, depth, user=user))

    def get_info(self, path: str, *, user: str | None = None) -> EntryInfo:
        """One entry; ``NotFound`` without one."""
        return _loop.run(self._files.get_info(path, user=user))

    def exists(self, path: str, *, user: str | None = None) -> bool:
        """Whether there is such an entry."""
        return _loop.run(self._files.exists(path, user=user))

    def remove(self, path: str, *, user: str | None = None) -> None:
        """Delete it and all below it."""
        _loop.run(self._files.remove(path, user=user))

    def rename(self, old_path: str, new_path: str, *, user: str | None = None) -> EntryInfo:
        """Move it."""
        return _loop.run(self._files.rename(old_path, new_path, user=user))

    def make_dir(self, path: str, *, user: str | None = None) -> bool:
        """Make a directory and its parents; False if it was there already."""
        return _loop.run(self._files.make_dir(path, user=user))


class Sandbox:
    """One sandbox; see ``AsyncSandbox``. As a context manager it is killed at the end."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self._async = sandbox
        self.commands = Commands(sandbox.commands)
        self.files = Files(sandbox.files)

    @property
    def sandbox_id(self) -> str:
        """Its id."""
        return self._async.sandbox_id

    @classmethod
    def create(
        cls,
        snapshot: str,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        metadata: dict[str, str] | None = None,
        envs: dict[str, str] | None = None,
        cold: bool = False,
        hooks: bool = True,
        on_timeout: Literal["kill", "pause"] = "kill",
        internet: bool | None = None,
        allow: Sequence[str] = (),
        deny: Sequence[str] = (),
        publish: Mapping[str, int] | None = None,
        max_seconds: float | None = None,
        memory_mib: int | None = None,
        cpus: int | None = None,
        home: Home | None = None,
        server: ServerAddress | str | None = None,
    ) -> Self:
        """Launch ``snapshot``; see ``AsyncSandbox.create``."""
        work = AsyncSandbox.create(
            snapshot,
            timeout=timeout,
            metadata=metadata,
            envs=envs,
            cold=cold,
            hooks=hooks,
            on_timeout=on_timeout,
            internet=internet,
            allow=allow,
            deny=deny,
            publish=publish,
            max_seconds=max_seconds,
            memory_mib=memory_mib,
            cpus=cpus,
            home=home,
            server=server,
        )
        return cls(_loop.run(work))

    @classmethod
    def connect(
        cls,
        sandbox_id: str,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        home: Home | None = None,
        server: ServerAddress | str | None = None,
    ) -> Self:
        """A sandbox that exists; one that is paused is resumed."""
        return cls(_loop.run(AsyncSandbox.connect(sandbox_id, timeout=timeout, home=home, server=server)))

    @staticmethod
    def list(
        *,
        state: Sequence[str] | None = None,
        metadata: dict[str, str] | None = None,
        home: Home | None = None,
        server: ServerAddress | str | None = None,
    ) -> list[SandboxInfo]:
        """All sandboxes of the node, oldest first, or those that match."""
        return _loop.run(AsyncSandbox.list(state=state, metadata=metadata, home=home, server=server))

    def get_info(self) -> SandboxInfo:
        """What the node knows of it now."""
        return _loop.run(self._async.get_info())

    def is_running(self) -> bool:
        """Whether it runs and its daemon answers."""
        return _loop.run(self._async.is_running())

    def pause(self, *, hooks: bool = True) -> None:
        """Keep memory and disk in files and end the machine. See ``AsyncSandbox.pause``."""
        _loop.run(self._async.pause(hooks=hooks))

    def resume(self, *, timeout: float = DEFAULT_TIMEOUT_S, cold: bool = False, hooks: bool = True) -> None:
        """Go on where ``pause`` stopped."""
        _loop.run(self._async.resume(timeout=timeout, cold=cold, hooks=hooks))

    def fork(self, n: int = 1, *, timeout: float = DEFAULT_TIMEOUT_S) -> Sequence[Self | AenvError]:
        """``n`` copies; an entry is a sandbox, or why that child could not be had."""
        entries = _loop.run(self._async.fork(n, timeout=timeout))
        return [entry if isinstance(entry, AenvError) else type(self)(entry) for entry in entries]

    def fork_each(self, n: int = 1, *, timeout: float = DEFAULT_TIMEOUT_S) -> Iterator[Self | AenvError]:
        """As ``fork``, but gives each copy as soon as it is ready; see ``AsyncSandbox.fork_each``."""
        each = self._async.fork_each(n, timeout=timeout)
        try:
            while (entry := _loop.run(_next(each))) is not None:
                yield entry if isinstance(entry, AenvError) else type(self)(entry)
        finally:
            _loop.run(_close(each))

    def snapshot(
        self,
        name: str | None = None,
        *,
        tags: Sequence[str] = (),
        memory: bool = True,
        labels: dict[str, str] | None = None,
        on_restore: Sequence[str | Sequence[str]] | None = None,
        on_fork: Sequence[str | Sequence[str]] | None = None,
        on_pause: Sequence[str | Sequence[str]] | None = None,
        hooks: bool = True,
    ) -> SnapshotReply:
        """Commit its present state; with ``name`` as that name's next version. See ``AsyncSandbox.snapshot``."""
        work = self._async.snapshot(
            name,
            tags=tags,
            memory=memory,
            labels=labels,
            on_restore=on_restore,
            on_fork=on_fork,
            on_pause=on_pause,
            hooks=hooks,
        )
        return _loop.run(work)

    def set_timeout(self, timeout: float) -> None:
        """Let it live ``timeout`` seconds from now."""
        _loop.run(self._async.set_timeout(timeout))

    def set_network(
        self,
        *,
        internet: bool | None = None,
        allow: Sequence[str] | None = None,
        deny: Sequence[str] | None = None,
    ) -> NetworkPolicy:
        """Change what it may reach, at once; None leaves a part as it is."""
        return _loop.run(self._async.set_network(internet=internet, allow=allow, deny=deny))

    def get_host(self, port: int) -> str:
        """``host:port`` at which this machine reaches ``port`` of the sandbox, until its next pause."""
        return _loop.run(self._async.get_host(port))

    def reset(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        """Begin again from its snapshot, as another sandbox under this handle; the one before is killed."""
        _loop.run(self._async.reset(timeout=timeout))

    def kill(self) -> bool:
        """End and remove it; False when it was gone already."""
        return _loop.run(self._async.kill())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
