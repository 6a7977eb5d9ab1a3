"""Blocking work in a thread that is not left alone: a cancel waits for its end before it goes on.

But for one case: a command that was told to stop waits GRACE_S and no longer, since a store may neither answer nor
refuse. It then ends machines, removes its scratch and ends the process, and the thread with it, as a kill would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar

from aenv_run.errors import Interrupted
from aenv_run.stopping import GRACE_S, STOP

P = ParamSpec("P")
T = TypeVar("T")

#: Of those who wait for a thread: when it is resolved, they wait no longer.
_waiting: set[asyncio.Future[None]] = set()


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The function's result. Its files may be removed as soon as this returns or raises: nothing uses them.

    A cancel loses the result: what has to be closed is made before, and only filled in the thread.
    """
    return await to_the_end(_patiently(partial(function, *args, **kwargs)))


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


async def _patiently(work: Callable[[], T]) -> T:
    """Its result; ``Interrupted`` when it has not ended GRACE_S after a stop, and then it goes on unseen."""
    task: asyncio.Future[T] = asyncio.ensure_future(asyncio.to_thread(work))
    enough: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    if STOP.asked.is_set():
        _resolve_later(enough)
    _waiting.add(enough)
    try:
        await asyncio.wait([task, enough], return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
    finally:
        _waiting.discard(enough)
    if not task.done():
        raise Interrupted("interrupted: a thread that hangs was left alone")
    return task.result()


def lose_patience() -> None:
    """Told to stop: those who wait for threads of this event loop do so for GRACE_S and no longer."""
    for enough in list(_waiting):
        _resolve_later(enough)


def _resolve_later(enough: asyncio.Future[None]) -> None:
    enough.get_loop().call_later(GRACE_S, lambda: None if enough.done() else enough.set_result(None))


class LoopThreads(ThreadPoolExecutor):
    """Threads of an event loop, whose end is not waited for after a stop."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As its parent's, unless told to stop."""
        stopped = STOP.asked.is_set()
        super().shutdown(wait=wait and not stopped, cancel_futures=cancel_futures or stopped)
