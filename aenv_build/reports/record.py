"""What a build's events add up to: the state of each step and how it ended. Reports are made of it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from aenv_build.language.recipe import Step
from aenv_build.reports import events

#: ``waiting``: not begun, which at the end means that something else ended the build first.
StepState: TypeAlias = Literal["waiting", "running", "cached", "not needed", "done", "failed", "stopped"]
LAST_LINES = 40
#: Verbs of steps that are told once, in the plan.
_NO_WORK = frozenset(Step.VERBS) - Step.STATES - {"verify"}


@dataclass
class StepRecord:
    """One step that has work, the base among them."""

    stage: events.PlannedStage
    state: StepState = "waiting"
    why: str = ""
    milliseconds: int = 0
    message: str = ""
    died: bool = False
    retried: list[str] = field(default_factory=list)
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    began: float = 0.0


@dataclass
class BuildRecord:
    """One build from its plan on."""

    started: events.BuildStarted
    steps: dict[str, StepRecord]
    outputs: list[events.OutputPublished] = field(default_factory=list)
    finished: events.BuildFinished | None = None
    began: float = 0.0
    milliseconds: int = 0

    @property
    def title(self) -> str:
        """The recipe, and the cell of its matrix."""
        cell = self.started.cell
        return self.started.recipe if cell is None else f"{self.started.recipe} ({cell})"


class Recorder:
    """A sink that keeps what is told; a command that builds several recipes leaves several records."""

    def __init__(self) -> None:
        self.builds: list[BuildRecord] = []
        self._of_cells: dict[str | None, BuildRecord] = {}
        self.failed: events.BuildFailed | None = None

    def __call__(self, event: events.BuildEvent) -> None:
        """Take it in."""
        if isinstance(event, events.BuildStarted):
            work = [stage for stage in event.stages if stage.verb not in _NO_WORK]
            steps = {stage.step: StepRecord(stage) for stage in work}
            self.builds.append(BuildRecord(event, steps, began=time.monotonic()))
            self._of_cells[event.cell] = self.builds[-1]
        elif isinstance(event, events.BuildFailed):
            self._fail(event)
        elif (build := self._of_cells.get(event.cell)) is None:
            return  # the end of all cells
        elif isinstance(event, events.BuildFinished):
            build.finished = event
            build.milliseconds = event.milliseconds
        elif isinstance(event, events.OutputPublished):
            build.outputs.append(event)
        elif step := build.steps.get(event.step):
            _take(step, event)

    def is_running(self, cell: str | None, step: str) -> bool:
        """Whether that step of the cell's last build has begun and not ended."""
        return self._of_cells[cell].steps[step].state == "running"

    def _fail(self, event: events.BuildFailed) -> None:
        self.failed = event
        for build in self.builds:
            if build.finished is None:
                build.milliseconds = _since(build.began)
            for step in build.steps.values():
                if step.state == "running":
                    step.state, step.milliseconds = "stopped", _since(step.began)


def _take(step: StepRecord, event: events.BuildEvent) -> None:
    match event:
        case events.StageHit():
            step.state = "cached" if event.snapshot_id is not None else "not needed"
            step.why = event.why
        case events.StageStarted():
            step.state, step.why, step.began = "running", event.why, time.monotonic()
        case events.StageRetried():
            step.retried.append(event.message)
        case events.StageOutput():
            step.lines.append(event.text)
        case events.StageFinished():
            step.state, step.milliseconds = "done", event.milliseconds
        case events.StageFailed():
            step.state, step.milliseconds, step.message = "failed", event.milliseconds, event.message
            step.died = event.code != "step_failed"


def _since(began: float) -> int:
    return round((time.monotonic() - began) * 1000)
