"""Builds live as long as the server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aenv_run.api.server import Server


@asynccontextmanager
async def builds(server: Server) -> AsyncIterator[None]:
    """Tell what an earlier server left unfinished; at the end, end what runs."""
    recovering = asyncio.create_task(server.builds.recover())
    try:
        yield
    finally:
        recovering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await recovering
        await server.builds.close()
