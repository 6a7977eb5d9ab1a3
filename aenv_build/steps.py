"""What each verb does to a staging machine."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import posixpath
import re
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from aenv_build.events import Sink, StageOutput
from aenv_build.files import disk_limit, holds_directory, strip_top, write_tar
from aenv_build.junit import MAX_REPORT_BYTES, failed_tests
from aenv_build.plan import Stage, argv, copy_target, run_context
from aenv_build.staging import StagingMachine
from aenv_build.verbs import FromStep, Ready, Run, Verify
from aenv_run.errors import AenvError, CommandTimeout, SandboxDead, StepFailed
from aenv_run.guest import Command, Ended, Guest, Output
from aenv_run.printable import printable_lines
from aenv_run.threads import in_thread
from aenv_run.types import Context

DEFAULT_TIMEOUT_S = 3600
READY_POLL_S = 0.2
READY_TIMEOUT_S = 30.0
LAST_LINES = 20
MAX_LINE = 4000
#: From the loss of the daemon until the engine must have ended, if it ends.
END_TIMEOUT_S = 5.0


@dataclass
class Tail:
    """Splits output into lines, tells each to the sink and keeps the last ones for the error."""

    step: str
    sink: Sink
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    def __post_init__(self) -> None:
        self._pending = {"stdout": "", "stderr": ""}
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")(errors="replace") for name in self._pending}

    def feed(self, stream: str, data: bytes) -> None:
        """Bytes of stdout or stderr."""
        *lines, rest = (self._pending[stream] + self._decoders[stream].decode(data)).split("\n")
        if len(rest) > MAX_LINE:
            lines, rest = [*lines, rest], ""
        self._pending[stream] = rest
        for line in lines:
            self._line(line)

    def end(self) -> list[str]:
        """The last lines, what had no newline included."""
        for stream, rest in self._pending.items():
            if rest:
                self._line(rest)
            self._pending[stream] = ""
        return list(self.lines)

    def _line(self, line: str) -> None:
        # A guest's control characters must not reach the terminal.
        text = printable_lines(line.rstrip("\r")[:MAX_LINE])
        self.lines.append(text)
        self.sink(StageOutput(step=self.step, text=text))


async def perform(stage: Stage, staged: StagingMachine, sink: Sink, fetched: Path | None = None) -> None:
    """Do the step's work; ``StepFailed`` names it, a machine that died is ``SandboxDead``.

    ``fetched`` is the tar of another step's files, for a copy that takes them from there.
    """
    tail = Tail(stage.id, sink)
    step = stage.step
    try:
        if step.run is not None:
            timeout_s = step.run.timeout or step.timeout or DEFAULT_TIMEOUT_S
            code = await _run(staged.guest, step.run, step.run.command, stage.context, timeout_s, tail)
            if code != 0:
                raise failure(stage, f"exited with {code}", tail)
        elif step.copy_ is not None:
            await _copy(stage, staged, fetched)
        elif step.start is not None:
            await _start(stage, step.start, staged.guest, tail)
        elif step.verify is not None:
            await _verify(stage, step.verify, staged.guest, tail)
    except SandboxDead as error:
        raise await _dead(stage, staged, error) from error
    except CommandTimeout as error:
        raise failure(stage, error.message, tail) from error
    except StepFailed:
        raise
    except AenvError as error:
        raise failure(stage, error.message, tail) from error


def failure(stage: Stage, what: str, tail: Tail) -> StepFailed:
    """The error that ends the build, with the last output."""
    lines = tail.end()
    shown = "\n".join(f"  | {line}" for line in lines) if lines else "  | (no output)"
    text = "\n".join(lines).lower()
    offline = ("could not resolve", "name resolution", "network is unreachable", "name or service not known")
    fix = "steps have no network unless the recipe says 'machine: {internet: true}'" if any(
        word in text for word in offline
    ) else ""  # fmt: skip
    return StepFailed(f"step {stage.id!r} ({stage.step.verb}) {what}; its last output:\n{shown}", fix=fix)


async def _dead(stage: Stage, staged: StagingMachine, error: SandboxDead) -> SandboxDead:
    """The machine is gone: no exit code of the command exists, which is another thing than a failed command."""
    reason, text = error.message, ""
    with contextlib.suppress(AenvError, TimeoutError):
        async with asyncio.timeout(END_TIMEOUT_S):
            end = await staged.machine.wait()
        reason, text = end.reason, end.console
    if not text:
        with contextlib.suppress(AenvError):
            text = await staged.machine.console()
    console = printable_lines(text).strip().splitlines()[-LAST_LINES:]
    shown = "".join(f"\n  | {line}" for line in console)
    return SandboxDead(
        f"the machine died during step {stage.id!r}: {reason}" + (f"; its console:{shown}" if shown else ""),
        fix=advice(reason, "\n".join(console)),
    )


def advice(reason: str, console: str) -> str:
    """What may help, going by how a machine ended and what its console says last."""
    if re.search(r"out of memory|oom[-_ ]kill", f"{reason}\n{console}", re.IGNORECASE):
        return "give it more memory ('machine: {memory: …}'), then run the build again"
    if "shut down" in reason:
        return "a step must not shut its machine down or reboot it"
    return "run the build again; what is finished is kept"


async def _run(
    guest: Guest,
    command: Run | Verify,
    words: str | tuple[str, ...],
    context: Context,
    timeout_s: float,
    tail: Tail,
) -> int:
    effective = run_context(command, context)
    result = await guest.run(
        Command(argv(words, command.shell), env=effective.env, cwd=effective.workdir, user=effective.user),
        timeout_s=timeout_s,
        on_stdout=lambda data: tail.feed("stdout", data),
        on_stderr=lambda data: tail.feed("stderr", data),
    )
    tail.end()
    return result.exit_code


async def _copy(stage: Stage, staged: StagingMachine, fetched: Path | None) -> None:
    copy = stage.step.copy_
    assert copy is not None
    target = copy_target(copy.to, stage.context)
    user = copy.user or stage.context.user
    archive = staged.scratch("copy.tar")
    try:
        if isinstance(copy.from_, FromStep):
            assert fetched is not None
            source = posixpath.basename(copy.from_.path.rstrip("/"))
            is_directory = await in_thread(holds_directory, fetched)
        else:
            assert stage.files is not None
            source, is_directory = stage.files.root.name, stage.files.is_directory
        folder, name = target.rstrip("/") or "/", ""
        if not is_directory:
            folder, _, name = (target + source if target.endswith("/") else target).rpartition("/")
        if fetched is not None:
            await in_thread(strip_top, fetched, archive, disk_limit(staged.snapshot.machine), name=name)
        elif stage.files is not None:
            await in_thread(write_tar, stage.files, archive, name=name)
        await staged.guest.put_archive(folder or "/", archive, user=user)
    finally:
        archive.unlink(missing_ok=True)


async def _start(stage: Stage, command: Run, guest: Guest, tail: Tail) -> None:
    """Start it and leave it running once it is ready."""
    step = stage.step
    timeout_s = command.timeout or step.timeout or DEFAULT_TIMEOUT_S
    effective = run_context(command, stage.context)
    words = argv(command.command, command.shell)
    async with guest.start(
        Command(words, env=effective.env, cwd=effective.workdir, user=effective.user)
    ) as process:
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def read() -> None:
            async for event in process.events():
                if isinstance(event, Output):
                    tail.feed("stdout" if event.stream == "pty" else event.stream, event.data)
                elif isinstance(event, Ended):
                    ended.set_result(event.exit_code)

        reader = asyncio.create_task(read())
        try:
            await _until_ready(stage, step.ready, guest, ended, timeout_s, tail)
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)


async def _until_ready(
    stage: Stage, ready: Ready | None, guest: Guest, ended: asyncio.Future[int], timeout_s: float, tail: Tail
) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        if ended.done():
            raise failure(stage, f"ended with {ended.result()} before it was ready", tail)
        if ready is None or await _is_ready(ready, guest, stage.context):
            return
        if time.monotonic() > deadline:
            raise failure(stage, f"was not ready within {timeout_s:g} s", tail)
        await asyncio.sleep(READY_POLL_S)


async def _is_ready(ready: Ready, guest: Guest, context: Context) -> bool:
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


async def _verify(stage: Stage, verify: Verify, guest: Guest, tail: Tail) -> None:
    timeout_s = verify.timeout or stage.step.timeout or DEFAULT_TIMEOUT_S
    code = await _run(guest, verify, verify.run, stage.context, timeout_s, tail)
    if code != verify.exit_code:
        raise failure(stage, f"exited with {code}, not {verify.exit_code}", tail)
    if verify.junit is None:
        return
    try:
        found = failed_tests(await guest.read_file(verify.junit, limit_bytes=MAX_REPORT_BYTES))
    except SandboxDead:
        raise
    except AenvError as error:
        raise failure(stage, f"left no usable report in {verify.junit}: {error.message}", tail) from error
    if verify.failed is not None and found != frozenset(verify.failed):
        raise failure(stage, _difference(frozenset(verify.failed), found), tail)


def _difference(wanted: frozenset[str], found: frozenset[str]) -> str:
    parts = []
    if passed := sorted(wanted - found):
        parts.append(f"should have failed but did not: {', '.join(passed[:10])}")
    if broken := sorted(found - wanted):
        parts.append(f"failed but should not have: {', '.join(broken[:10])}")
    return "; ".join(parts)
