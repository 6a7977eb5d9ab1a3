"""The client of a node: of a home's own, which it starts when there is none, or of a server's."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from aenv_run.credentials import ServerAddress, chosen_server, server_at
from aenv_run.errors import ProtocolError, SandboxDead, Unsupported
from aenv_run.guest import Guest
from aenv_run.node_home import HomeTransport
from aenv_run.node_transport import NodeTransport, parse
from aenv_run.node_wire import (
    CreateRequest,
    DriverReply,
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
    SandboxLogReply,
    SnapshotReply,
    SnapshotRequest,
    TimeoutRequest,
)
from aenv_run.paths import Home
from aenv_run.signatures import required

M = TypeVar("M", bound=BaseModel)
A = TypeVar("A", CreateRequest, PoolRequest)


class NodeClient:
    """Typed calls. ``home`` is this machine's, also where the node is a server's: caches and scratch are there."""

    def __init__(self, home: Home | None = None, *, server: ServerAddress | None = None) -> None:
        self.home = Home((home or Home.default()).root.absolute())
        self.server = server
        self._own = HomeTransport(self.home)
        self.transport: NodeTransport = self._own
        if server is not None:
            from aenv_run.node_remote import ServerTransport

            self.transport = ServerTransport(server)

    @classmethod
    def chosen(cls, home: Home | None = None, server: ServerAddress | str | None = None) -> NodeClient:
        """Of a server, or its URL, or of a home; where neither is given, of what the environment means.

        As for the commands: docs/remote.md.
        """
        if server is None and home is None:
            server = chosen_server()
        return cls(home, server=server_at(server) if isinstance(server, str) else server)

    # -- the node itself -----------------------------------------------------------------------------------

    async def health(self) -> Health | None:
        """How the node is; None when there is none. Never starts one."""
        return await self.transport.health()

    async def driver(self) -> DriverReply:
        """Which driver the node uses, and why."""
        return await self._call("GET", "/driver", None, DriverReply)

    async def shutdown(self, *, kill: bool = False) -> bool:
        """End the node and wait until its process is gone, with all it had open; False when there was none."""
        return await self.local("ended").shutdown(kill=kill)

    async def ensure_started(self) -> None:
        """Return when a node serves; of many callers one starts it."""
        await self.local("started").ensure_started()

    def local(self, what: str = "reached") -> HomeTransport:
        """The way to this home's node; ``Unsupported`` where it is a server's."""
        if self.server is not None:
            raise Unsupported(
                f"the node of {self.server.url} cannot be {what} from here", fix="run it on the server itself"
            )
        return self._own

    def guest(self, info: SandboxInfo) -> Guest:
        """A connection to the daemon of a sandbox that runs: its own, or through the server."""
        if info.address is None or info.access_token is None:
            raise SandboxDead(f"sandbox {info.sandbox_id} has no daemon now")
        if self.server is not None:
            from aenv_run.server_link import daemon_of

            return Guest(daemon_of(self.server, info.sandbox_id), access_token=info.access_token)
        return Guest(info.address.endpoint, access_token=info.access_token)

    # -- pools ---------------------------------------------------------------------------------------------

    async def pools(self) -> list[PoolInfo]:
        """All, by reference."""
        return list((await self._call("GET", "/pools", None, PoolList)).pools)

    async def set_pool(self, request: PoolRequest) -> PoolInfo:
        """Keep machines of a snapshot ready."""
        return await self._call("POST", "/pools", _with_keys(request), PoolInfo)

    async def remove_pool(self, reference: str) -> None:
        """End a pool; ``NotFound`` when there is none."""
        await self.transport.request("DELETE", f"/pools/{quote(reference, safe=':')}", None)

    # -- sandboxes -----------------------------------------------------------------------------------------

    async def create(self, request: CreateRequest) -> SandboxInfo:
        """Launch one. If this call is cancelled, the node removes what it had made."""
        if self.server is not None and request.publish:
            raise Unsupported(
                "a port cannot be published as a unix socket of another machine",
                fix="use `aenv port-forward`, which brings a port to this machine",
            )
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
        await self.transport.request("DELETE", _path(sandbox_id), None)

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
        async with aclosing(self.transport.lines(_path(sandbox_id, "fork"), request.model_dump_json())) as lines:
            async for line in lines:
                if not seen:
                    yield parse(ForkStart, line)
                elif seen < request.count:
                    yield parse(ForkEntry, line)
                else:  # kept until the node is through: who stops at the last one keeps all
                    last = parse(ForkEntry, line)
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

    async def log_of(self, sandbox_id: str) -> SandboxLogReply:
        """What happened to it, and its console; oldest first."""
        return await self._call("GET", _path(sandbox_id, "log"), None, SandboxLogReply)

    async def set_network(self, sandbox_id: str, request: NetworkRequest) -> SandboxInfo:
        """Change what it may reach."""
        return await self._call("POST", _path(sandbox_id, "network"), request, SandboxInfo)

    async def _call(self, method: str, path: str, body: BaseModel | None, reply: type[M]) -> M:
        content = body.model_dump_json() if body is not None else None
        return parse(reply, await self.transport.request(method, path, content))


def _path(sandbox_id: str, *more: str) -> str:
    safe = "".join(c for c in sandbox_id if c.isalnum())
    return "/".join(["/sandboxes", safe or "-", *more])


def _with_keys(request: A) -> A:
    """Also a node that was started before somebody required signatures is to keep to it."""
    trust = required() if not request.signed_by else None
    return request.model_copy(update={"signed_by": trust.texts}) if trust is not None else request
