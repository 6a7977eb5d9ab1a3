"""Signals of a command: the first stops it in an orderly way, within seconds; the second ends it at once.

It imports nothing slow: every command begins with it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TypeVar

from aenv_run.errors import Interrupted
from aenv_run.printable import printable
from aenv_run.stopping import STOP

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

#: So long after the first signal the process ends, whatever hangs. Ending machines takes a second or two of it.
WORST_S = 10.0
#: A request that takes longer is told of.
WAIT_S = 3.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Heeding:
    """Receives the signals of one command."""

    def __init__(self, worst_s: float = WORST_S) -> None:
        self.number = 0
        self._worst_s = worst_s
        self._cancel: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[object]]] = []
        self._worst: threading.Timer | None = None

    @property
    def exit_code(self) -> int:
        """As shells give it; 0 as long as no signal came."""
        return 128 + self.number if self.number else 0

    def run(self, work: Coroutine[object, object, T]) -> T:
        """On an event loop, where a signal cancels it and it may clean up: then ``Interrupted``."""
        import asyncio

        from aenv_run.threads import LoopThreads

        async def whole() -> T:
            task = asyncio.current_task()
            assert task is not None
            self._cancel.append((asyncio.get_running_loop(), task))
            try:
                if self.number:
                    raise asyncio.CancelledError
                return await work
            finally:
                self._cancel.pop()
                work.close()

        with asyncio.Runner() as runner:
            runner.get_loop().set_default_executor(LoopThreads(thread_name_prefix="aenv"))
            try:
                return runner.run(whole())
            except asyncio.CancelledError:
                raise Interrupted("interrupted") from None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The handler. Where no event loop runs it raises, as Python's own does."""
        if self.number:
            self.end_at_once()
        self.number = number
        STOP.ask()
        _say()
        self._worst = threading.Timer(self._worst_s, self.end_at_once)
        self._worst.daemon = True
        self._worst.start()
        if not self._cancel:
            raise KeyboardInterrupt
        from aenv_run.threads import lose_patience

        loop, task = self._cancel[-1]
        loop.call_soon_threadsafe(lose_patience)
        loop.call_soon_threadsafe(task.cancel)

    def end_at_once(self) -> NoReturn:
        """End the programs and machines that were started, then this process. What was committed stays."""
        for act in STOP.before_end:
            act()
        os._exit(self.exit_code)

    def close(self) -> None:
        """The command has ended by itself."""
        if self._worst is not None:
            self._worst.cancel()


#: Of the command that runs.
_current = Heeding()


def run_async(work: Coroutine[object, object, T]) -> T:
    """Run to the end; Ctrl-C, SIGTERM and SIGHUP cancel it and let it clean up: ``Interrupted``."""
    return _current.run(work)


@contextmanager
def heeding_signals(worst_s: float = WORST_S) -> Iterator[Heeding]:
    """For one command, of the main thread. A signal that is ignored, as nohup(1) has it, stays so."""
    global _current
    before, heeding = _current, Heeding(worst_s)
    _current = heeding
    STOP.forget()
    replaced = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                replaced[number] = signal.signal(number, heeding.receive)
    try:
        yield heeding
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)
        heeding.close()
        _current = before


@contextmanager
def telling_of_waits(after_s: float = WAIT_S) -> Iterator[None]:
    """One line on stderr when one request to a store has been under way for so long: who waits, knows for what."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(after_s / 6):
            if STOP.asked.is_set():
                return
            if what := printable(STOP.waits_for(after_s)):
                with suppress(OSError):
                    os.write(2, f"waiting for the store: {what}\n".encode())
                return

    thread = threading.Thread(target=watch, name="waits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def leave(code: int) -> NoReturn:
    """End the process with that code. After a stop at once: Python would wait for threads that hang."""
    if not STOP.asked.is_set():
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    for act in STOP.before_end:
        act()
    os._exit(code)


def _say() -> None:
    """What is lost, if that is known; past all buffers, since the main thread may be in the middle of a print."""
    if lost := printable(STOP.given_up()):
        with suppress(OSError):
            os.write(2, f"stopping: giving up {lost} (a second signal ends it at once)\n".encode())
