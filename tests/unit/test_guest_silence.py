"""What is said of a daemon that does not answer, or that its own sandbox locked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from aenv_run.drivers.protocol import Endpoint
from aenv_run.errors import Conflict, SandboxDead
from aenv_run.guest import Command, Guest, Identity
from aenv_run.guest.connect import envelope

NOWHERE = Endpoint("127.0.0.1", 1)


async def test_a_silent_daemon_is_told_with_what_to_do() -> None:
    def silent(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("nothing came", request=request)

    async with Guest(NOWHERE, transport=httpx.MockTransport(silent)) as guest:
        with pytest.raises(SandboxDead, match="did not answer in time") as caught:
            await guest.run(Command(("/bin/true",)))
    assert "wait" in caught.value.fix and "aenv rm" in caught.value.fix


async def test_a_start_that_is_given_up_before_its_pid_is_known_leaves_no_process() -> None:
    asked, named, killed = asyncio.Event(), asyncio.Event(), []

    async def slow(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/aenv/kill":
            killed.append(request.url.params["pid"])
            return httpx.Response(204)
        asked.set()
        await named.wait()
        return httpx.Response(200, content=_one(envelope({"event": {"start": {"pid": 77}}})))

    async with Guest(NOWHERE, transport=httpx.MockTransport(slow)) as guest:
        for given_up in ("start", "connect"):
            doing = guest.run(Command(("/bin/true",))) if given_up == "start" else _follow(guest)
            running = asyncio.create_task(doing)
            await asked.wait()
            asked.clear()
            running.cancel()
            await asyncio.sleep(0)
            named.set()
            with pytest.raises(asyncio.CancelledError):
                await running
            named.clear()
            assert killed == ["77"], given_up


async def _one(piece: bytes) -> AsyncIterator[bytes]:
    yield piece


async def _follow(guest: Guest) -> None:
    async with guest.connect(78):
        pass


@pytest.mark.parametrize("status", [401, 409])
async def test_a_locked_daemon_is_told_with_what_to_do(status: int) -> None:
    def locked(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, json={"code": status, "message": "an access token is set"})

    async with Guest(NOWHERE, transport=httpx.MockTransport(locked)) as guest:
        with pytest.raises(Conflict, match="locked its own daemon") as caught:
            await guest.initialise(Identity.fresh("box"))
    assert "aenv rm" in caught.value.fix
