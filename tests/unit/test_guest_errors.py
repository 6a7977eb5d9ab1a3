"""An exhausted resource of a guest: whether it helps to ask again, or to ask for less."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from aenv_run.drivers.protocol import Endpoint
from aenv_run.errors import AenvError, LimitReached, NoSpace, TooLarge
from aenv_run.guest import Command, Guest


@pytest.mark.parametrize(
    ("reason", "error", "again"),
    [("", LimitReached, True), ("too_large", TooLarge, False), ("no_space", NoSpace, False)],
)
async def test_what_is_too_large_stays_too_large(reason: str, error: type[AenvError], again: bool) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(429, json={"code": "resource_exhausted", "message": "no", "reason": reason})

    async with Guest(Endpoint("127.0.0.1", 1), transport=httpx.MockTransport(answer)) as guest:
        with pytest.raises(error) as caught:
            await guest.run(Command(("/bin/true",)))
        assert type(caught.value) is error and caught.value.retryable is again


async def test_a_file_over_the_limit_is_too_large() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=_chunks()))
    async with Guest(Endpoint("127.0.0.1", 1), transport=transport) as guest:
        with pytest.raises(TooLarge, match="larger than 5 bytes"):
            await guest.read_file("/x", limit_bytes=5)


async def _chunks() -> AsyncIterator[bytes]:
    for _ in range(3):
        yield b"xxx"
