"""exec and connect."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from contextlib import suppress

import click

from aenv_run.cli.arguments import open_sandbox, pairs, parse_duration, run_async, sandbox_argument
from aenv_run.cli.terminal import exit_code_of, find_shell, join_terminal
from aenv_run.errors import AenvError
from aenv_run.guest import Command, Ended, Guest, Process

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

    An error of aenv itself starts with "error:"; a sandbox that died is exit code 72, a time-out 124.
    """
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

    return run_async(work())


@click.command(epilog="\b\nExample:\n  aenv connect s4f        (leave with exit or Ctrl-D)")
@sandbox_argument
@user_option
@cwd_option
@env_option
def connect(sandbox_id: str, user: str | None, cwd: str | None, env: tuple[str, ...]) -> int:
    """Open a shell (bash, else sh) on a terminal in a sandbox."""
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

    return run_async(work())


async def _stream(guest: Guest, command: Command, limit_s: float | None) -> int:
    """Its output as it comes, our input if asked for; Ctrl-C kills it."""
    sinks = {"stdout": sys.stdout.buffer, "pty": sys.stdout.buffer, "stderr": sys.stderr.buffer}
    async with guest.start(command, timeout_s=limit_s) as process:
        feeder = asyncio.create_task(_feed(process)) if command.stdin else None
        try:
            async for event in process.events():
                if isinstance(event, Ended):
                    return exit_code_of(event.exit_code, event.signal)
                sinks[event.stream].write(event.data)
                sinks[event.stream].flush()
        except (asyncio.CancelledError, BrokenPipeError):
            with suppress(AenvError):
                await asyncio.shield(process.signal("SIGKILL"))
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

    def read() -> None:
        with suppress(RuntimeError, OSError):  # the loop may end before our input does
            while True:
                data = os.read(sys.stdin.fileno(), 32768)
                asyncio.run_coroutine_threadsafe(chunks.put(data), loop).result()
                if not data:
                    return

    threading.Thread(target=read, daemon=True).start()
    with suppress(AenvError):  # it ended before it read all
        while data := await chunks.get():
            await process.send_input(data)
        await process.close_stdin()
