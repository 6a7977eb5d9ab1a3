"""When a started command counts as up."""

from __future__ import annotations

from aenv_build.plan import argv
from aenv_build.verbs import Ready
from aenv_run.errors import CommandTimeout
from aenv_run.guest import Command, Guest
from aenv_run.types import Context

READY_TIMEOUT_S = 30.0


async def is_ready(ready: Ready, guest: Guest, context: Context) -> bool:
    """Ask once."""
    if ready.command is not None:
        words = argv(ready.command, "sh")
        command = Command(words, env=context.env, cwd=context.workdir, user=context.user)
        try:
            return (await guest.run(command, timeout_s=READY_TIMEOUT_S)).exit_code == 0
        except CommandTimeout:
            return False
    tables = await guest.run(
        Command(("cat", "/proc/net/tcp", "/proc/net/tcp6"), cwd="/"), timeout_s=READY_TIMEOUT_S
    )
    return listens(tables.stdout.decode(errors="replace"), ready.port or 0)


def listens(table: str, port: int) -> bool:
    """Whether /proc/net/tcp has a listening socket (state 0A) on the port."""
    rows = (line.split() for line in table.splitlines())
    return any(len(row) > 3 and row[3] == "0A" and row[1].endswith(f":{port:04X}") for row in rows)
