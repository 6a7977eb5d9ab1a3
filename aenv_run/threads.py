"""Blocking work in a thread that is never left alone: a cancel waits for its end before it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The function's result. Its files may be removed as soon as this returns or raises: nothing uses them.

    A cancel loses the result: what has to be closed is made before, and only filled in the thread.
    """
    return await to_the_end(asyncio.to_thread(function, *args, **kwargs))


async def to_the_end(work: Awaitable[T]) -> T:
    """Await ``work``; a cancel, and each that follows it, is raised only when it has ended."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # seen: the cancel is what counts
        raise
