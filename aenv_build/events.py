"""What a build tells while it runs: typed values, one JSON line each with ``--events json``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from aenv_run.types import Model, SnapshotId


class BuildStarted(Model):
    """The plan is made; ``total`` stages, the base among them, ``hits`` of them known before."""

    event: Literal["build_started"] = "build_started"
    recipe: str
    total: int
    hits: int
    driver: str
    why: str


class StageHit(Model):
    """Nothing to do: the result exists, or nothing needs it."""

    event: Literal["stage_hit"] = "stage_hit"
    step: str
    position: int
    what: str
    why: str
    snapshot_id: SnapshotId | None = None


class StageStarted(Model):
    """Work begins; ``why`` says why the cache did not have it."""

    event: Literal["stage_started"] = "stage_started"
    step: str
    position: int
    what: str
    why: str


class StageOutput(Model):
    """One line that the step's command wrote."""

    event: Literal["stage_output"] = "stage_output"
    step: str
    text: str


class StageNote(Model):
    """Something worth knowing, such as waiting for another build."""

    event: Literal["stage_note"] = "stage_note"
    step: str
    text: str


class StageFinished(Model):
    """Done and committed (a verify: held)."""

    event: Literal["stage_finished"] = "stage_finished"
    step: str
    position: int
    what: str
    milliseconds: int
    snapshot_id: SnapshotId | None = None


class StageFailed(Model):
    """The step that ends the build."""

    event: Literal["stage_failed"] = "stage_failed"
    step: str
    position: int
    what: str
    message: str


class OutputPublished(Model):
    """A name points to the new snapshot."""

    event: Literal["output_published"] = "output_published"
    name: str
    version: str
    tags: tuple[str, ...]
    snapshot_id: SnapshotId
    fresh: bool


BuildEvent: TypeAlias = (
    BuildStarted
    | StageHit
    | StageStarted
    | StageOutput
    | StageNote
    | StageFinished
    | StageFailed
    | OutputPublished
)
Sink: TypeAlias = Callable[[BuildEvent], None]
