"""Every so often all sandboxes that run are asked what they use, for those who ask later."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aenv_run.api.sandboxes.watch import metric_if_any
from aenv_run.api.server import Server
from aenv_run.errors import AenvError

log = logging.getLogger(__name__)
#: Daemons that are asked at the same time.
AT_ONCE = 4


@asynccontextmanager
async def sampling(server: Server) -> AsyncIterator[None]:
    """For as long as the server serves; nothing unless its settings say how often."""
    every_s = server.settings.metrics_every_s
    task = asyncio.create_task(_forever(server, every_s), name="metrics of sandboxes") if every_s else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _forever(server: Server, every_s: float) -> None:
    while True:
        try:
            await take_samples(server)
        except AenvError as error:
            log.warning("sandboxes could not be asked what they use: %s", error)
        except Exception:  # a fault of one round is none of the next
            log.exception("sandboxes could not be asked what they use")
        await asyncio.sleep(every_s)


async def take_samples(server: Server) -> None:
    """One of each that runs; what does not answer has none this time. Starts no node."""
    if await server.node.health() is None:
        return
    turns = asyncio.Semaphore(AT_ONCE)

    async def ask(sandbox_id: str) -> None:
        async with turns:
            if (found := await metric_if_any(server, sandbox_id)) is not None:
                server.samples.add(sandbox_id, found)

    infos = await server.node.list()
    server.samples.keep_only({info.sandbox_id for info in infos})
    await asyncio.gather(*(ask(info.sandbox_id) for info in infos if info.address is not None))
