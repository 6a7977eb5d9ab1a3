"""Running a snapshot's hooks in a guest that was restored, or is about to be paused. The guest is not trusted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Literal, TypeAlias

from aenv_run.errors import AenvError, CommandTimeout, HookFailed, SandboxDead
from aenv_run.guest import Command, Guest
from aenv_run.hooks import Hook, HookKind
from aenv_run.printable import printable, printable_lines
from aenv_run.sandbox_record import Record

log = logging.getLogger(__name__)

#: Why a sandbox starts; hooks are told in ``AENV_START``.
Start: TypeAlias = Literal["launch", "resume", "fork"]
#: What a machine is captured for; hooks are told in ``AENV_BEFORE``.
Before: TypeAlias = Literal["pause", "snapshot"]

#: For all hooks of one start, pause or snapshot together.
HOOKS_TIMEOUT_S = 60.0
#: How much longer a daemon may take to say that it ended a hook at the limit.
SILENCE_S = 10.0
LAST_LINES = 10
LAST_BYTES = 4096
FIX = (
    "to look at the guest, start or resume it without hooks (`--no-hooks`, or hooks=False in Python); "
    "then mend the hook or what it calls, and make the snapshot anew"
)


PAUSE_FIX = (
    "mend the hook or what it calls; to pause it or take the snapshot all the same, do so without hooks "
    "(`--no-hooks`, or hooks=False in Python)"
)


async def run_hooks(record: Record, guest: Guest, start: Start) -> None:
    """All that the record has for this start, in order; ``HookFailed`` at the first that does not exit with 0.

    ``SandboxDead`` when the machine or its daemon goes away meanwhile.
    """
    if record.hooks is not None:
        work = _Work(record, guest, {"AENV_START": start}, "a start", FIX, HOOKS_TIMEOUT_S)
        await work.run(record.hooks.to_run(forked=start == "fork"))


async def run_before(record: Record, guest: Guest, before: Before, limit_s: float | None) -> None:
    """``on_pause`` of a machine that is about to be captured; errors as ``run_hooks``, and nothing has changed.

    With ``limit_s`` its time is over and nobody is there to mend a hook: they have that long, and one that fails
    is only noted.
    """
    if record.hooks is None or not record.hooks.on_pause:
        return
    timeout_s = HOOKS_TIMEOUT_S if limit_s is None else min(limit_s, HOOKS_TIMEOUT_S)
    work = _Work(record, guest, {"AENV_BEFORE": before}, f"a {before}", PAUSE_FIX, timeout_s)
    try:
        await work.run([("on_pause", hook) for hook in record.hooks.on_pause])
    except HookFailed as error:
        if limit_s is None:
            raise
        log.warning("pausing at the end of its time all the same: %s", error.message)


class _Work:
    """The hooks of one event, which have ``timeout_s`` together."""

    def __init__(
        self, record: Record, guest: Guest, told: dict[str, str], event: str, fix: str, timeout_s: float
    ) -> None:
        self._record = record
        self._guest = guest
        self._told = told
        self._event = event
        self._fix = fix
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s

    async def run(self, hooks: Sequence[tuple[HookKind, Hook]]) -> None:
        """One after another."""
        for kind, hook in hooks:
            await self._one(kind, hook)

    async def _one(self, kind: HookKind, hook: Hook) -> None:
        last = bytearray()

        def keep(data: bytes) -> None:
            last.extend(data[-LAST_BYTES:])
            del last[:-LAST_BYTES]

        def failed(how: str) -> HookFailed:
            return _failed(f"the hook {kind} of sandbox {self._record.id}", how, hook, last, self._fix)

        timeout_s = max(0.1, self._deadline_s - time.monotonic())
        command = Command(hook.command, env={"AENV_HOOK": kind, **self._told}, user=hook.user)
        try:
            async with asyncio.timeout(timeout_s + SILENCE_S):
                result = await self._guest.run(command, timeout_s=timeout_s, on_stdout=keep, on_stderr=keep)
        except SandboxDead:
            raise
        except (CommandTimeout, TimeoutError) as error:
            limit = f"which is the limit for all hooks of {self._event}"
            raise failed(f"did not end within {self._timeout_s:g} s, {limit}") from error
        except AenvError as error:
            raise failed(f"could not be run: {error.message}") from error
        if result.exit_code != 0:
            signal = f"was ended by a signal ({result.signal})"
            raise failed(signal if result.signal else f"exited with {result.exit_code}")


def _failed(subject: str, how: str, hook: Hook, last: bytearray, fix: str) -> HookFailed:
    lines = printable_lines(last.decode(errors="replace")).strip().splitlines()[-LAST_LINES:]
    shown = "its last output:" + "".join(f"\n  | {line}" for line in lines) if lines else "it wrote nothing"
    words = printable(" ".join(hook.words.splitlines()))[:200]
    return HookFailed(f"{subject} {printable(how)}: {words}; {shown}", fix=fix)
