"""Which shell a sandbox has."""

from __future__ import annotations

from contextlib import suppress

from aenv_run.errors import NotFound
from aenv_run.guest.client import Guest


async def find_shell(guest: Guest, user: str | None = None) -> tuple[str, ...]:
    """A login shell: bash where there is one."""
    for shell in ("/bin/bash", "/bin/sh"):
        with suppress(NotFound):
            await guest.stat(shell, user=user)
            return (shell, "-l")
    raise NotFound("the sandbox has no shell (/bin/bash or /bin/sh)", fix="`aenv exec ID -- PROGRAM` needs none")
