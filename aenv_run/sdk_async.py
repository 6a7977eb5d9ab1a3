"""``AsyncSandbox``: a sandbox of this machine's node, for asyncio. ``Sandbox`` is the same without ``await``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar

from aenv_run.credentials import ServerAddress
from aenv_run.errors import AenvError, NotFound, SandboxDead, Unsupported
from aenv_run.guest import Guest
from aenv_run.guest.connect import SILENT_FIX
from aenv_run.hooks import Hook
from aenv_run.lifecycle import State, refusal
from aenv_run.network import NetworkPolicy
from aenv_run.network.forward import PublishedPort
from aenv_run.node_client import NodeClient
from aenv_run.node_wire import (
    CreateRequest,
    ForkEntry,
    ForkRequest,
    NetworkRequest,
    PauseRequest,
    ResetRequest,
    ResumeRequest,
    SandboxInfo,
    SnapshotReply,
    SnapshotRequest,
    TimeoutRequest,
)
from aenv_run.paths import Home
from aenv_run.sdk_commands import AsyncCommands
from aenv_run.sdk_files import AsyncFiles
from aenv_run.types import Name, Tag

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 300.0
#: For so long a daemon that is gone is not called silent: the node may not have noticed the machine's end yet.
NOTICE_S = 2.0


class AsyncSandbox:
    """One sandbox. As a context manager it is killed at the end; else it lives until its timeout."""

    def __init__(self, info: SandboxInfo, node: NodeClient) -> None:
        self._info = info
        self._node = node
        self._guest: Guest | None = None
        self.commands = AsyncCommands(self.call)
        self.files = AsyncFiles(self.call)

    @property
    def sandbox_id(self) -> str:
        """Its id."""
        return str(self._info.sandbox_id)

    # -- getting one ---------------------------------------------------------------------------------------

    @classmethod
    async def create(
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
        """Launch ``snapshot``: a name, ``name:version``, ``name:tag`` or snapshot id.

        ``timeout`` seconds from now it is killed, or paused with ``on_timeout="pause"``. ``cold`` boots from
        the disk and ignores the memory part; ``memory_mib`` and ``cpus`` may then differ from the snapshot's.
        Without ``hooks`` the snapshot's do not run: this sandbox may be a copy of another.

        ``internet``: reach public addresses; on by default where the node can give each sandbox a network of its
        own, off elsewhere (docs/network.md). ``allow`` and ``deny`` take CIDRs and domains. ``publish`` brings
        ports to unix sockets of the host: ``{"/run/app.sock": 8000}``. After ``max_seconds`` with a machine it
        has ended, and calls raise ``TimeOver``.

        ``server`` (an address, or a URL whose key ``aenv auth`` or $AENV_API_KEY gives) launches it there;
        without it and ``home`` the environment decides as for the commands (docs/remote.md).
        """
        node = NodeClient.chosen(home, server)
        request = CreateRequest(
            snapshot=snapshot,
            timeout_s=timeout,
            on_timeout=on_timeout,
            metadata=metadata or {},
            env=envs or {},
            cold=cold,
            hooks=hooks,
            internet=internet,
            allow=tuple(allow),
            deny=tuple(deny),
            publish=tuple(
                PublishedPort(path=Path(path).absolute(), port=port) for path, port in (publish or {}).items()
            ),
            max_seconds=max_seconds,
            memory_mib=memory_mib,
            cpus=cpus,
        )
        return cls(await node.create(request), node)

    @classmethod
    async def connect(
        cls,
        sandbox_id: str,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        home: Home | None = None,
        server: ServerAddress | str | None = None,
    ) -> Self:
        """A sandbox that exists, by id or unique prefix; one that is paused is resumed for ``timeout``."""
        node = NodeClient.chosen(home, server)
        info = await node.get(sandbox_id)
        if info.state is State.PAUSED:
            info = await node.resume(info.sandbox_id, ResumeRequest(timeout_s=timeout))
        return cls(info, node)

    @staticmethod
    async def list(
        *,
        state: Sequence[str] | None = None,
        metadata: dict[str, str] | None = None,
        home: Home | None = None,
        server: ServerAddress | str | None = None,
    ) -> list[SandboxInfo]:
        """All sandboxes of the node, oldest first, or those in one of the states and with this metadata."""
        wanted = (metadata or {}).items()
        return [
            info
            for info in await NodeClient.chosen(home, server).list()
            if (state is None or info.state in state) and wanted <= info.metadata.items()
        ]

    # -- its life ------------------------------------------------------------------------------------------

    async def get_info(self) -> SandboxInfo:
        """What the node knows of it now."""
        self._take(await self._node.get(self.sandbox_id))
        return self._info

    async def is_running(self) -> bool:
        """Whether it runs and its daemon answers."""
        try:
            info = await self.get_info()
        except NotFound:
            return False
        return info.address is not None and await self._open().healthy(5.0)

    async def pause(self, *, hooks: bool = True) -> None:
        """Keep memory and disk in files and end the machine. Its timeout stops counting.

        The ``on_pause`` commands of its snapshot run first; one that fails is ``HookFailed``, and it runs on.
        """
        self._take(await self._node.pause(self.sandbox_id, PauseRequest(hooks=hooks)))

    async def resume(self, *, timeout: float = DEFAULT_TIMEOUT_S, cold: bool = False, hooks: bool = True) -> None:
        """Go on where ``pause`` stopped, for another ``timeout`` seconds."""
        request = ResumeRequest(timeout_s=timeout, cold=cold, hooks=hooks)
        self._take(await self._node.resume(self.sandbox_id, request))

    async def fork(self, n: int = 1, *, timeout: float = DEFAULT_TIMEOUT_S) -> Sequence[Self | AenvError]:
        """``n`` copies of its present state; an entry is a sandbox, or why that child could not be had."""
        reply = await self._node.fork(self.sandbox_id, ForkRequest(count=n, timeout_s=timeout))
        return [self._child(entry) for entry in reply.children]

    async def fork_each(
        self, n: int = 1, *, timeout: float = DEFAULT_TIMEOUT_S
    ) -> AsyncGenerator[Self | AenvError, None]:
        """As ``fork``, but gives each copy as soon as it is ready, so that work on the first can begin.

        A loop that is left before the last one takes all copies back, also those it was given.
        """
        request = ForkRequest(count=n, timeout_s=timeout)
        async with aclosing(self._node.fork_each(self.sandbox_id, request)) as lines:
            async for line in lines:
                if isinstance(line, ForkEntry):
                    yield self._child(line)

    def _child(self, entry: ForkEntry) -> Self | AenvError:
        if entry.sandbox is not None:
            return type(self)(entry.sandbox, self._node)
        return entry.error.error() if entry.error else SandboxDead("the node gave no reason")

    async def snapshot(
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
        """Commit its present state; with ``name`` as that name's next version. The sandbox runs on.

        ``on_restore`` and ``on_fork`` are commands that restored and forked guests run before anybody may use
        them, ``on_pause`` before they are paused or captured (text for the shell, or a list of arguments); None
        keeps the hooks that this sandbox came with. Without ``hooks`` its own ``on_pause`` does not run now.
        """
        request = SnapshotRequest(
            name=Name(name) if name is not None else None,
            tags=tuple(Tag(tag) for tag in tags),
            memory=memory,
            labels=labels or {},
            on_restore=None if on_restore is None else tuple(map(Hook.of, on_restore)),
            on_fork=None if on_fork is None else tuple(map(Hook.of, on_fork)),
            on_pause=None if on_pause is None else tuple(map(Hook.of, on_pause)),
            hooks=hooks,
        )
        return await self._node.snapshot(self.sandbox_id, request)

    async def set_timeout(self, timeout: float) -> None:
        """Let it live ``timeout`` seconds from now."""
        self._take(await self._node.set_timeout(self.sandbox_id, TimeoutRequest(timeout_s=timeout)))

    async def set_network(
        self,
        *,
        internet: bool | None = None,
        allow: Sequence[str] | None = None,
        deny: Sequence[str] | None = None,
    ) -> NetworkPolicy:
        """Change what it may reach, at once and for connections that stand too; None leaves a part as it is."""
        request = NetworkRequest(
            internet=internet,
            allow=None if allow is None else tuple(allow),
            deny=None if deny is None else tuple(deny),
        )
        self._take(await self._node.set_network(self.sandbox_id, request))
        return self._info.network

    async def get_host(self, port: int) -> str:
        """``host:port`` at which this machine reaches ``port`` of the sandbox, until its next pause."""
        info = await self.get_info()
        if info.address is None:
            raise self._refusal("reach a port of")
        if self._node.server is not None:
            raise Unsupported(
                f"the ports of sandbox {self.sandbox_id} are on the network of {self._node.server.url}",
                fix="`aenv port-forward` brings one to this machine",
            )
        if info.host_address is None:
            raise Unsupported(
                f"the ports of sandbox {self.sandbox_id} cannot be reached: it has no network of its own",
                fix="run the node as root, see `aenv doctor`",
            )
        return f"{info.host_address}:{port}"

    async def reset(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        """Begin again from the snapshot that it was started from, with the same settings: the next episode.

        This handle is then another sandbox, with another id; the one before is killed. With a pool of the snapshot
        (``aenv pool set``) the new one stands ready.
        """
        await self.close()
        self._take(await self._node.reset(self.sandbox_id, ResetRequest(timeout_s=timeout)))

    async def kill(self) -> bool:
        """End and remove it; False when it was gone already."""
        try:
            await self._node.kill(self.sandbox_id)
        except NotFound:
            return False
        finally:
            await self.close()
        return True

    async def close(self) -> None:
        """Close this client's connections; the sandbox is not touched."""
        guest, self._guest = self._guest, None
        if guest is not None:
            await guest.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    # -- the guest -----------------------------------------------------------------------------------------

    def _take(self, info: SandboxInfo) -> None:
        if (info.address, info.access_token) != (self._info.address, self._info.access_token):
            self._guest = None
        self._info = info

    def _open(self) -> Guest:
        info = self._info
        if info.address is None or info.access_token is None:
            raise self._refusal("use")
        if self._guest is None:
            self._guest = self._node.guest(info)
        return self._guest

    def _refusal(self, what: str) -> AenvError:
        info, subject = self._info, f"sandbox {self.sandbox_id}"
        return refusal(what, info.state, subject=subject, reason=info.reason, ended_by=info.ended_by)

    async def call(self, work: Callable[[Guest], Awaitable[T]]) -> T:
        """Do ``work``. When the daemon cannot be reached, say what became of the sandbox."""
        if self._info.address is None:
            await self.get_info()
        try:
            return await work(self._open())
        except SandboxDead as error:
            raise await self._explain(error) from error

    async def _explain(self, error: SandboxDead) -> AenvError:
        subject = f"sandbox {self.sandbox_id}"
        try:
            info = await self._settled_info()
        except NotFound:
            return SandboxDead(f"{subject} is gone: it was killed or its time was over")
        except AenvError:
            return error
        if info.address is None:
            return self._refusal("use")
        return SandboxDead(
            f"{subject}: its machine runs, but {error.message}",
            fix=(error.fix or SILENT_FIX).replace("ID", self.sandbox_id),
        )

    async def _settled_info(self) -> SandboxInfo:
        """What the node knows, which is given a moment: a caller may see the end of a machine before it."""
        deadline_s = time.monotonic() + NOTICE_S
        while True:
            info = await self.get_info()
            if info.address is None or await self._open().healthy(0.2) or time.monotonic() > deadline_s:
                return info
            await asyncio.sleep(0.05)
