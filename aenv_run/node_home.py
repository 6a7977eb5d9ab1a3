"""The way to a home's node process: its unix socket. The node is started when there is none."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import httpx

from aenv_run.config import REPOSITORY_VARIABLE, repository_name, same_repository
from aenv_run.credentials import KEY_VARIABLE, URL_VARIABLE
from aenv_run.errors import AenvError, Conflict, NodeUnavailable, ProtocolError
from aenv_run.node_socket import FileLock, short_path
from aenv_run.node_transport import CALL_TIMEOUT_S, JSON_BODY, error_of, parse
from aenv_run.node_wire import Health, ShutdownRequest
from aenv_run.paths import GUEST_VARIABLE, Home

START_TIMEOUT_S = 60.0
HEALTH_TIMEOUT_S = 15.0
#: Far less than the node waits until it is idle.
TRUST_S = 2.0
NODE_MODULE = "aenv_run.node"
SETTINGS = (GUEST_VARIABLE, "AENV_DRIVER")
#: When the node of a home, with these settings of ours, was last asked.
_answered_s: dict[tuple[Path | str | None, ...], float] = {}


class HomeTransport:
    """Each call is one connection, so a node that ends when idle never breaks a kept one."""

    def __init__(self, home: Home) -> None:
        self.home = home

    async def health(self) -> Health | None:
        """How the node is; None when there is none. Never starts one."""
        for last in (False, False, True):
            try:
                return parse(Health, await self._send("GET", "/health", None, timeout_s=HEALTH_TIMEOUT_S))
            except _Absent:
                return None
            except _WentAway:  # killed just now: its socket may take one more connection
                if last:
                    raise
                await asyncio.sleep(0.05)
        return None

    async def shutdown(self, *, kill: bool = False) -> bool:
        """End the node and wait until its process is gone, with all it had open; False when there was none."""
        from aenv_run.process import Watch

        pid = 0
        with suppress(ProtocolError):  # one of another version: it can be stopped all the same
            pid = health.pid if (health := await self.health()) is not None else 0
        process = Watch(pid, NODE_MODULE)
        try:
            await self._send(
                "POST", "/shutdown", ShutdownRequest(kill=kill).model_dump_json(), timeout_s=CALL_TIMEOUT_S
            )
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

    async def _ensure_there(self) -> None:
        """Without asking, if it was there a moment ago: it cannot have become idle since."""
        key = (self.home.root, repository_name(None, self.home), *map(os.environ.get, SETTINGS))
        if time.monotonic() >= _answered_s.get(key, 0.0) + TRUST_S:
            await self.ensure_started()
        _answered_s[key] = time.monotonic()

    async def request(self, method: str, path: str, content: str | None) -> bytes:
        """Send it; a node that is not there is started and asked again (nothing had been sent).

        What only reads is asked again also when the node went away while it answered.
        """
        for _ in range(3):
            await self._ensure_there()
            try:
                return await self._send(method, path, content, timeout_s=CALL_TIMEOUT_S)
            except _Absent:
                continue
            except _WentAway:
                if method != "GET":
                    raise
        raise self._ends_at_once()

    async def _send(self, method: str, path: str, content: str | None, *, timeout_s: float) -> bytes:
        async with self._connection(timeout_s) as http:
            with self._faults():
                response = await http.request(method, path, content=content, headers=JSON_BODY)
        if response.is_success:
            return response.content
        raise error_of(response)

    async def lines(self, path: str, content: str) -> AsyncGenerator[bytes, None]:
        """POST it and read the answer line by line; an error before the first line is as everywhere."""
        async with self.open("POST", path, content) as response:
            if not response.is_success:
                await response.aread()
                raise error_of(response)
            async for line in response.aiter_lines():
                yield line.encode()

    @asynccontextmanager
    async def open(self, method: str, path: str, content: str | bytes | None) -> AsyncIterator[httpx.Response]:
        """The node's answer as it comes, whatever its status. Sent again only where nothing had been sent."""
        for _ in range(3):
            await self._ensure_there()
            opened = False
            try:
                async with self._connection(CALL_TIMEOUT_S) as http:
                    with self._faults():
                        async with http.stream(method, path, content=content, headers=JSON_BODY) as response:
                            opened = True
                            yield response
                            return
            except _Absent:
                if opened:
                    raise
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
        for name in (URL_VARIABLE, KEY_VARIABLE):  # of no use to it, and its engines need not know the key
            environment.pop(name, None)
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
