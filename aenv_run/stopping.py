"""Whether this process was told to stop, what is given up then, and what must be done before it ends at once.

Only the command line tells it to (``aenv_run.cli.signals``). In a node, or in a program that uses the SDK,
nothing is ever asked to stop here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aenv_run.errors import Interrupted

#: So long whoever was told to stop still waits for a thread that may hang in a store.
GRACE_S = 2.0


class Stopping:
    """One is enough for a process: ``STOP``."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        #: Says in a few words what is lost by a stop now; a command that knows sets it.
        self.at_stake: Callable[[], str] | None = None
        #: Done before the process ends without cleaning up; modules that start programs add to it.
        self.before_end: list[Callable[[], None]] = []
        #: Children that are to outlive this process, such as a node.
        self.lasting: set[int] = set()
        self._asked_s = 0.0
        self._doing: dict[object, tuple[str, float]] = {}

    def ask(self) -> None:
        """From now on no further try is begun of what failed, and pauses between tries are over."""
        self._asked_s = time.monotonic()
        self.asked.set()

    def forget(self) -> None:
        """For the next command in this process."""
        self.asked.clear()
        self.at_stake = None

    @property
    def is_over(self) -> bool:
        """Told to stop so long ago that nothing is begun any more that may hang."""
        return self.asked.is_set() and time.monotonic() >= self._asked_s + GRACE_S

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """While something is done that may hang, so that ``given_up`` can name it. ``Interrupted`` when over."""
        if self.is_over:
            raise Interrupted(f"interrupted: {what} was not begun")
        mark = object()
        self._doing[mark] = what, time.monotonic()
        try:
            yield
        finally:
            del self._doing[mark]

    def waits_for(self, longer_than_s: float) -> str:
        """What has been under way for longer than that; "" when nothing has. Safe in any thread."""
        begun_before_s = time.monotonic() - longer_than_s
        return next((what for what, since_s in self._doing.copy().values() if since_s <= begun_before_s), "")

    def given_up(self) -> str:
        """What a stop now gives up; "" when nothing is known of. Safe in a signal's handler."""
        found = list(dict.fromkeys(what for what, _ in self._doing.copy().values()))
        parts = [self.at_stake()] if self.at_stake is not None else []
        parts += [*found[:2], *([f"{len(found) - 2} more requests"] if len(found) > 2 else [])]
        return ", ".join(part for part in parts if part)


STOP = Stopping()
