"""Threads that take turns at the operations of a store, in an order that the test decides."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aenv_run.garbage.state import Timing
from aenv_run.store.memory import MemoryStore
from aenv_run.store.protocol import KeyInfo, StoreKey

#: Who goes next, of those who want to; the names are in order.
Choose = Callable[[list[str]], str]


class Turns:
    """One thread runs at a time, from one operation to its next. ``taken`` is who had each turn."""

    def __init__(self, choose: Choose, *, ttl_s: float = 1e9, deletes_wait: bool = True) -> None:
        self.taken: list[str] = []
        self.errors: dict[str, Exception] = {}
        self.deletes_wait = deletes_wait
        self._choose = choose
        self._ready: dict[str, threading.Semaphore] = {}
        self._asleep: set[str] = set()
        self._idle = threading.Semaphore(0)
        self._names: dict[int, str] = {}
        self._time_s = 0.0
        self.timing = Timing(
            ttl_s=ttl_s, patience_s=1e9, batch_s=1e9, settle_s=0, clock_s=self._clock, sleep=self._sleep
        )

    def _clock(self) -> float:
        self._time_s += 0.001
        return self._time_s

    def run(self, works: dict[str, Callable[[], object]]) -> None:
        """All to their ends."""
        threads = {name: threading.Thread(target=self._body, args=(name, work)) for name, work in works.items()}
        living = set(works)
        self._ready = {name: threading.Semaphore(0) for name in works}
        self._done: set[str] = set()
        for thread in threads.values():
            thread.start()
        for _ in threads:
            self._idle.acquire()  # each waits for its first turn
        while living:
            awake = sorted(living - self._asleep) or sorted(living)
            name = self._choose(awake)
            self._asleep -= {name} if name in self._asleep else set()
            if not living - self._asleep:
                self._asleep.clear()
            self.taken.append(name)
            assert len(self.taken) < 100_000, "nobody gets on"
            self._ready[name].release()
            self._idle.acquire()
            self._asleep -= {other for other in self._asleep if other != name}
            living -= self._done
        for thread in threads.values():
            thread.join()

    def step(self) -> None:
        """Wait for the next turn; nothing in a thread of no work."""
        name = self._names.get(threading.get_ident())
        if name is not None:
            self._idle.release()
            self._ready[name].acquire()

    def _sleep(self, seconds: float) -> None:
        """Somebody else first."""
        name = self._names.get(threading.get_ident())
        if name is not None:
            self._asleep.add(name)
            self.step()

    def _body(self, name: str, work: Callable[[], object]) -> None:
        self._names[threading.get_ident()] = name
        self.step()
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.errors[name] = error
        finally:
            self._done.add(name)
            self._idle.release()


class TurnStore(MemoryStore):
    """Every operation is a turn."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: Turns | None = None

    def delete(self, key: StoreKey) -> None:
        """See ``Store``."""
        if self.turns is not None and not self.turns.deletes_wait:
            turns, self.turns = self.turns, None
            try:
                super().delete(key)
            finally:
                self.turns = turns
            return
        super().delete(key)

    def list(self, prefix: str) -> Iterator[KeyInfo]:
        """See ``Store``."""
        return super().list(prefix)

    @contextmanager
    def _operation(self, writes: StoreKey | None = None) -> Iterator[None]:
        if self.turns is not None:
            self.turns.step()
        with super()._operation(writes):
            yield
