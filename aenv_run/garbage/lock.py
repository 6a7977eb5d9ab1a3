"""The collector's side of ``leases/gc``: one deletes at a time, and only while it is sure that it is the one."""

from __future__ import annotations

from collections.abc import Callable

from aenv_run.errors import Conflict
from aenv_run.garbage.owner import Owner
from aenv_run.garbage.state import STATE_KEY, Gate, Work, new_state, owner_of


class CollectorLock:
    """Taken for a batch and let go after it. Not thread-safe."""

    def __init__(self, gate: Gate, work: Work, on_wait: Callable[[str], None] = lambda who: None) -> None:
        self._gate, self._work, self._on_wait = gate, work, on_wait
        self._held: bytes | None = None
        self._alive_s = 0.0  # when the last sign of life was begun

    def acquire(self) -> None:
        """Take it; ``Conflict`` when another one works for longer than one waits."""
        gate, timing = self._gate, self._gate.timing
        begun_s = timing.clock_s()
        seen: bytes | None = None
        since_s, told = begun_s, False
        while True:
            data, now_s = gate.read(), timing.clock_s()
            other = owner_of(data)
            if data != seen:
                seen, since_s = data, now_s
            if other is None or gate.is_over(other, now_s - since_s):
                mine = new_state(Owner.this(), self._work)
                self._alive_s = timing.clock_s()
                if gate.store.swap(STATE_KEY, mine, expected=data):
                    self._held = mine
                    return
                continue
            if now_s - begun_s > timing.patience_s:
                raise Conflict(
                    f"another collector works on this repository: {other}",
                    fix="wait for it; end it if it is stopped",
                )
            if not told:
                told = True
                self._on_wait(str(other))
            timing.sleep(timing.poll_s)

    def require(self) -> None:
        """Right before each delete: give a sign of life if one is due; ``Conflict`` when it is no longer ours."""
        timing = self._gate.timing
        now_s = timing.clock_s()
        if self._held is None:
            raise Conflict("the lock of the garbage collector is not held")
        if now_s - self._alive_s < timing.ttl_s / 6:
            return
        mine = new_state(Owner.this(), self._work)
        if not self._gate.store.swap(STATE_KEY, mine, expected=self._held):
            self._held = None
            raise Conflict(
                "this collector was stopped for so long that another took its place; it deleted nothing since",
                fix="run it again",
            )
        self._held, self._alive_s = mine, now_s
        if timing.clock_s() - now_s > timing.ttl_s / 2:  # the sign of life itself took too long
            self.require()

    def release(self) -> None:
        """Let it go. No error when it was lost."""
        held, self._held = self._held, None
        if held is not None:
            self._gate.store.swap(STATE_KEY, new_state(None), expected=held)
