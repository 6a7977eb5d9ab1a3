"""``leases/gc``: whether somebody deletes now. What writers and collectors both know of it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, ValidationError

from aenv_run.digest import canonical_json
from aenv_run.errors import InvalidInput, NotFound, StoreUnavailable
from aenv_run.garbage.owner import Owner
from aenv_run.store import Store, StoreKey
from aenv_run.text import Line
from aenv_run.types import Model

STATE_KEY = StoreKey("leases/gc")
MAX_STATE_BYTES = 64 << 10
Work = Literal["gc", "repair", "pack", "undo"]


def boot_clock_s() -> float:
    """Seconds that go on while the machine sleeps and that nobody sets."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class Timing:
    """``ttl_s``: a state that did not change for that long, by the observer's own clock, is that of a dead one.

    A collector deletes only within ``ttl_s`` / 2 of its last sign of life. ``patience_s``: how long a writer waits
    for the end of a batch. ``settle_s``: from taking the lock to looking at what there is.
    """

    ttl_s: float = 60.0
    patience_s: float = 600.0
    batch_s: float = 5.0
    settle_s: float = 1.0
    poll_s: float = 0.2
    clock_s: Callable[[], float] = boot_clock_s
    sleep: Callable[[float], None] = time.sleep


class GcState(Model):
    """Content of ``leases/gc``. ``owner``: who deletes now, None between batches; ``token``: new each time."""

    format: Literal["aenv.gc/1"] = "aenv.gc/1"
    token: Line = Field(max_length=64)
    owner: Owner | None = None
    work: Work = "gc"


def new_state(owner: Owner | None, work: Work = "gc") -> bytes:
    """Never twice the same bytes."""
    return canonical_json(GcState(token=secrets.token_hex(16), owner=owner, work=work))


class Gate:
    """Lets writers by while nobody deletes. One per repository and process; blocking and thread-safe."""

    def __init__(self, store: Store, timing: Timing | None = None) -> None:
        self.store = store
        self.timing = timing or Timing()

    def read(self) -> bytes | None:
        """The state as it is now."""
        try:
            return self.store.read(STATE_KEY, limit_bytes=MAX_STATE_BYTES)
        except NotFound:
            return None

    def watch(self) -> Watch:
        """From now on."""
        return Watch(self)

    def wait_until_free(self, *, heal: bool = True) -> bytes | None:
        """The state, once nobody deletes. A collector that shows no life any more loses its lock with ``heal``.

        ``StoreUnavailable`` when it takes longer than a writer waits; everything is as it was then.
        """
        begun_s = self.timing.clock_s()
        last: bytes | None = None
        since_s = begun_s
        while True:
            data = self.read()
            held_by = owner_of(data)
            if data is None or held_by is None or (held_by is UNREADABLE and not heal):
                return data
            now_s = self.timing.clock_s()
            if data != last:
                last, since_s = data, now_s
            if self.is_over(held_by, now_s - since_s):
                if not heal:
                    return data
                self.store.swap(STATE_KEY, new_state(None), expected=data)
                continue
            if now_s - begun_s > self.timing.patience_s:
                raise StoreUnavailable(
                    f"{held_by} has been deleting from this repository for {now_s - begun_s:.0f} s",
                    fix="try again when its `aenv gc` or `aenv check --repair` has ended; end it if it is stopped",
                )
            self.timing.sleep(self.timing.poll_s)

    def is_over(self, owner: Owner, unchanged_s: float) -> bool:
        """Whether a collector whose state has not changed for that long will delete no more."""
        if unchanged_s >= self.timing.ttl_s:
            # One that is stopped on this machine may go on any time, and we know that it is there.
            return not (owner.is_here and not owner.is_dead and owner != Owner.this())
        # What a dead process had sent over a wire may still arrive; a file system of this machine is done with it.
        return owner.is_dead and self.store.local_path(STATE_KEY) is not None


class Watch:
    """Has anything been deleted since?"""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._seen = gate.read()

    def quiet(self) -> bool:
        """No: whatever was there when this watch began, or was last let by, is still there."""
        return owner_of(self._seen) is None and self._gate.read() == self._seen

    def wait(self) -> None:
        """Until nobody deletes, and go on watching from there."""
        self._seen = self._gate.wait_until_free()


UNREADABLE = Owner(host="unknown", pid=0, start_ticks=0, place="unknown")


def owner_of(data: bytes | None) -> Owner | None:
    """Who deletes in that state; one that cannot be read counts as held, until it has not changed for long."""
    if data is None:
        return None
    try:
        return GcState.model_validate_json(data).owner
    except (ValidationError, InvalidInput):
        return UNREADABLE
