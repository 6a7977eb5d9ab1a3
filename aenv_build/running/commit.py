"""From a staging machine to committed snapshots, through the repository's one door."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from aenv_build.planning.base import BaseStage
from aenv_build.planning.plan import Plan, PlannedOutput, Stage
from aenv_build.running.staging import StagingMachine
from aenv_run.capture import Capture
from aenv_run.drivers.protocol import Caps
from aenv_run.errors import AenvError, StepFailed
from aenv_run.repository import Draft, Repository
from aenv_run.snapshot import Provenance, Snapshot
from aenv_run.threads import in_thread
from aenv_run.types import Architecture, StageKey

FAILED_LABEL = "aenv.failed-step"


class Committer:
    """Writes the drafts of one build and commits captures with them."""

    def __init__(self, plan: Plan, repository: Repository, architecture: Architecture, caps: Caps) -> None:
        self._plan = plan
        self._repository = repository
        self._architecture = architecture
        self._caps = caps

    async def base(self, image: Path, base: BaseStage) -> Snapshot:
        """A base's disk image as a snapshot of one layer."""
        draft = Draft(
            architecture=self._architecture,
            machine=self._plan.machine,
            context=base.context,
            labels=dict(base.labels),
            provenance=self._provenance("base", base.key),
        )
        return await in_thread(self._repository.commit, Capture(image.parent, (image,)), draft)

    async def stage(self, stage: Stage, staged: StagingMachine, *, keep_running: bool) -> Snapshot:
        """The state after a step. Without memory, only what a cold boot of the disk would show is left."""
        if stage.memory:
            await staged.guest.detach()
        else:
            await staged.guest.settle()
        draft = self._draft(staged.snapshot, stage.id, stage.key, staged)
        draft = draft.model_copy(update={"context": stage.context})
        capture = await staged.capture(memory=stage.memory, keep_running=keep_running)
        return await self._commit(capture, draft, staged)

    async def output_from(self, planned: PlannedOutput, staged: StagingMachine) -> Snapshot:
        """Memory of a machine that was just booted from the state."""
        await staged.guest.detach()
        draft = self._output_draft(planned, staged.snapshot)
        draft = draft.model_copy(update={"memory_below": staged.memory_below})
        capture = await staged.capture(memory=True, keep_running=False)
        return await self._commit(capture, draft, staged)

    async def output_of(self, planned: PlannedOutput, state: Snapshot, directory: Path) -> Snapshot:
        """The state as it is, with the output's context and labels: no bytes are added."""
        memory = state.memory if planned.memory else None
        files = memory.files if memory else {}
        capture = Capture(directory, facts=memory.facts if memory else None, memory_below=tuple(files))
        draft = self._output_draft(planned, state).model_copy(update={"memory_below": files})
        return await in_thread(self._repository.commit, capture, draft)

    async def with_entrance(
        self, stage: Stage, staged: StagingMachine, error: StepFailed, *, keep: bool
    ) -> StepFailed:
        """The error, and how to look at the state in which the step failed."""
        hints = [error.fix] if error.fix else []
        if not keep:
            hints.append("to enter its state, build again with --keep, which prints the command")
            return StepFailed(error.message, fix="; ".join(hints))
        try:
            kept = await self._keep(stage, staged)
        except AenvError as problem:
            hints.append(f"its state could not be kept: {problem.message}")
        else:
            hints.append(f"enter its state: aenv start {kept.id.short}, then aenv connect with the id it prints")
        return StepFailed(error.message, fix="; ".join(hints))

    async def _keep(self, stage: Stage, staged: StagingMachine) -> Snapshot:
        memory = self._caps.memory_snapshot and not staged.was_given
        if memory:
            await staged.guest.detach()
        else:
            await staged.guest.sync()
        draft = self._draft(staged.snapshot, stage.id, None, staged)
        draft = draft.model_copy(update={"context": stage.context, "labels": {FAILED_LABEL: stage.id}})
        capture = await staged.capture(memory=memory, keep_running=False)
        return await self._commit(capture, draft, staged)

    async def _commit(self, capture: Capture, draft: Draft, staged: StagingMachine) -> Snapshot:
        try:
            snapshot = await in_thread(self._repository.commit, capture, draft)
        finally:
            capture.discard()
        staged.snapshot = snapshot
        return snapshot

    def _draft(self, below: Snapshot, step: str, key: StageKey | None, staged: StagingMachine) -> Draft:
        return Draft(
            parent=below.id,
            architecture=self._architecture,
            machine=self._plan.machine,
            provenance=self._provenance(step, key),
            disk_below=below.disk,
            memory_below=staged.memory_below,
        )

    def _output_draft(self, planned: PlannedOutput, state: Snapshot) -> Draft:
        return Draft(
            parent=state.id,
            architecture=self._architecture,
            machine=self._plan.machine,
            context=planned.context,
            hooks=planned.hooks,
            labels=dict(planned.labels),
            provenance=self._provenance(planned.state or "base", planned.key),
            disk_below=state.disk,
        )

    def _provenance(self, step: str, key: StageKey | None) -> Provenance:
        """Without time and host, so that equal states are one snapshot: the version's record has them."""
        return Provenance(
            recipe_digest=self._plan.source.digest,
            recipe_name=self._plan.source.recipe.name,
            step=step,
            stage_key=key,
            builder=f"aenv-build {version('aenv')}",
        )
