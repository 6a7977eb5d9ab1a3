"""What every route of the server shares: ``Serving`` is its FastAPI dependency."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends
from starlette.requests import HTTPConnection

from aenv_run.api.admission import Admission
from aenv_run.api.idempotency import Outcomes
from aenv_run.api.keys import Keys, open_keys
from aenv_run.api.metrics import Metrics
from aenv_run.api.proxy.proxy import Proxy, open_proxy
from aenv_run.api.sandboxes.samples import Samples
from aenv_run.api.settings import Settings
from aenv_run.api.templates.files import Archives
from aenv_run.api.templates.records import Records
from aenv_run.api.templates.running import BUILDER, Builds
from aenv_run.catalog import Catalog
from aenv_run.config import open_repository
from aenv_run.drivers.protocol import Endpoint
from aenv_run.guest import Guest
from aenv_run.node_client import NodeClient
from aenv_run.paths import Home

#: A client of the daemon at an address, with its access token.
Guests = Callable[[Endpoint, str | None], Guest]


def _guest(endpoint: Endpoint, access_token: str | None) -> Guest:
    return Guest(endpoint, access_token=access_token)


@dataclass(frozen=True)
class Server:
    """One server. ``guests`` makes clients of sandboxes' daemons; tests give their own."""

    settings: Settings
    home: Home
    node: NodeClient
    keys: Keys
    admission: Admission
    metrics: Metrics
    outcomes: Outcomes
    proxy: Proxy
    builds: Builds
    archives: Archives
    guests: Guests = _guest
    samples: Samples = field(default_factory=Samples)
    _opened: dict[str, Catalog] = field(default_factory=dict)

    async def catalog(self) -> Catalog:
        """Of the home's repository; blocking and thread-safe: call it in a thread."""
        if "catalog" not in self._opened:
            repository = await asyncio.to_thread(open_repository, None, self.home)
            self._opened.setdefault("catalog", Catalog(repository, remember=True))
        return self._opened["catalog"]


def open_server(
    settings: Settings, home: Home | None = None, *, guests: Guests = _guest, builder: tuple[str, ...] = BUILDER
) -> Server:
    """Blocking: with the home's keys, and a client of its node, which is started when it is needed."""
    node = NodeClient(home)
    outcomes = Outcomes(node.home.api / "idempotency")
    admission = Admission(node, settings.max_sandboxes)
    keys = open_keys(node.home)
    proxy = open_proxy(node, admission, keys, settings.domains)
    home = node.home
    builds = Builds(home, Records(home.template_builds), settings.max_builds, builder)
    archives = Archives(
        home.template_files, keys.token_seed, settings.max_upload_bytes, settings.max_uploads_bytes
    )
    return Server(settings, home, node, keys, admission, Metrics(node), outcomes, proxy, builds, archives, guests)


def server(connection: HTTPConnection) -> Server:
    """The dependency."""
    found = connection.app.state.server
    assert isinstance(found, Server)
    return found


Serving = Annotated[Server, Depends(server)]
