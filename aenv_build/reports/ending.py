"""How a build ends, told to its sinks: every error becomes the last event, also one from before the plan."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from aenv_build.reports import events
from aenv_run.errors import AenvError, Interrupted, from_os

_MARK = re.compile(r"((?:(?!: )[^\n]){1,4096}?):([0-9]{1,9}):([0-9]{1,9}): ")


def interrupted() -> Interrupted:
    """The error of a build that its user stopped."""
    return Interrupted(
        "interrupted: every machine was ended; finished steps are kept", fix="run it again to go on"
    )


def place_in(message: str) -> events.Place | None:
    """The ``file:line:column`` that a message about a recipe starts with."""
    found = _MARK.match(message)
    if found is None:
        return None
    return events.Place(file=found[1], line=int(found[2]), column=int(found[3]))


class Telling:
    """Passes events on to each sink, and ends the story when an error does."""

    def __init__(self, *sinks: events.Sink) -> None:
        self._sinks = sinks
        self._failed_at: events.Place | None = None
        self._running: dict[tuple[str | None, str], None] = {}

    def __call__(self, event: events.BuildEvent) -> None:
        """Tell all sinks, in their order."""
        if isinstance(event, events.StageFailed):
            self._failed_at = event.place
        if isinstance(event, events.StageStarted):
            self._running[event.cell, event.step] = None
        elif isinstance(event, events.StageFinished | events.StageFailed):
            self._running.pop((event.cell, event.step), None)
        for sink in self._sinks:
            sink(event)

    def at_stake(self) -> str:
        """What a stop now gives up, in a few words."""
        running = [f"{step} ({cell})" if cell else step for cell, step in self._running.copy()]
        if not running:
            return "this build"
        return f"{', '.join(running[:4])}{' and more' if len(running) > 4 else ''}"

    @contextmanager
    def to_the_end(self) -> Iterator[None]:
        """Whatever leaves the block by an error is told as ``build_failed``, and goes on."""
        try:
            yield
        except AenvError as error:
            self._fail(error)
            raise
        except (asyncio.CancelledError, KeyboardInterrupt):
            self._fail(interrupted())
            raise
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                self._fail(from_os(error))
            raise

    def _fail(self, error: AenvError) -> None:
        place = place_in(error.message) or (None if isinstance(error, Interrupted) else self._failed_at)
        event = events.BuildFailed(
            code=error.code, exit_code=error.exit_code, message=error.message, fix=error.fix, place=place
        )
        for sink in self._sinks:
            with suppress(OSError):  # a report that cannot be written must not hide the error that it is about
                sink(event)
