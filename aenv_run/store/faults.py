"""What a store under test does at its n-th operation: fail, or stop as if the process had been killed there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from aenv_run.errors import AenvError


class Crash(BaseException):
    """The process was killed here. A ``BaseException``, so that no handler of errors goes on as if not."""


@dataclass(frozen=True)
class Fault:
    """What happens at the ``at``-th operation (from 1) after it was armed.

    ``before`` it did anything, ``half`` way (bytes in a temporary, no object; the same as ``before`` for an
    operation that writes nothing) or ``after`` it was done but before the caller heard of it. ``error`` None
    is a crash: every later operation is a crash too, until ``restart``. An error is raised once.
    """

    at: int
    when: Literal["before", "half", "after"] = "before"
    error: AenvError | None = None


class Faults:
    """Counts the operations of a store and lets one fault happen. A store goes through ``operation`` each time."""

    def __init__(self) -> None:
        self.operations = 0
        self.lock = threading.RLock()
        self._fault: Fault | None = None
        self._armed_at = 0
        self._dead = False

    def arm(self, fault: Fault) -> None:
        """Let ``fault`` happen."""
        with self.lock:
            self._fault, self._armed_at = fault, self.operations

    def restart(self) -> None:
        """The process comes back after a crash: what was stored is there, faults are gone."""
        with self.lock:
            self._fault, self._dead = None, False

    @contextmanager
    def operation(self, half: Callable[[], None] | None = None) -> Iterator[None]:
        """Around one operation; ``half`` does half of it."""
        with self.lock:
            fault = self._begun()
        if fault and fault.when == "half" and half:
            half()
        if fault and fault.when != "after":
            raise self._strike(fault)
        try:
            yield
        finally:  # also an operation that found nothing
            if fault:
                raise self._strike(fault)

    def _begun(self) -> Fault | None:
        if self._dead:
            raise Crash("the process is dead")
        self.operations += 1
        due = self._fault is not None and self.operations - self._armed_at == self._fault.at
        return self._fault if due else None

    def _strike(self, fault: Fault) -> BaseException:
        with self.lock:
            self._fault = None
            self._dead = fault.error is None
        return fault.error or Crash(f"killed {fault.when} operation {fault.at}")
