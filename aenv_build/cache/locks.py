"""One builder at a time per stage key on this node, by flock(2): the kernel drops it when a builder dies."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aenv_run.types import StageKey

POLL_S = 0.1
#: Keys share this many files (4096), so that they do not pile up; sharing one only makes a stage wait.
PREFIX = 3


@asynccontextmanager
async def key_lock(folder: Path, key: StageKey, on_wait: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Hold the key's lock. ``on_wait`` is called once when another builder has it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / f"build-{key[:PREFIX]}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        waited = False
        while not _try(descriptor):
            if not waited:
                waited = True
                await on_wait()
            await asyncio.sleep(POLL_S)
        yield
    finally:
        os.close(descriptor)


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
