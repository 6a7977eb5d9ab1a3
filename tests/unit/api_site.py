"""The HTTP API over a real node process's application on its socket, over a pretended engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from aenv_run.api.app import make_app
from aenv_run.api.server import Server, open_server
from aenv_run.api.settings import Settings
from aenv_run.drivers.select import Selected
from aenv_run.node_core import Node
from tests.unit.node_site import Site
from tests.unit.test_node_api import serving


@dataclass
class ApiSite:
    """A server; ``http`` has its key, ``bare`` has none."""

    site: Site
    node: Node
    server: Server
    http: httpx.AsyncClient
    bare: httpx.AsyncClient

    async def create(self, **body: object) -> dict[str, object]:
        """One sandbox of ``tiny`` (v2)."""
        answer = await self.http.post("/v2/sandboxes", json={"templateID": "tiny", **body})
        assert answer.status_code == 201, answer.text
        made: dict[str, object] = answer.json()
        return made

    async def get(self, sandbox_id: object) -> dict[str, object]:
        """Its detail."""
        answer = await self.http.get(f"/sandboxes/{sandbox_id}")
        assert answer.status_code == 200, answer.text
        found: dict[str, object] = answer.json()
        return found


@asynccontextmanager
async def api_site(site: Site, **settings: object) -> AsyncIterator[ApiSite]:
    """A server of ``site``; its node keeps no time: what is due is reaped when a test says so."""
    async with serving(site.home) as (service, _):
        node = site.node()
        await node.reconcile()
        service.begin(node, Selected(site.engine, await site.engine.probe(), "because"))
        server = open_server(Settings.model_validate(settings), site.home, guests=site.engine.guest)
        transport = httpx.ASGITransport(make_app(server.settings, server), raise_app_exceptions=False)
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://api") as bare,
            httpx.AsyncClient(
                transport=transport, base_url="http://api", headers={"X-API-Key": server.keys.api_key}
            ) as http,
        ):
            try:
                yield ApiSite(site, node, server, http, bare)
            finally:
                await node.close()


def refused(answer: httpx.Response, status: int) -> str:
    """The message of an error of that status, which is JSON as every error is."""
    assert answer.status_code == status, (answer.status_code, answer.text)
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body["code"] == status and set(body) == {"code", "message", "error_code"} and all(body.values())
    return str(body["message"])
