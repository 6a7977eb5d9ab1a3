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

    def __call__(self, event: events.BuildEvent) -> None:
        """Tell all sinks, in their order."""
        if isinstance(event, events.StageFailed):
            self._failed_at = event.place
        for sink in self._sinks:
            sink(event)

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
