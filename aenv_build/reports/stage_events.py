"""What a build tells of its stages: with their places in the recipe, and how long each took."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aenv_build.planning.plan import Plan
from aenv_build.reports import events
from aenv_build.reports.picture import drawing_of
from aenv_run.errors import AenvError
from aenv_run.snapshot import Snapshot


class StageEvents:
    """The events of a plan's stages, to one sink."""

    def __init__(self, plan: Plan, sink: events.Sink) -> None:
        self._drawing = drawing_of(plan)
        self._places = {stage.step: stage.place for stage in self._drawing.stages}
        self._sink = sink

    def begin(self, total: int, hits: int, driver: str, why: str) -> None:
        """The first event: the plan."""
        self._sink(
            events.BuildStarted(
                recipe=self._drawing.recipe,
                total=total,
                hits=hits,
                driver=driver,
                why=why,
                stages=self._drawing.stages,
                outputs=self._drawing.outputs,
            )
        )

    def hit(self, step: str, position: int, what: str, why: str, kept: Snapshot | None) -> None:
        """Nothing to do."""
        found = kept.id if kept else None
        self._sink(events.StageHit(step=step, position=position, what=what, why=why, snapshot_id=found))

    def note(self, step: str, text: str) -> None:
        """Something worth knowing of a step."""
        self._sink(events.StageNote(step=step, text=text))

    def retried(self, step: str, attempt: int, of: int, message: str) -> None:
        """A try did not hold, and another one follows."""
        self._sink(events.StageRetried(step=step, attempt=attempt, of=of, message=message))

    @asynccontextmanager
    async def measured(self, step: str, position: int, what: str, why: str) -> AsyncIterator[list[Snapshot]]:
        """Tell the start and the end of work; the caller puts the result into the list."""
        began = time.monotonic()
        self._sink(events.StageStarted(step=step, position=position, what=what, why=why))
        result: list[Snapshot] = []
        try:
            yield result
        except AenvError as error:
            self._sink(
                events.StageFailed(
                    step=step,
                    position=position,
                    what=what,
                    code=error.code,
                    message=error.message,
                    milliseconds=_since(began),
                    place=self._places.get(step),
                )
            )
            raise
        self._sink(
            events.StageFinished(
                step=step, position=position, what=what, milliseconds=_since(began), snapshot_id=result[0].id
            )
        )


def _since(began: float) -> int:
    return round((time.monotonic() - began) * 1000)
