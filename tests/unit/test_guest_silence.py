"""What is said of a daemon that does not answer, or that its own sandbox locked."""

from __future__ import annotations

import httpx
import pytest

from aenv_run.drivers.protocol import Endpoint
from aenv_run.errors import Conflict, SandboxDead
from aenv_run.guest import Command, Guest, Identity

NOWHERE = Endpoint("127.0.0.1", 1)


async def test_a_silent_daemon_is_told_with_what_to_do() -> None:
    def silent(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("nothing came", request=request)

    async with Guest(NOWHERE, transport=httpx.MockTransport(silent)) as guest:
        with pytest.raises(SandboxDead, match="did not answer in time") as caught:
            await guest.run(Command(("/bin/true",)))
    assert "wait" in caught.value.fix and "aenv rm" in caught.value.fix


@pytest.mark.parametrize("status", [401, 409])
async def test_a_locked_daemon_is_told_with_what_to_do(status: int) -> None:
    def locked(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, json={"code": status, "message": "an access token is set"})

    async with Guest(NOWHERE, transport=httpx.MockTransport(locked)) as guest:
        with pytest.raises(Conflict, match="locked its own daemon") as caught:
            await guest.initialise(Identity.fresh("box"))
    assert "aenv rm" in caught.value.fix
