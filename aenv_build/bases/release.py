"""The state of a Debian package archive: the digest of a suite's signed Release file."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aenv_build.language.recipe import Debootstrap
from aenv_run.digest import digest_bytes
from aenv_run.errors import BaseUnavailable
from aenv_run.later import later
from aenv_run.types import Digest

if TYPE_CHECKING:
    import httpx
else:
    httpx = later("httpx")

FETCH_S = 60.0
MAX_RELEASE_BYTES = 4 << 20


async def release_digest(mirror: str, suite: str) -> Digest:
    """Of the suite's signed Release file, which has the digests of all its lists of packages."""
    url = f"{mirror.rstrip('/')}/dists/{suite}/InRelease"
    data = bytearray()
    try:
        async with (
            asyncio.timeout(FETCH_S),
            httpx.AsyncClient(follow_redirects=True, trust_env=True) as client,
            client.stream("GET", url) as response,
        ):
            if response.status_code != 200:
                raise BaseUnavailable(
                    f"{url} answers {response.status_code}", fix="check the mirror and the suite"
                )
            async for chunk in response.aiter_bytes():
                data += chunk
                if len(data) > MAX_RELEASE_BYTES:
                    raise BaseUnavailable(f"{url} has more than {MAX_RELEASE_BYTES >> 20} MiB: no Release file")
    except (httpx.HTTPError, TimeoutError) as error:
        raise BaseUnavailable(
            f"cannot fetch {url}: {error or 'no answer in time'}", fix="check the network"
        ) from None
    return digest_bytes(bytes(data))


async def require_release(base: Debootstrap, pin: Digest) -> None:
    """``BaseUnavailable`` when the archive has moved on: packages of the day of the lock are gone there."""
    found = await release_digest(base.mirror or "", base.suite)
    if found != pin:
        raise BaseUnavailable(
            f"the archive moved on: {base.suite} of {base.mirror} is locked to {pin}, and is {found} today",
            fix="lock the recipe again (aenv-build lock), or name a mirror that keeps the old state",
        )
