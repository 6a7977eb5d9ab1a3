"""One repository's store as the reads of a server meet it: so many at a time, and known to be dead when it is.

An outage is the store's, not a read's. It begins with the first question after the last answer, and all who ask
share its patience. When that is over, all who wait have their error at that moment, and whoever asks later has it
at once: nobody waits for a store that is known to be dead. Probes, one after the other, find out when it is back.
Each store has slots and threads of its own, so that a dead one holds up nobody who reads from another.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from aenv_run.errors import AenvError, StoreUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Reads of one store at a time. Over a link that is short of them one stream does not fill it.
AT_ONCE = 8
#: How long a store may fail before a read becomes an I/O error in the guest.
PATIENCE_S, LEAST_PATIENCE_S = 30.0, 0.1
#: Between probes of a dead store: at first, and at most.
FIRST_PROBE_S, LONGEST_PROBE_S = 0.5, 4.0
#: The next probe does not wait longer for one that hangs; of those there are at most so many.
PROBE_LIMIT_S, MAX_HANGING_PROBES = 5.0, 4


class Supplier:
    """Called by one thread, the event loop's. What it is given to call runs in threads of its own."""

    def __init__(self, name: str, patience_s: float = PATIENCE_S) -> None:
        self.name = name
        self.patience_s = max(patience_s, LEAST_PATIENCE_S)
        #: Why it counts as dead; None: it does not.
        self.dead: AenvError | None = None
        #: Called when it is back.
        self.recovered: Callable[[], None] = lambda: None
        self.probes = 0
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0
        self._failure: AenvError | None = None
        self._outage: asyncio.TimerHandle | None = None
        self._death: asyncio.Future[None] | None = None
        self._probing: asyncio.Task[None] | None = None
        self._last: Callable[[], object] | None = None

    @property
    def is_failing(self) -> bool:
        """Whether its last answer was none."""
        return self.dead is not None or self._failure is not None

    @property
    def dies_at_s(self) -> float | None:
        """When it counts as dead, by the loop's clock, if nothing is heard of it; None: nobody waits for it."""
        return None if self._outage is None else self._outage.when()

    async def ask(self, call: Callable[[], T], limit_s: float | None = None) -> T:
        """What the blocking ``call`` gives, by one try. ``StoreUnavailable`` at the latest when it counts as dead.

        A thread that hangs in a store is left alone; nobody waits for it.
        """
        if self.dead is not None:
            raise self._again(self.dead)
        if self._death is None:
            self._death = asyncio.get_running_loop().create_future()
        self._waiting += 1
        self._last = call
        self._watch()
        task = asyncio.ensure_future(self._in_slot(call))
        try:
            limit_s = 2 * self.patience_s if limit_s is None else limit_s
            either: set[asyncio.Future[T] | asyncio.Future[None]] = {task, self._death}
            await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return self._heard(task)
            if self.dead is not None:
                raise self._again(self.dead)
            raise self._failed(self._silent(limit_s))
        finally:
            self._waiting -= 1
            if not task.done():
                task.cancel()

    async def rest(self, pause_s: float) -> None:
        """Wait before the next try; not longer than it takes until the store counts as dead."""
        if self._death is None:
            await asyncio.sleep(pause_s)
        else:
            await asyncio.wait({self._death}, timeout=pause_s)

    def close(self) -> None:
        """Probe no more."""
        if self._outage is not None:
            self._outage.cancel()
        if self._probing is not None:
            self._probing.cancel()

    # -- tries ---------------------------------------------------------------------------------------------

    async def _in_slot(self, call: Callable[[], T]) -> T:
        async with self._slots:
            return await in_own_thread(call)

    def _heard(self, task: asyncio.Future[T]) -> T:
        try:
            value = task.result()
        except AenvError as error:
            if error.retryable:
                raise self._failed(error) from None
            self._answered()
            raise
        except OSError as error:
            raise self._failed(_unreadable(error)) from error
        self._answered()
        return value

    def _answered(self) -> None:
        """It lives: an outage would begin now."""
        if self._failure is not None:
            log.info("%s answers again", self.name)
        self._failure = None
        if self._outage is not None:
            self._outage.cancel()
            self._outage = None
        if self._waiting > 1:  # the one that was answered still counts
            self._watch()

    def _failed(self, error: AenvError) -> AenvError:
        if self._failure is None:
            log.warning("%s fails: %s", self.name, error.message)
        self._failure = error
        self._watch()
        return error

    # -- an outage -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._outage is None and self.dead is None:
            self._outage = asyncio.get_running_loop().call_later(self.patience_s, self._over)

    def _over(self) -> None:
        self._outage = None
        if not self._waiting and self._failure is None:
            return
        self.dead = self._failure or self._silent(self.patience_s)
        log.error("%s counts as dead, since it failed for %g s: %s", self.name, self.patience_s, self.dead.message)
        if self._death is not None:
            self._death.set_result(None)
            self._death = None
        if self._last is not None:
            self._probing = asyncio.create_task(self._probe(self._last))

    async def _probe(self, call: Callable[[], object]) -> None:
        """What was asked for last, until there is an answer to it."""
        pause_s = FIRST_PROBE_S
        out: set[asyncio.Future[object]] = set()
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PROBE_S)
            if len(out) < MAX_HANGING_PROBES:
                self.probes += 1
                out.add(in_own_thread(call))
            done, out = await asyncio.wait(out, timeout=PROBE_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
            if any(_is_answer(one) for one in done):
                break
        log.info("%s is back", self.name)
        self.dead = self._failure = None
        self.recovered()

    def _silent(self, waited_s: float) -> AenvError:
        return StoreUnavailable(
            f"the store of {self.name} did not answer in {waited_s:g} s", fix="see whether it can be reached"
        )

    def _again(self, error: AenvError) -> AenvError:
        """The same for another reader."""
        return type(error)(error.message, fix=error.fix)


def _unreadable(error: OSError) -> StoreUnavailable:
    return StoreUnavailable(f"the repository's store cannot be read: {error}", fix="try again")


def _is_answer(one: asyncio.Future[object]) -> bool:
    """Whether a store that lives gave it: what it has, or that it does not have it."""
    error = one.exception()
    return not isinstance(error, OSError) and not (isinstance(error, AenvError) and error.retryable)


def in_own_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """The call's result. Not of a pool: a thread that hangs for ever takes no place, and no exit waits for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())

    def give(value: T) -> None:
        if not future.done():
            future.set_result(value)

    def fail(error: BaseException) -> None:
        if not future.done():
            future.set_exception(error)

    def run() -> None:
        try:
            value = call()
        except BaseException as error:  # noqa: BLE001 - it is raised where it is awaited
            with suppress(RuntimeError):  # the loop is gone
                loop.call_soon_threadsafe(fail, error)
        else:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(give, value)

    threading.Thread(target=run, name="fetch", daemon=True).start()
    return future
