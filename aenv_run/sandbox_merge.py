"""Off the path: the memory layers of a paused sandbox become one when they are many."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aenv_run.errors import AenvError
from aenv_run.sandbox_files import adopt_merged
from aenv_run.sandbox_record import Record, SandboxDirectory
from aenv_run.sandbox_tools import Tools
from aenv_run.threads import in_thread

log = logging.getLogger(__name__)


class LayerMerge:
    """At most one task per sandbox. It may be stopped, or the node be killed, at any time: the record says which
    files count, those of before or the new ones."""

    def __init__(self, directory: SandboxDirectory, tools: Tools) -> None:
        self._directory, self._tools = directory, tools
        self._task: asyncio.Task[None] | None = None

    def begin(self, record: Record, settle: Callable[[Record], Awaitable[None]]) -> None:
        """Start with the files of ``record``, which stays as it is until ``settle`` has taken the new one."""
        if record.memory is not None:
            self._task = asyncio.create_task(self._merge(record, settle), name=f"merge {record.id}")

    async def stop(self) -> None:
        """Return when nothing of it runs: it is done, or undone. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def done(self) -> None:
        """Return when it has ended by itself."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _merge(self, record: Record, settle: Callable[[Record], Awaitable[None]]) -> None:
        directory = self._directory
        try:
            memory = directory.memory_paths(record)
            driver = self._tools.named(record.driver)
            merged = await driver.merge_memory(memory, directory.merging, eager=True)
            if merged is not None:
                await settle(await in_thread(adopt_merged, directory, record, merged))
        except (AenvError, OSError) as error:  # it is as it was, and the next pause tries again
            log.warning("sandbox %s: its memory layers could not be merged: %s", record.id, error)
