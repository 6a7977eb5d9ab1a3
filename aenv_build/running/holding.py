"""What a running build uses and makes is held in the repository, whoever collects garbage there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from aenv_run.errors import AenvError
from aenv_run.garbage.holder import RENEW_S, Holder
from aenv_run.paths import Home
from aenv_run.repository import Repository
from aenv_run.threads import in_thread, to_the_end


@asynccontextmanager
async def holding(repository: Repository, home: Home) -> AsyncIterator[Holder]:
    """For as long as the build runs. A repository that cannot be written now is tried again all the time."""
    holder = Holder.of_build(repository, str(home.root))
    with suppress(AenvError):
        await in_thread(holder.renew)
    keeper = asyncio.create_task(_renew_forever(holder), name="hold what the build uses")
    try:
        yield holder
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        with suppress(AenvError):
            await to_the_end(in_thread(holder.drop))


async def _renew_forever(holder: Holder) -> None:
    while True:
        await asyncio.sleep(RENEW_S)
        with suppress(AenvError):
            await in_thread(holder.renew)
