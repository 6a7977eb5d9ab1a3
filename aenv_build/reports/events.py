"""What a build tells while it runs: typed values, one JSON line each with ``--events json``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from aenv_run.types import Model, SnapshotId

#: Of the form of the events; another number means that a reader of this one may be wrong about them.
VERSION: Final = 1


class Place(Model):
    """Where a recipe says something, counted from 1."""

    file: str
    line: int
    column: int


class PlannedStage(Model):
    """One stage of the plan; the base is the first. ``key`` is the digest of all that it depends on."""

    step: str
    verb: str = Field(description="base, or the step's verb")
    what: str
    parent: str | None = Field(description="the step whose state it starts from; null for the base itself")
    after: tuple[str, ...] = Field((), description="what else must be done before, and what files come from")
    key: str
    place: Place


class PlannedName(Model):
    """An output: the state of ``from_step`` gets ``name`` when all has held."""

    name: str
    from_step: str
    memory: bool
    tags: tuple[str, ...]


class Told(Model):
    """What every event has: of a matrix, which cell it is about. Left out where there is none."""

    cell: str | None = None

    @model_serializer(mode="wrap")
    def _without_none(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        fields: dict[str, object] = handler(self)
        if self.cell is None:
            fields.pop("cell", None)
        return fields


class BuildStarted(Told):
    """The plan is made; ``total`` stages of work, the base among them, ``hits`` of them known before.

    ``stages`` has the steps that need no work too (env, workdir, user): no other event tells of them.
    """

    event: Literal["build_started"] = "build_started"
    version: Literal[1] = VERSION
    recipe: str
    total: int
    hits: int
    driver: str
    why: str
    stages: tuple[PlannedStage, ...] = ()
    outputs: tuple[PlannedName, ...] = ()


class StageHit(Told):
    """Nothing to do: the result exists, or nothing needs it."""

    event: Literal["stage_hit"] = "stage_hit"
    step: str
    position: int
    what: str
    why: str
    snapshot_id: SnapshotId | None = None


class StageStarted(Told):
    """Work begins; ``why`` says why the cache did not have it."""

    event: Literal["stage_started"] = "stage_started"
    step: str
    position: int
    what: str
    why: str


class StageOutput(Told):
    """One line that the step's command wrote."""

    event: Literal["stage_output"] = "stage_output"
    step: str
    text: str


class StageNote(Told):
    """Something worth knowing, such as waiting for another build."""

    event: Literal["stage_note"] = "stage_note"
    step: str
    text: str


class StageRetried(Told):
    """A try failed by its command's exit code or time; the step begins again on a fresh machine."""

    event: Literal["stage_retried"] = "stage_retried"
    step: str
    attempt: int = Field(description="the one that failed, counted from 1")
    of: int = Field(description="how many there are at most")
    message: str


class StageFinished(Told):
    """Done and committed (a verify: held)."""

    event: Literal["stage_finished"] = "stage_finished"
    step: str
    position: int
    what: str
    milliseconds: int
    snapshot_id: SnapshotId | None = None


class StageFailed(Told):
    """The step that ends the build. ``code`` as in docs/errors.md: ``step_failed`` where its command failed."""

    event: Literal["stage_failed"] = "stage_failed"
    step: str
    position: int
    what: str
    code: str = "step_failed"
    message: str
    milliseconds: int = 0
    place: Place | None = Field(None, description="where the recipe says it")


class OutputPublished(Told):
    """A name points to the new snapshot."""

    event: Literal["output_published"] = "output_published"
    name: str
    version: str
    tags: tuple[str, ...]
    snapshot_id: SnapshotId
    fresh: bool


class BuildFinished(Told):
    """All is built and named: the last event. With a ``cell``, of that one; the last of all has none."""

    event: Literal["build_finished"] = "build_finished"
    hits: int
    misses: int
    milliseconds: int


class BuildFailed(Told):
    """The error that ended the build, also one from before it began: the last event. ``code``: docs/errors.md."""

    event: Literal["build_failed"] = "build_failed"
    code: str
    exit_code: int
    message: str
    fix: str
    place: Place | None = Field(None, description="where the recipe says what failed, if it is known")


BuildEvent: TypeAlias = Annotated[
    BuildStarted
    | StageHit
    | StageStarted
    | StageOutput
    | StageNote
    | StageRetried
    | StageFinished
    | StageFailed
    | OutputPublished
    | BuildFinished
    | BuildFailed,
    Field(discriminator="event"),
]
Sink: TypeAlias = Callable[[BuildEvent], None]
