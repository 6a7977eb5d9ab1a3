"""exec and connect."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress

import click

from aenv_run.cli.arguments import open_sandbox, pairs, parse_duration, sandbox_argument
from aenv_run.cli.signals import run_async
from aenv_run.cli.terminal import exit_code_of, join_terminal, kill_quietly, write_all
from aenv_run.errors import AenvError
from aenv_run.guest import Command, Ended, Guest, Process
from aenv_run.guest.shell import find_shell

#: Of standard input at a time.
INPUT_CHUNK_BYTES = 256 << 10
#: After this time without a sign of the daemon people are told what they wait for.
SILENCE_S = 5.0

user_option = click.option("-u", "--user", help="Who runs it (default: the snapshot's user).")
cwd_option = click.option("-w", "--cwd", help="Where it runs (default: the snapshot's directory).")
env_option = click.option("-e", "--env", multiple=True, metavar="NAME=VALUE", help="Set for it.")


@click.command(
    "exec",
    epilog="\b\nExamples:\n  aenv exec s4f -- ls -l /srv\n  aenv exec s4f -i -- sh -c 'cat > /tmp/x' < x\n"
    "  aenv exec s4f -t -- python3",
)
@sandbox_argument
@click.argument("cmd", nargs=-1, required=True, metavar="-- CMD...", type=click.UNPROCESSED)
@click.option("-i", "--stdin", "with_stdin", is_flag=True, help="Pass standard input on.")
@click.option("-t", "--tty", is_flag=True, help="Give it a terminal.")
@user_option
@cwd_option
@env_option
@click.option("--timeout", metavar="TIME", help="Kill it after this time (300, 90s, 5m); default: no limit.")
def execute(
    sandbox_id: str,
    cmd: tuple[str, ...],
    with_stdin: bool,
    tty: bool,
    user: str | None,
    cwd: str | None,
    env: tuple[str, ...],
    timeout: str | None,
) -> int:
    """Run CMD in a sandbox, without a shell, and exit with its exit code.

    An error of aenv itself starts with "error:"; a sandbox that died is exit code 72, a time-out 124. A command
    that is not found is 127, one that cannot be executed (or its directory not entered) 126.
    """
    _claim_standard_descriptors()
    settings = pairs(env, "--env")
    limit_s = parse_duration(timeout) if timeout else None
    command = Command(cmd, env=settings, cwd=cwd, user=user, stdin=with_stdin)

    async def work() -> int:
        sandbox = await open_sandbox(sandbox_id)
        try:
            if tty:
                return await sandbox.call(lambda g: join_terminal(g, cmd, user=user, cwd=cwd, env=settings))
            return await sandbox.call(lambda guest: _stream(guest, command, limit_s))
        finally:
            await sandbox.close()

    return _run(work())


@click.command(epilog="\b\nExample:\n  aenv connect s4f        (leave with exit or Ctrl-D)")
@sandbox_argument
@user_option
@cwd_option
@env_option
def connect(sandbox_id: str, user: str | None, cwd: str | None, env: tuple[str, ...]) -> int:
    """Open a shell (bash, else sh) on a terminal in a sandbox."""
    _claim_standard_descriptors()
    settings = pairs(env, "--env")

    async def join(guest: Guest) -> int:
        shell = await find_shell(guest, user)
        return await join_terminal(guest, shell, user=user, cwd=cwd, env=settings)

    async def work() -> int:
        sandbox = await open_sandbox(sandbox_id)
        try:
            return await sandbox.call(join)
        finally:
            await sandbox.close()

    return _run(work())


def _claim_standard_descriptors() -> None:
    """One that is closed becomes /dev/null: else the next socket would take its number and what is printed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
    # Python has none for a descriptor that was closed when it started.
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _run(work: Coroutine[object, object, int]) -> int:
    """Do it; when the reader of its output is gone, the code is that of SIGPIPE."""
    try:
        return run_async(work)
    except BrokenPipeError:
        return 128 + signal.SIGPIPE


async def _stream(guest: Guest, command: Command, limit_s: float | None) -> int:
    """Its output as it comes, our input if asked for; Ctrl-C kills it with all that it started."""
    patience = asyncio.get_running_loop().call_later(SILENCE_S, _say_that_it_is_silent)
    try:
        async with guest.start(command, timeout_s=limit_s) as process:
            patience.cancel()
            return await _follow(process, with_input=command.stdin)
    finally:
        patience.cancel()


def _say_that_it_is_silent() -> None:
    click.echo("aenv: the sandbox's daemon does not answer yet; waiting (Ctrl-C gives up)", err=True)


async def _follow(process: Process, *, with_input: bool) -> int:
    descriptors = {"stdout": 1, "pty": 1, "stderr": 2}
    feeder = asyncio.create_task(_feed(process)) if with_input else None
    try:
        async for event in process.events():
            if isinstance(event, Ended):
                return exit_code_of(event.exit_code, event.signal)
            write_all(descriptors[event.stream], event.data)
    except (asyncio.CancelledError, BrokenPipeError):
        await kill_quietly(process)
        raise
    finally:
        if feeder is not None:
            feeder.cancel()
            await asyncio.gather(feeder, return_exceptions=True)
    return 255


async def _feed(process: Process) -> None:
    """Standard input to the process. A thread reads it: it may be a file, which an event loop cannot wait for."""
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes] = asyncio.Queue(maxsize=4)

    def put(data: bytes) -> None:
        asyncio.run_coroutine_threadsafe(chunks.put(data), loop).result()

    def read() -> None:
        with suppress(RuntimeError):  # the loop may end before our input does
            try:
                while data := os.read(0, INPUT_CHUNK_BYTES):
                    put(data)
            except OSError as error:
                click.echo(f"aenv: standard input cannot be read: {error.strerror}", err=True)
            put(b"")

    async def whole() -> AsyncIterator[bytes]:
        while data := await chunks.get():
            yield data

    threading.Thread(target=read, daemon=True).start()
    with suppress(AenvError):  # it ended before it read all
        await process.feed(whole())
