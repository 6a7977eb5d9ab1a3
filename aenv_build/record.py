"""What a build's events add up to: the state of each step and how it ended. Reports are made of it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from aenv_build import events

#: ``waiting``: not begun, which at the end means that something else ended the build first.
StepState: TypeAlias = Literal["waiting", "running", "cached", "not needed", "done", "failed", "stopped"]
LAST_LINES = 40


@dataclass
class StepRecord:
    """One step that has work, the base among them."""

    stage: events.PlannedStage
    state: StepState = "waiting"
    why: str = ""
    milliseconds: int = 0
    message: str = ""
    died: bool = False
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


class Recorder:
    """A sink that keeps what is told; a command that builds several recipes leaves several records."""

    def __init__(self) -> None:
        self.builds: list[BuildRecord] = []
        self.failed: events.BuildFailed | None = None

    def __call__(self, event: events.BuildEvent) -> None:
        """Take it in."""
        if isinstance(event, events.BuildStarted):
            work = [stage for stage in event.stages if stage.verb not in {"env", "workdir", "user"}]
            steps = {stage.step: StepRecord(stage) for stage in work}
            self.builds.append(BuildRecord(event, steps, began=time.monotonic()))
        elif isinstance(event, events.BuildFailed):
            self._fail(event)
        elif isinstance(event, events.BuildFinished):
            self.builds[-1].finished = event
            self.builds[-1].milliseconds = event.milliseconds
        elif isinstance(event, events.OutputPublished):
            self.builds[-1].outputs.append(event)
        elif step := self.builds[-1].steps.get(event.step):
            _take(step, event)

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
        case events.StageOutput():
            step.lines.append(event.text)
        case events.StageFinished():
            step.state, step.milliseconds = "done", event.milliseconds
        case events.StageFailed():
            step.state, step.milliseconds, step.message = "failed", event.milliseconds, event.message
            step.died = event.code != "step_failed"


def _since(began: float) -> int:
    return round((time.monotonic() - began) * 1000)
