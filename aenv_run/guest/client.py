"""``Guest``: every call of the daemon, typed."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from aenv_run.errors import (
    AenvError,
    CommandTimeout,
    Conflict,
    NotFound,
    ProtocolError,
    SandboxDead,
    TooLarge,
    Unauthenticated,
)
from aenv_run.guest.connect import envelope, parse, raise_for_error, transport_faults
from aenv_run.guest.process import Ended, Process
from aenv_run.guest.values import Command, CommandResult, EntryInfo, GuestInfo, GuestMetrics, Identity, ProcessInfo
from aenv_run.guest.wire import CALL_TIMEOUT_S, STREAM_HEADERS, Empty, Wire
from aenv_run.later import later
from aenv_run.whole import whole

if TYPE_CHECKING:
    import httpx
else:
    httpx = later("httpx")

Sink = Callable[[bytes], None]

#: How long after a command's own limit the daemon may take to say that it killed it.
KILL_GRACE_S = 10.0
#: For the daemon to name a process whose start was given up, so that it can be killed.
TAKE_BACK_S = 5.0
#: A clock that may be further behind than this is set again.
CLOCK_SLACK_S, CLOCK_TRIES = 0.2, 5
MAX_FILE_BYTES = 1 << 30


class _Entry(BaseModel):
    entry: EntryInfo


class _Entries(BaseModel):
    entries: list[EntryInfo] = []


class _Processes(BaseModel):
    processes: list[ProcessInfo] = []


class Guest(Wire):
    """One sandbox's daemon. Errors are ours: ``NotFound``, ``InvalidInput``, ``CommandTimeout``, …

    A dead machine or daemon is always ``SandboxDead``. Environment proxies of the host are never used.
    """

    # -- the machine ---------------------------------------------------------------------------------------

    async def healthy(self, timeout_s: float = 1.0) -> bool:
        """Whether the daemon answers now."""
        try:
            response = await self._http.get("/health", timeout=timeout_s)
        except httpx.TransportError:
            return False
        return response.is_success

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when the daemon answers; ``SandboxDead`` when it has not within ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while not await self.healthy(min(5.0, max(0.1, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise SandboxDead(f"the sandbox's daemon did not answer within {timeout_s:g} s")
            await asyncio.sleep(0.005)

    async def initialise(self, identity: Identity, *, restored: bool = False) -> None:
        """Give the guest its identity, the host's time and fresh entropy; later calls carry its token.

        ``restored``: every connection that the daemon remembers is of another life and is to be closed.
        """
        request: dict[str, object] = {
            "accessToken": identity.access_token,
            "hostname": identity.hostname,
            "machineId": identity.machine_id,
            "bootId": identity.boot_id,
            "entropy": base64.b64encode(identity.entropy).decode(),
            "envVars": identity.env,
            "defaultUser": identity.default_user,
        }
        if restored:
            request["restored"] = True
        if identity.default_workdir is not None:
            request["defaultWorkdir"] = identity.default_workdir
        for _ in range(CLOCK_TRIES):
            started_s = time.monotonic()
            request["timestamp"] = datetime.now(UTC).isoformat().replace("+00:00", "Z")
            try:
                await self._plain("POST", "/init", json=request)
            except (Unauthenticated, Conflict) as error:
                raise Conflict(
                    f"the sandbox locked its own daemon ({error.message})", fix="remove it: `aenv rm ID`"
                ) from error
            self._token = identity.access_token
            # The guest's clock is behind by at most the time that this took: seconds where packets got lost.
            if time.monotonic() - started_s < CLOCK_SLACK_S:
                return
            request.pop("restored", None)

    async def detach(self, *, sync: bool = True) -> None:
        """Before a capture: user processes stand still until ``initialise``, the token is forgotten, idle
        connections are closed. A copy starts clean."""
        await self._plain("POST", "/aenv/detach", params={"sync": "1"} if sync else {})
        self._token = None

    async def sync(self) -> None:
        """Flush the guest's file systems to its disk."""
        await self._plain("POST", "/aenv/sync", timeout_s=600)

    async def settle(self) -> None:
        """End every user process and flush: what is left is what a cold boot of the disk would show."""
        await self._plain("POST", "/aenv/settle", timeout_s=600)

    async def info(self) -> GuestInfo:
        """Version, identity, uptime."""
        return parse(GuestInfo, await self._plain("GET", "/aenv/info"))

    async def metrics(self) -> GuestMetrics:
        """CPU, memory and disk that it uses now."""
        return parse(GuestMetrics, await self._plain("GET", "/metrics"))

    # -- processes -----------------------------------------------------------------------------------------

    async def run(
        self,
        command: Command,
        *,
        timeout_s: float | None = 60.0,
        stdin: bytes | None = None,
        on_stdout: Sink | None = None,
        on_stderr: Sink | None = None,
        limit_bytes: int = 64 << 20,
    ) -> CommandResult:
        """Run to the end. The exit code is a result; at ``timeout_s`` the whole process group is killed.

        ``CommandTimeout`` at the limit, ``TooLarge`` when the output exceeds ``limit_bytes`` (the command
        is killed), ``SandboxDead`` when the machine goes away. With a sink, output is not kept.
        """
        kept: dict[str, list[bytes]] = {"stdout": [], "stderr": [], "pty": []}
        sinks = {"stdout": on_stdout, "stderr": on_stderr, "pty": on_stdout}
        size = 0
        async with self.start(command, timeout_s=timeout_s) as process:
            feeder = asyncio.create_task(_feed(process, stdin)) if command.stdin else None
            try:
                async for event in process.events():
                    if isinstance(event, Ended):
                        out = b"".join(kept["stdout"] + kept["pty"])
                        return CommandResult(
                            event.exit_code, out, b"".join(kept["stderr"]), process.pid, event.signal
                        )
                    if (sink := sinks[event.stream]) is not None:
                        sink(event.data)
                        continue
                    size += len(event.data)
                    if size > limit_bytes:
                        await process.kill()
                        raise TooLarge(f"{command.argv[0]} wrote more than {limit_bytes} bytes; it was killed")
                    kept[event.stream].append(event.data)
            finally:
                if feeder is not None:
                    feeder.cancel()
                    await asyncio.gather(feeder, return_exceptions=True)
        raise ProtocolError(f"the stream of process {process.pid} ended without its end")

    @asynccontextmanager
    async def start(self, command: Command, *, timeout_s: float | None = None) -> AsyncIterator[Process]:
        """Start it and read its events. Leaving the context detaches; the process runs on (to its limit)."""
        config: dict[str, object] = {"cmd": command.argv[0], "args": list(command.argv[1:]), "envs": command.env}
        if command.cwd is not None:
            config["cwd"] = command.cwd
        request: dict[str, object] = {"process": config, "stdin": command.stdin}
        if command.pty is not None:
            request["pty"] = {"size": {"cols": command.pty.cols, "rows": command.pty.rows}}
        if command.tag is not None:
            request["tag"] = command.tag
        stream = self._stream(
            "Start", request, user=command.user, timeout_s=timeout_s, pty=command.pty is not None
        )
        async with stream as process:
            yield process

    @asynccontextmanager
    async def connect(
        self, pid: int, *, pty: bool = False, timeout_s: float | None = None
    ) -> AsyncIterator[Process]:
        """Follow a process that runs already; its output from now on."""
        async with self._stream("Connect", {"process": {"pid": pid}}, timeout_s=timeout_s, pty=pty) as process:
            yield process

    async def processes(self) -> list[ProcessInfo]:
        """Processes that the daemon started and that still run."""
        return (await self._call("process.Process/List", {}, _Processes)).processes

    async def kill(self, pid: int) -> bool:
        """SIGKILL to the whole session that a process leads or led; False when nothing of it is left."""
        try:
            await self._plain("POST", "/aenv/kill", params={"pid": str(pid)})
        except NotFound:
            return False
        return True

    # -- files ---------------------------------------------------------------------------------------------

    async def read_file(self, path: str, *, user: str | None = None, limit_bytes: int = MAX_FILE_BYTES) -> bytes:
        """The content of a file; ``TooLarge`` if it is longer than ``limit_bytes``."""
        too_much = TooLarge(f"{path} is larger than {limit_bytes} bytes")
        return await whole(self.iter_file(path, user=user), limit_bytes, too_much)

    async def iter_file(self, path: str, *, user: str | None = None) -> AsyncIterator[bytes]:
        """The content of a file in chunks."""
        async for chunk in self._download("/files", _file_params(path, user)):
            yield chunk

    async def write_file(
        self, path: str, data: bytes | AsyncIterable[bytes] | Path, *, user: str | None = None
    ) -> None:
        """Create or replace a file; missing parents are made."""
        content = _file_chunks(data) if isinstance(data, Path) else data
        headers = {"Content-Type": "application/octet-stream"}
        params = _file_params(path, user)
        await self._plain("POST", "/files", params=params, content=content, headers=headers, timeout_s=3600)

    async def stat(self, path: str, *, user: str | None = None) -> EntryInfo:
        """One entry; ``NotFound`` if there is none. Links are not followed."""
        return (await self._call("filesystem.Filesystem/Stat", {"path": path}, _Entry, user=user)).entry

    async def list_dir(self, path: str, *, depth: int = 1, user: str | None = None) -> list[EntryInfo]:
        """Entries below a directory, to ``depth`` levels."""
        request: dict[str, object] = {"path": path, "depth": depth}
        return (await self._call("filesystem.Filesystem/ListDir", request, _Entries, user=user)).entries

    async def make_dir(self, path: str, *, user: str | None = None) -> EntryInfo:
        """Create a directory and its parents; ``Conflict`` if it exists."""
        return (await self._call("filesystem.Filesystem/MakeDir", {"path": path}, _Entry, user=user)).entry

    async def move(self, source: str, destination: str, *, user: str | None = None) -> EntryInfo:
        """Rename; replaces a file."""
        request: dict[str, object] = {"source": source, "destination": destination}
        return (await self._call("filesystem.Filesystem/Move", request, _Entry, user=user)).entry

    async def remove(self, path: str, *, user: str | None = None) -> None:
        """Delete with all below it; no error when absent."""
        await self._call("filesystem.Filesystem/Remove", {"path": path}, Empty, user=user)

    async def put_archive(
        self,
        path: str,
        tar: AsyncIterable[bytes] | Path,
        *,
        user: str | None = None,
        keep_owner: bool = False,
    ) -> None:
        """Extract a tar stream into the directory ``path`` (made if missing), inside the guest."""
        params = _file_params(path, user)
        if keep_owner:
            params["owner"] = "keep"
        content = _file_chunks(tar) if isinstance(tar, Path) else tar
        await self._plain("PUT", "/aenv/archive", params=params, content=content, timeout_s=3600)

    async def get_archive(self, path: str, *, user: str | None = None) -> AsyncIterator[bytes]:
        """A tar stream of a file or directory. It comes from the guest: extract it with care."""
        async for chunk in self._download("/aenv/archive", _file_params(path, user)):
            yield chunk

    # -- the wire ------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _stream(
        self,
        method: str,
        request: dict[str, object],
        *,
        user: str | None = None,
        timeout_s: float | None = None,
        pty: bool = False,
    ) -> AsyncIterator[Process]:
        headers = self._headers(user) | STREAM_HEADERS | {"Keepalive-Ping-Interval": "20"}
        if timeout_s is not None:
            headers["Connect-Timeout-Ms"] = str(max(1, round(timeout_s * 1000)))
        # Keepalives come every 20 s, so a silence of a minute and more means that the machine is gone.
        timeout = httpx.Timeout(10.0, read=CALL_TIMEOUT_S + KILL_GRACE_S)
        url = f"/process.Process/{method}"
        asked = self._http.build_request("POST", url, content=envelope(request), headers=headers, timeout=timeout)
        try:
            with transport_faults(method):
                opening = asyncio.create_task(self._open(asked, pty=pty))
                try:
                    response, process = await asyncio.shield(opening)
                except asyncio.CancelledError:
                    await _take_back(opening, kill=method == "Start")
                    raise
                try:
                    yield process
                finally:
                    await response.aclose()
        except CommandTimeout as error:
            limit = f"{timeout_s:g} s" if timeout_s is not None else "its limit"
            raise CommandTimeout(
                f"the command ran past {limit} and was killed with its process group",
                fix="raise the timeout, or run it in the background",
            ) from error

    async def _open(self, asked: httpx.Request, *, pty: bool) -> tuple[httpx.Response, Process]:
        response = await self._http.send(asked, stream=True)
        try:
            await raise_for_error(response)
            return response, await Process.begin(response, self, pty=pty)
        except BaseException:
            await response.aclose()
            raise


async def _take_back(opening: asyncio.Task[tuple[httpx.Response, Process]], *, kill: bool) -> None:
    """Whoever asked gave up before he knew the process: one that was started would run on, known to nobody."""
    try:
        await asyncio.wait([opening], timeout=TAKE_BACK_S if kill else 0)
    finally:
        opening.cancel()
    (found,) = await asyncio.gather(opening, return_exceptions=True)
    if isinstance(found, BaseException):
        return  # it was not started, or the machine does not answer
    response, process = found
    with suppress(AenvError, httpx.HTTPError, TimeoutError):
        async with asyncio.timeout(TAKE_BACK_S):
            await response.aclose()
            if kill:
                await process.kill()


def _file_params(path: str, user: str | None) -> dict[str, str]:
    return {"path": path} if user is None else {"path": path, "username": user}


async def _feed(process: Process, data: bytes | None) -> None:
    """Send ``data``, then end-of-file. A process that ends first does not read it: no error."""

    async def whole() -> AsyncIterator[bytes]:
        if data:
            yield data

    with suppress(AenvError):
        await process.feed(whole())


async def _file_chunks(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while chunk := await asyncio.to_thread(file.read, 1 << 20):
            yield chunk
