"""The client of a home's node process, which it starts when there is none."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from aenv_run.config import REPOSITORY_VARIABLE, repository_name, same_repository
from aenv_run.errors import AenvError, Conflict, NodeUnavailable, ProtocolError
from aenv_run.node_socket import FileLock, short_path
from aenv_run.node_wire import (
    CreateRequest,
    DriverReply,
    ErrorBody,
    ForkEntry,
    ForkReply,
    ForkRequest,
    ForkStart,
    Health,
    NetworkRequest,
    PauseRequest,
    PoolInfo,
    PoolList,
    PoolRequest,
    ResetRequest,
    ResumeRequest,
    SandboxInfo,
    SandboxList,
    ShutdownRequest,
    SnapshotReply,
    SnapshotRequest,
    TimeoutRequest,
)
from aenv_run.paths import GUEST_VARIABLE, Home
from aenv_run.signatures import required

M = TypeVar("M", bound=BaseModel)
A = TypeVar("A", CreateRequest, PoolRequest)

START_TIMEOUT_S = 60.0
#: Pausing or committing gigabytes takes as long as the disk needs.
CALL_TIMEOUT_S = 3600.0
HEALTH_TIMEOUT_S = 15.0
#: Far less than the node waits until it is idle.
TRUST_S = 2.0
NODE_MODULE = "aenv_run.node"
JSON_BODY = {"Content-Type": "application/json"}
SETTINGS = (GUEST_VARIABLE, "AENV_DRIVER")
#: When the node of a home, with these settings of ours, was last asked.
_answered_s: dict[tuple[Path | str | None, ...], float] = {}


class NodeClient:
    """Each call is one connection, so a node that ends when idle never breaks a kept one."""

    def __init__(self, home: Home | None = None) -> None:
        self.home = Home((home or Home.default()).root.absolute())

    # -- the node itself -----------------------------------------------------------------------------------

    async def health(self) -> Health | None:
        """How the node is; None when there is none. Never starts one."""
        for last in (False, False, True):
            try:
                return _parse(Health, await self._send("GET", "/health", None, timeout_s=HEALTH_TIMEOUT_S))
            except _Absent:
                return None
            except _WentAway:  # killed just now: its socket may take one more connection
                if last:
                    raise
                await asyncio.sleep(0.05)
        return None

    async def driver(self) -> DriverReply:
        """Which driver the node uses, and why."""
        return await self._call("GET", "/driver", None, DriverReply)

    async def shutdown(self, *, kill: bool = False) -> bool:
        """End the node and wait until its process is gone, with all it had open; False when there was none."""
        from aenv_run.process import Watch

        pid = 0
        with suppress(ProtocolError):  # one of another version: it can be stopped all the same
            pid = health.pid if (health := await self.health()) is not None else 0
        process = Watch(pid, NODE_MODULE)
        try:
            await self._send("POST", "/shutdown", ShutdownRequest(kill=kill), timeout_s=CALL_TIMEOUT_S)
            deadline_s = time.monotonic() + START_TIMEOUT_S
            lock = FileLock(self.home.locks / "node.lock")
            while not lock.acquire():
                if time.monotonic() > deadline_s:
                    raise self._still_runs()
                await asyncio.sleep(0.02)
            lock.release()
            # It lets go of the lock before its threads and files are gone.
            if not await process.ended_within(max(0.0, deadline_s - time.monotonic())):
                raise self._still_runs()
        except _Absent:
            return False
        finally:
            process.close()
        return True

    def _still_runs(self) -> NodeUnavailable:
        return NodeUnavailable("the node was told to end and still runs", fix=f"see {self.home.node_log}")

    async def ensure_started(self) -> None:
        """Return when a node serves; of many callers one starts it."""
        if (health := await self.health()) is not None:
            self._require_same_settings(health)
            return
        self.home.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock(self.home.locks / "node-start.lock")
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not lock.acquire():
            await asyncio.sleep(0.02)
            if await self.health() is not None:
                return
            if time.monotonic() > deadline_s:
                raise NodeUnavailable("another command is starting the node and does not get there")
        try:
            if await self.health() is None:
                await self._start(deadline_s)
        finally:
            lock.release()

    # -- pools ---------------------------------------------------------------------------------------------

    async def pools(self) -> list[PoolInfo]:
        """All, by reference."""
        return list((await self._call("GET", "/pools", None, PoolList)).pools)

    async def set_pool(self, request: PoolRequest) -> PoolInfo:
        """Keep machines of a snapshot ready."""
        return await self._call("POST", "/pools", _with_keys(request), PoolInfo)

    async def remove_pool(self, reference: str) -> None:
        """End a pool; ``NotFound`` when there is none."""
        await self._request("DELETE", f"/pools/{quote(reference, safe=':')}", None)

    # -- sandboxes -----------------------------------------------------------------------------------------

    async def create(self, request: CreateRequest) -> SandboxInfo:
        """Launch one. If this call is cancelled, the node removes what it had made."""
        return await self._call("POST", "/sandboxes", _with_keys(request), SandboxInfo)

    async def list(self) -> list[SandboxInfo]:
        """All, oldest first."""
        return list((await self._call("GET", "/sandboxes", None, SandboxList)).sandboxes)

    async def get(self, sandbox_id: str) -> SandboxInfo:
        """One, by id or unique prefix."""
        return await self._call("GET", _path(sandbox_id), None, SandboxInfo)

    async def reset(self, sandbox_id: str, request: ResetRequest) -> SandboxInfo:
        """A new one of the snapshot that it was started from; the old one is killed."""
        return await self._call("POST", _path(sandbox_id, "reset"), request, SandboxInfo)

    async def kill(self, sandbox_id: str) -> None:
        """Kill and remove it; ``NotFound`` when there is none."""
        await self._request("DELETE", _path(sandbox_id), None)

    async def pause(self, sandbox_id: str, request: PauseRequest | None = None) -> SandboxInfo:
        """Pause it."""
        return await self._call("POST", _path(sandbox_id, "pause"), request, SandboxInfo)

    async def resume(self, sandbox_id: str, request: ResumeRequest) -> SandboxInfo:
        """Resume it."""
        return await self._call("POST", _path(sandbox_id, "resume"), request, SandboxInfo)

    async def fork(self, sandbox_id: str, request: ForkRequest) -> ForkReply:
        """Fork it; one entry per child. If this call is cancelled, the node removes the children."""
        stopped_ms, children = 0.0, []
        async for line in self.fork_each(sandbox_id, request):
            if isinstance(line, ForkStart):
                stopped_ms = line.stopped_ms
            else:
                children.append(line)
        return ForkReply(children=tuple(sorted(children, key=lambda c: c.index)), stopped_ms=stopped_ms)

    async def fork_each(
        self, sandbox_id: str, request: ForkRequest
    ) -> AsyncGenerator[ForkStart | ForkEntry, None]:
        """Fork it; how long it stood still, then each child as soon as it is ready.

        Closed or cancelled before the last one, the node removes all children, also those already given.
        """
        last: ForkEntry | None = None
        seen = 0
        async with aclosing(self._lines(_path(sandbox_id, "fork"), request)) as lines:
            async for line in lines:
                if not seen:
                    yield _parse(ForkStart, line)
                elif seen < request.count:
                    yield _parse(ForkEntry, line)
                else:  # kept until the node is through: who stops at the last one keeps all
                    last = _parse(ForkEntry, line)
                seen += 1
        if last is None or seen != request.count + 1:
            raise ProtocolError(f"the node sent {seen - 1} of {request.count} children")
        yield last

    async def snapshot(self, sandbox_id: str, request: SnapshotRequest) -> SnapshotReply:
        """Commit its state."""
        return await self._call("POST", _path(sandbox_id, "snapshots"), request, SnapshotReply)

    async def set_timeout(self, sandbox_id: str, request: TimeoutRequest) -> SandboxInfo:
        """Move the end of its time."""
        return await self._call("POST", _path(sandbox_id, "timeout"), request, SandboxInfo)

    async def set_network(self, sandbox_id: str, request: NetworkRequest) -> SandboxInfo:
        """Change what it may reach."""
        return await self._call("POST", _path(sandbox_id, "network"), request, SandboxInfo)

    # -- the wire ------------------------------------------------------------------------------------------

    async def _ensure_there(self) -> None:
        """Without asking, if it was there a moment ago: it cannot have become idle since."""
        key = (self.home.root, repository_name(None, self.home), *map(os.environ.get, SETTINGS))
        if time.monotonic() >= _answered_s.get(key, 0.0) + TRUST_S:
            await self.ensure_started()
        _answered_s[key] = time.monotonic()

    async def _call(self, method: str, path: str, body: BaseModel | None, reply: type[M]) -> M:
        return _parse(reply, await self._request(method, path, body))

    async def _request(self, method: str, path: str, body: BaseModel | None) -> bytes:
        """Send it; a node that is not there is started and asked again (nothing had been sent).

        What only reads is asked again also when the node went away while it answered.
        """
        for _ in range(3):
            await self._ensure_there()
            try:
                return await self._send(method, path, body, timeout_s=CALL_TIMEOUT_S)
            except _Absent:
                continue
            except _WentAway:
                if method != "GET":
                    raise
        raise self._ends_at_once()

    async def _send(self, method: str, path: str, body: BaseModel | None, *, timeout_s: float) -> bytes:
        content = body.model_dump_json() if body is not None else None
        async with self._connection(timeout_s) as http:
            with self._faults():
                response = await http.request(method, path, content=content, headers=JSON_BODY)
        if response.is_success:
            return response.content
        raise _error(response)

    async def _lines(self, path: str, body: BaseModel) -> AsyncGenerator[bytes, None]:
        """POST it and read the answer line by line; an error before the first line is as everywhere."""
        for _ in range(3):
            await self._ensure_there()
            try:
                async with self._connection(CALL_TIMEOUT_S) as http:
                    with self._faults():
                        async with http.stream(
                            "POST", path, content=body.model_dump_json(), headers=JSON_BODY
                        ) as response:
                            if not response.is_success:
                                await response.aread()
                                raise _error(response)
                            async for line in response.aiter_lines():
                                yield line.encode()
                            return
            except _Absent:
                continue
        raise self._ends_at_once()

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            _answered_s.clear()
            raise _Absent(str(error)) from error
        except httpx.TransportError as error:
            _answered_s.clear()
            raise _WentAway(
                f"the node went away while it answered ({error or type(error).__name__})",
                fix=f"sandboxes run on; `aenv ls` starts a new node. Why it ended: {self.home.node_log}",
            ) from error

    def _ends_at_once(self) -> NodeUnavailable:
        return NodeUnavailable("the node ends as soon as it is started", fix=f"see {self.home.node_log}")

    @asynccontextmanager
    async def _connection(self, timeout_s: float) -> AsyncIterator[httpx.AsyncClient]:
        if not self.home.node_socket.parent.is_dir():
            _answered_s.clear()
            raise _Absent("no home")
        with short_path(self.home.node_socket) as short:
            # No TLS here: without verify=False httpx would read all certificates of the system for each call.
            transport = httpx.AsyncHTTPTransport(uds=short, verify=False)
            timeout = httpx.Timeout(timeout_s, connect=10.0)
            client = httpx.AsyncClient(
                transport=transport, base_url="http://node", timeout=timeout, trust_env=False
            )
            async with client as http:
                yield http

    async def _start(self, deadline_s: float) -> None:
        from aenv_run.process import spawn

        repository = repository_name(None, self.home)  # a path of it is absolute: the node's own directory is /
        argv = [sys.executable, "-m", NODE_MODULE, "--home", str(self.home.root)]
        argv += ["--repository", repository, *_options()]
        child = await spawn(argv, log=self.home.node_log, ephemeral=False, cwd=Path("/"), env=self._environment())
        while time.monotonic() < deadline_s:
            if await self.health() is not None:
                return
            if not child.alive:
                raise NodeUnavailable("the node ended as soon as it was started", fix=f"see {self.home.node_log}")
            await asyncio.sleep(0.02)
        child.kill_group()
        raise NodeUnavailable(
            f"the node did not answer within {START_TIMEOUT_S:g} s", fix=f"see {self.home.node_log}"
        )

    def _environment(self) -> dict[str, str]:
        """The node's own: the caller's, with the package findable, and no path that depends on where it stands."""
        package = str(Path(__file__).resolve().parent.parent)
        paths = [package, *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
        environment[REPOSITORY_VARIABLE] = repository_name(None, self.home)
        if os.environ.get(GUEST_VARIABLE):
            environment[GUEST_VARIABLE] = str(self.home.guest())
        return environment

    def _require_same_settings(self, health: Health) -> None:
        """A node with other settings than this command's would ignore them in silence.

        The repository counts also when it is not named here: the home's own is then meant.
        """
        repository = repository_name(None, self.home)
        if not same_repository(repository, health.repository):
            raise self._other_settings("the repository", repository, health.repository)
        if os.environ.get(GUEST_VARIABLE):
            guest = str(self.home.guest())
            if os.path.realpath(guest) != os.path.realpath(health.guest):
                raise self._other_settings(GUEST_VARIABLE, guest, health.guest)
        driver = os.environ.get("AENV_DRIVER")
        if driver and driver != health.driver:
            raise self._other_settings("AENV_DRIVER", driver, health.driver)

    def _other_settings(self, what: str, asked: str, used: str) -> Conflict:
        return Conflict(
            f"{what} is {asked} here, but the node of {self.home.root} runs with {used}",
            fix="`aenv node stop` and try again (sandboxes run on), or use another AENV_HOME",
        )


class _Absent(AenvError):
    """There is no node: nobody listens."""

    code = "internal"


class _WentAway(NodeUnavailable):
    """It took the request and broke off: whether it did it is not known."""


def _options() -> list[str]:
    """What the node is told about this command's environment."""
    names = {"AENV_DRIVER": "--driver", "AENV_NODE_IDLE_S": "--idle"}
    return [part for name, option in names.items() if os.environ.get(name) for part in (option, os.environ[name])]


def _path(sandbox_id: str, *more: str) -> str:
    safe = "".join(c for c in sandbox_id if c.isalnum())
    return "/".join(["/sandboxes", safe or "-", *more])


def _parse(model: type[M], data: bytes) -> M:
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise ProtocolError(f"the node sent a malformed {model.__name__}: {error.error_count()} errors") from error


def _error(response: httpx.Response) -> AenvError:
    try:
        return ErrorBody.model_validate_json(response.content).error()
    except ValidationError:
        return NodeUnavailable(f"the node answered {response.status_code}: {response.text[:200]}")


def _with_keys(request: A) -> A:
    """Also a node that was started before somebody required signatures is to keep to it."""
    trust = required() if not request.signed_by else None
    return request.model_copy(update={"signed_by": trust.texts}) if trust is not None else request
