"""Sinks for build events: plain lines and JSON lines."""

from __future__ import annotations

from typing import IO, TypeAlias

from aenv_build.reports import events
from aenv_build.reports.wording import seconds
from aenv_build.reports.workflow_commands import harmless_json

Placed: TypeAlias = events.StageHit | events.StageStarted | events.StageFinished | events.StageFailed


class PlainLines:
    """One line per event, as CI logs want it: ``[2/5] repo  run … done in 3.2 s``."""

    def __init__(self, stream: IO[str], *, explain: bool = False) -> None:
        self._stream = stream
        self._explain = explain
        self._totals: dict[str | None, int] = {}

    def __call__(self, event: events.BuildEvent) -> None:
        """Print it."""
        for line in self.lines(event):
            self._stream.write(line + "\n")
        self._stream.flush()

    def lines(self, event: events.BuildEvent) -> list[str]:
        """The lines of an event; of a matrix, each names its cell."""
        lines = self._lines(event)
        return lines if event.cell is None else [f"{event.cell}: {line}" for line in lines]

    def _lines(self, event: events.BuildEvent) -> list[str]:
        if isinstance(event, events.BuildStarted):
            self._totals[event.cell] = event.total
            return [
                f"{event.recipe}: {event.total} stages, {event.hits} cached; driver {event.driver}: {event.why}"
            ]
        if isinstance(event, events.StageHit):
            return [f"{self._head(event)}  {event.what}  {event.why}"]
        if isinstance(event, events.StageStarted):
            why = f"  ({event.why})" if self._explain else ""
            return [f"{self._head(event)}  {event.what} …{why}"]
        if isinstance(event, events.StageOutput):
            return [f"  {event.step} | {event.text}"]
        if isinstance(event, events.StageNote):
            return [f"  {event.step}: {event.text}"]
        if isinstance(event, events.StageRetried):
            first = event.message.partition("\n")[0]
            return [f"  {event.step}: attempt {event.attempt} of {event.of}: {first}", f"  {event.step}: again …"]
        if isinstance(event, events.StageFinished):
            head = self._head(event)
            return [f"{head}  {event.what}  done in {seconds(event.milliseconds)}"]
        if isinstance(event, events.StageFailed):
            return [f"{self._head(event)}  {event.what}  FAILED"]
        if isinstance(event, events.BuildFinished | events.BuildFailed):
            return []  # the command says it, with its result or its error
        fresh = "" if event.fresh else " (unchanged)"
        tags = f" [{', '.join(event.tags)}]" if event.tags else ""
        return [f"{event.name}:{event.version}{tags} = {event.snapshot_id.short}{fresh}"]

    def _head(self, event: Placed) -> str:
        return f"[{event.position}/{self._totals.get(event.cell) or '?'}] {event.step}"


class JsonLines:
    """One JSON object per event."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __call__(self, event: events.BuildEvent) -> None:
        """Write it."""
        self._stream.write(harmless_json(event.model_dump_json()) + "\n")
        self._stream.flush()
