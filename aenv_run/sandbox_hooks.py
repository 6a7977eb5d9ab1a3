"""Running a snapshot's hooks in a guest that was restored and has its new identity. The guest is not trusted."""

from __future__ import annotations

import asyncio
import time
from typing import Literal, TypeAlias

from aenv_run.errors import AenvError, CommandTimeout, HookFailed, SandboxDead
from aenv_run.guest import Command, Guest
from aenv_run.hooks import Hook, HookKind
from aenv_run.printable import printable, printable_lines
from aenv_run.sandbox_record import Record

#: Why a sandbox starts; hooks are told in ``AENV_START``.
Start: TypeAlias = Literal["launch", "resume", "fork"]

#: For all hooks of one start together.
HOOKS_TIMEOUT_S = 60.0
#: How much longer a daemon may take to say that it ended a hook at the limit.
SILENCE_S = 10.0
LAST_LINES = 10
LAST_BYTES = 4096
FIX = (
    "to look at the guest, start or resume it without hooks (`--no-hooks`, or hooks=False in Python); "
    "then mend the hook or what it calls, and make the snapshot anew"
)


async def run_hooks(record: Record, guest: Guest, start: Start) -> None:
    """All that the record has for this start, in order; ``HookFailed`` at the first that does not exit with 0.

    ``SandboxDead`` when the machine or its daemon goes away meanwhile.
    """
    if record.hooks is None:
        return
    deadline_s = time.monotonic() + HOOKS_TIMEOUT_S
    for kind, hook in record.hooks.to_run(forked=start == "fork"):
        await _run_one(record, guest, kind, hook, start, deadline_s)


async def _run_one(
    record: Record, guest: Guest, kind: HookKind, hook: Hook, start: Start, deadline_s: float
) -> None:
    subject = f"the hook {kind} of sandbox {record.id}"
    told: dict[str, str] = {"AENV_HOOK": kind, "AENV_START": start}
    last = bytearray()

    def keep(data: bytes) -> None:
        last.extend(data[-LAST_BYTES:])
        del last[:-LAST_BYTES]

    timeout_s = max(0.1, deadline_s - time.monotonic())
    command = Command(hook.command, env=told, user=hook.user)
    try:
        async with asyncio.timeout(timeout_s + SILENCE_S):
            result = await guest.run(command, timeout_s=timeout_s, on_stdout=keep, on_stderr=keep)
    except SandboxDead:
        raise
    except (CommandTimeout, TimeoutError) as error:
        limit = f"did not end within {HOOKS_TIMEOUT_S:g} s, which is the limit for all hooks of a start"
        raise _failed(subject, limit, hook, last) from error
    except AenvError as error:
        raise _failed(subject, f"could not be run: {error.message}", hook, last) from error
    if result.exit_code != 0:
        how = f"was ended by a signal ({result.signal})" if result.signal else f"exited with {result.exit_code}"
        raise _failed(subject, how, hook, last)


def _failed(subject: str, how: str, hook: Hook, last: bytearray) -> HookFailed:
    lines = printable_lines(last.decode(errors="replace")).strip().splitlines()[-LAST_LINES:]
    shown = "its last output:" + "".join(f"\n  | {line}" for line in lines) if lines else "it wrote nothing"
    words = printable(" ".join(hook.words.splitlines()))[:200]
    return HookFailed(f"{subject} {printable(how)}: {words}; {shown}", fix=FIX)
