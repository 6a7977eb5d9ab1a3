"""A terminal of this host joined to one in a sandbox."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from aenv_run.errors import AenvError, InvalidInput
from aenv_run.guest import Command, Ended, Guest, Process, PtySize

#: How long a command may take to be killed when we are interrupted.
KILL_LIMIT_S = 5.0
#: Exit codes as shells give them: 128 and the number of the signal.
_SIGNALS = {"killed": 9, "terminated": 15, "hangup": 1, "interrupt": 2, "aborted": 6, "segmentation fault": 11}


def exit_code_of(exit_code: int, signal_text: str | None) -> int:
    """What a shell would say for it."""
    if signal_text is None:
        return exit_code if exit_code >= 0 else 255
    return 128 + _SIGNALS.get(signal_text, 0)


async def kill_quietly(process: Process) -> None:
    """With all that it started, also while our own task is cancelled; a daemon that does not answer is left."""
    with suppress(AenvError, TimeoutError):
        await asyncio.shield(asyncio.wait_for(process.kill(), KILL_LIMIT_S))


@contextmanager
def raw_mode(descriptor: int) -> Iterator[None]:
    """Every key goes to the sandbox; the terminal is as before afterwards, whatever happens."""
    saved = termios.tcgetattr(descriptor)
    try:
        tty.setraw(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, saved)


def terminal_size(descriptor: int) -> PtySize:
    """Of this terminal, or 80x24 where it does not say."""
    with suppress(OSError):
        found = os.get_terminal_size(descriptor)
        if found.columns and found.lines:
            return PtySize(found.columns, found.lines)
    return PtySize(80, 24)


async def join_terminal(
    guest: Guest, argv: tuple[str, ...], *, user: str | None, cwd: str | None, env: dict[str, str]
) -> int:
    """Run ``argv`` on a terminal in the guest, joined to ours, until it ends; its exit code."""
    descriptor = sys.stdin.fileno()
    if not os.isatty(descriptor):
        raise InvalidInput(
            "standard input is no terminal", fix="use `aenv exec -i ID -- CMD` in pipes and scripts"
        )
    terminal = {"TERM": os.environ.get("TERM", "xterm")}
    command = Command(argv, env={**terminal, **env}, cwd=cwd, user=user, pty=terminal_size(descriptor))
    async with guest.start(command) as process:
        try:
            with raw_mode(descriptor):
                return await _pump(process, descriptor)
        except (asyncio.CancelledError, OSError):  # our terminal hung up: so does that one
            await kill_quietly(process)
            raise


async def _pump(process: Process, descriptor: int) -> int:
    loop = asyncio.get_running_loop()
    keys: asyncio.Queue[bytes] = asyncio.Queue()
    sender = loop.create_task(_send(process, keys, descriptor))
    loop.add_reader(descriptor, _read_keys, descriptor, keys)
    loop.add_signal_handler(signal.SIGWINCH, keys.put_nowait, b"")
    try:
        async for event in process.events():
            if isinstance(event, Ended):
                return exit_code_of(event.exit_code, event.signal)
            write_all(sys.stdout.fileno(), event.data)
        return 255
    finally:
        loop.remove_reader(descriptor)
        loop.remove_signal_handler(signal.SIGWINCH)
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)


def _read_keys(descriptor: int, keys: asyncio.Queue[bytes]) -> None:
    data = os.read(descriptor, 65536)
    if data:
        keys.put_nowait(data)
    else:
        asyncio.get_running_loop().remove_reader(descriptor)


async def _send(process: Process, keys: asyncio.Queue[bytes], descriptor: int) -> None:
    """In order. An empty item is a change of size."""
    while True:
        data = await keys.get()
        with suppress(AenvError):  # it ended just now: its last event says so
            if data:
                await process.send_input(data)
            else:
                size = terminal_size(descriptor)
                await process.resize(size.cols, size.rows)


def write_all(descriptor: int, data: bytes) -> None:
    """Write it, in as many parts as it takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
