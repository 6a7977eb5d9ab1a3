"""Blocking work in a thread that is never left alone: a cancel waits for its end before it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The function's result. Its files may be removed as soon as this returns or raises: nothing uses them."""
    return await to_the_end(asyncio.to_thread(function, *args, **kwargs))


async def to_the_end(work: Awaitable[T]) -> T:
    """Await ``work``; a cancel is raised only after it ended."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
