"""Files of one step that another copies: taken once, as a tar, from a machine of that step's state."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from aenv_build.language.verbs import FromStep
from aenv_build.planning.files import disk_limit
from aenv_build.planning.plan import Plan, Stage
from aenv_build.planning.schedule import copied_paths, state_of
from aenv_build.running.staging import Slots, StagingMachine
from aenv_run.errors import AenvError, CorruptData, SandboxDead, StepFailed, StoreUnavailable
from aenv_run.threads import in_thread


class CopiedFiles:
    """The tars of one build, in its scratch directory. ``boot``: a machine of a step's state (None: the base)."""

    def __init__(self, plan: Plan, slots: Slots, boot: Callable[[str | None], Awaitable[StagingMachine]]) -> None:
        self._plan = plan
        self._slots = slots
        self._boot = boot
        self._taken: dict[tuple[str | None, str], Path] = {}

    async def for_stage(self, stage: Stage) -> Path | None:
        """What that step copies of another; None where it copies nothing so.

        ``StepFailed`` where it cannot be read; a dead machine and a store's fault are told as themselves.
        """
        copy = stage.step.copy_
        if copy is None or not isinstance(copy.from_, FromStep):
            return None
        state, path = state_of(self._plan, copy.from_.step), copy.from_.path
        if (state, path) not in self._taken:
            staged = await self._boot(state)
            try:
                self._taken[state, path] = await self._read(staged, path)
            except (SandboxDead, StoreUnavailable, CorruptData):
                raise
            except AenvError as error:
                raise StepFailed(f"step {stage.id!r} (copy) cannot read {path}: {error.message}") from error
            finally:
                await staged.close()
        return self._taken[state, path]

    async def take_ahead(self, stage: Stage, staged: StagingMachine, needed: frozenset[str]) -> None:
        """What ``needed`` steps copy of this one, while its machine is there; what fails is tried again later."""
        for path in sorted(copied_paths(self._plan, stage.id, needed)):
            with suppress(AenvError):
                self._taken[stage.id, path] = await self._read(staged, path)

    async def _read(self, staged: StagingMachine, path: str) -> Path:
        archive = self._slots.next_directory("files")
        limit = disk_limit(self._plan.machine).of_stream()
        async with staged.whole(f"the copy of {path}"):
            with archive.open("wb") as file:
                async for chunk in staged.guest.get_archive(path):
                    limit.take(len(chunk))
                    await in_thread(file.write, chunk)
        return archive
