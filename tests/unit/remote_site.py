"""A server and a node over a pretended engine, in a thread of their own, for clients that are commands."""

from __future__ import annotations

import asyncio
import getpass
import json
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
import uvicorn

from aenv_run.api.app import make_app
from aenv_run.api.proxy.listening import http_protocol
from aenv_run.api.server import Server, open_server
from aenv_run.api.settings import Settings
from aenv_run.cli.command import run
from aenv_run.credentials import ServerAddress
from aenv_run.drivers.select import Selected
from aenv_run.guest import Guest
from aenv_run.node_core import Node
from tests.unit.node_site import Site, make_site
from tests.unit.pretend_engine import PretendEngine
from tests.unit.test_node_api import serving

T = TypeVar("T")


@dataclass
class RemoteSite:
    """A server, its home, and what of it a test may touch from outside of its thread."""

    site: Site
    node: Node
    server: Server
    address: ServerAddress
    loop: asyncio.AbstractEventLoop

    def call(self, work: Coroutine[object, object, T]) -> T:
        """Do it in the server's thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def clear(self) -> None:
        """No sandboxes."""

        async def kill() -> None:
            for info in self.node.infos():
                await self.node.kill(self.node.find(info.sandbox_id))

        self.call(kill())


@contextmanager
def remote_site(root: Path, daemon: str | None = None, **settings: object) -> Iterator[RemoteSite]:
    """Serves until the end; a home with ``tiny:1`` in ``root``.

    ``daemon``: the URL of a real one, which then is that of its first sandbox.
    """
    made: list[RemoteSite] = []
    stop = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(root, daemon, settings, made, stop)))
    thread.start()
    try:
        while not made:
            assert thread.is_alive()
            time.sleep(0.005)
        yield made[0]
    finally:
        stop.set()
        thread.join()


async def _serve(
    root: Path, daemon: str | None, settings: dict[str, object], made: list[RemoteSite], stop: threading.Event
) -> None:
    site = make_site(root / "home", root / "seed", user="app" if daemon is None else getpass.getuser())
    if daemon is not None:
        engine = PretendEngine(first_port=httpx.URL(daemon).port or 0)
        tools = replace(site.tools, driver=engine, guests=lambda at, token: Guest(at, access_token=token))
        site = Site(site.home, engine, tools)
    async with serving(site.home) as (service, _):
        node = site.node()
        await node.reconcile()
        service.begin(node, Selected(site.engine, await site.engine.probe(), "because"))
        server = open_server(Settings.model_validate({"port": 0, **settings}), site.home, guests=site.tools.guests)
        config = uvicorn.Config(
            make_app(server.settings, server),
            port=0,
            ws="websockets-sansio",
            http=http_protocol(server.proxy),
            log_config=None,
            lifespan="on",
            timeout_graceful_shutdown=1,
        )
        web = uvicorn.Server(config)
        task = asyncio.create_task(web._serve([config.bind_socket()]))  # without taking the signals
        while not web.started:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.005)
        port = web.servers[0].sockets[0].getsockname()[1]
        address = ServerAddress.parse(f"http://127.0.0.1:{port}", server.keys.api_key)
        made.append(RemoteSite(site, node, server, address, asyncio.get_running_loop()))
        await asyncio.to_thread(stop.wait)
        web.should_exit = True
        await task
        await node.close()


def _timeless(value: object) -> object:
    if isinstance(value, dict):
        return {key: _timeless(one) for key, one in value.items() if key != "renewed_s_ago"}
    return [_timeless(one) for one in value] if isinstance(value, list) else value


@dataclass
class Commands:
    """Runs commands in this process, for the server or for its home."""

    remote: RemoteSite
    patch: pytest.MonkeyPatch
    captured: pytest.CaptureFixture[str]
    own: Path

    def there(self, *argv: str, code: int | None = 0) -> tuple[str, str]:
        """As a client of the server; what it printed."""
        self.patch.setenv("AENV_HOME", str(self.own))  # of the client: caches and scratch
        self.patch.setenv("AENV_API_URL", self.remote.address.url)
        self.patch.setenv("AENV_API_KEY", self.remote.address.api_key)
        return self._run(argv, code)

    def here(self, *argv: str, code: int | None = 0) -> tuple[str, str]:
        """On the server's machine."""
        self.patch.setenv("AENV_HOME", str(self.remote.site.home.root))
        self.patch.delenv("AENV_API_URL", raising=False)
        self.patch.delenv("AENV_API_KEY", raising=False)
        return self._run(argv, code)

    def same(self, *argv: str) -> object:
        """What both say as JSON, which is the same but for how long ago something was."""
        local, remote = (json.loads(say(*argv, "--json")[0]) for say in (self.here, self.there))
        assert _timeless(remote) == _timeless(local)
        return remote

    def _run(self, argv: tuple[str, ...], code: int | None) -> tuple[str, str]:
        self.captured.readouterr()
        got = run(list(argv))
        said = self.captured.readouterr()
        assert code is None or got == code, (argv, got, said)
        return said.out, said.err
