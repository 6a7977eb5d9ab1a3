"""The command ``aenv``: its way in. It imports nothing slow, so that an interrupt is understood from the start."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """While modules are imported nothing has been started: Ctrl-C then ends the process, with one line.

    As an exception it would come out of the middle of any import, which may take it for a missing module.
    """
    before = signal.getsignal(signal.SIGINT)
    if before in (signal.SIG_IGN, None) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _leave:
            signal.signal(signal.SIGINT, before)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"error: interrupted\n")
    os._exit(130)  # Interrupted.exit_code; nothing is imported here


def main(argv: list[str] | None = None) -> None:
    """Entry point: run and exit with the code of the command or of the error."""
    with leaving_at_once():
        from aenv_run.cli.command import run
        from aenv_run.cli.signals import leave
    leave(run(argv))
