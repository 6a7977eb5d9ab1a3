"""Traffic into a real machine: a service on its loopback, through pauses, forks and its end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest
import uvicorn

from aenv_run.api.app import make_app
from aenv_run.api.proxy.listening import http_protocol
from aenv_run.api.server import open_server
from aenv_run.api.settings import Settings
from aenv_run.guest.connect import envelope
from aenv_run.paths import Home

pytestmark = pytest.mark.timeout(300)
DOMAIN = "sandbox.test"
PORT = 8080
ANSWER = f"cd /srv && echo hello >page && /bin/busybox httpd -p 127.0.0.1:{PORT}"


@asynccontextmanager
async def serving(home: Home) -> AsyncIterator[httpx.AsyncClient]:
    """A server of the home; a client with its key."""
    server = open_server(Settings(domains=(DOMAIN,)), home)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        make_app(server.settings, server),
        http=http_protocol(server.proxy),
        ws="websockets-sansio",
        log_config=None,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=1,
    )
    running = uvicorn.Server(config)
    task = asyncio.create_task(running._serve([listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(
            base_url=url, headers={"X-API-Key": server.keys.api_key}, timeout=120, trust_env=False
        ) as api:
            yield api
    finally:
        running.should_exit = True
        await task
        listener.close()


@dataclass(frozen=True)
class Made:
    """A sandbox as its creator knows it."""

    api: httpx.AsyncClient
    id: str
    token: str
    traffic_token: str

    @classmethod
    def of(cls, api: httpx.AsyncClient, told: dict[str, str]) -> Made:
        return cls(api, told["sandboxID"], told["envdAccessToken"], told["trafficAccessToken"])

    def headers(self, port: int) -> dict[str, str]:
        """By host name, as a browser or an SDK of another domain comes."""
        own = {"Host": f"{port}-{self.id}.{DOMAIN}", "E2B-Traffic-Access-Token": self.traffic_token}
        return {**own, "X-Access-Token": self.token}

    async def page(self) -> httpx.Response:
        """What its service says."""
        return await self.api.get("/page", headers=self.headers(PORT))

    def start(self, script: str) -> httpx.Request:
        """A command's stream."""
        body = envelope({"process": {"cmd": "/bin/sh", "args": ["-c", script]}, "stdin": False})
        kind = {"Content-Type": "application/connect+json"}
        return self.api.build_request(
            "POST", "/process.Process/Start", content=body, headers={**self.headers(49983), **kind}
        )


async def test_a_service_on_the_loopback_of_a_machine_that_comes_and_goes(home: Home) -> None:
    async with serving(home) as api:
        asked = {
            "templateID": "tiny",
            "autoPause": True,
            "autoResume": {"enabled": True},
            "network": {"allowPublicTraffic": False},
        }
        created = await api.post("/v2/sandboxes", json=asked)
        assert created.status_code == 201, created.text
        sandbox = Made.of(api, created.json())
        try:
            done = await api.send(sandbox.start(ANSWER))
            assert done.status_code == 200 and b'"end"' in done.content, done.text
            assert (await sandbox.page()).text == "hello\n"
            await _pause_ends_a_stream(sandbox)
            # Traffic wakes it, and the service goes on where it was.
            assert (await sandbox.page()).text == "hello\n"
            forked = await api.post(f"/sandboxes/{sandbox.id}/fork", json={"count": 1})
            assert forked.status_code == 201, forked.text
            (child,) = [Made.of(api, entry["sandbox"]) for entry in forked.json()]
            assert child.token != sandbox.token and child.traffic_token != sandbox.traffic_token
            assert (await child.page()).text == (await sandbox.page()).text == "hello\n"
            stranger = Made(api, child.id, sandbox.token, sandbox.traffic_token)
            assert (await stranger.page()).status_code == 403
            assert (await api.delete(f"/sandboxes/{child.id}")).status_code == 204
            gone = await child.page()
            assert gone.status_code == 502 and "was not found" in gone.json()["message"]
        finally:
            await api.delete(f"/sandboxes/{sandbox.id}")


async def _pause_ends_a_stream(sandbox: Made) -> None:
    answer = await sandbox.api.send(sandbox.start("echo here; exec sleep 1000"), stream=True)
    heard = answer.aiter_raw()
    said = b""
    while b"stdout" not in said:
        said += await anext(heard)
    paused = await sandbox.api.post(f"/sandboxes/{sandbox.id}/pause")
    assert paused.status_code == 204, paused.text
    with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
        async with asyncio.timeout(20):
            async for _ in heard:
                pass
    await answer.aclose()
