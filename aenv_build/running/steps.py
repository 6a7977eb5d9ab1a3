"""What each verb does to a staging machine."""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aenv_build.cache.cache_mounts import Mounts
from aenv_build.language.verbs import Copy, FromStep, Mkdir, Run, Verify
from aenv_build.planning import clone, install
from aenv_build.planning.files import (
    chunks,
    disk_limit,
    holds_directory,
    one_file_tar,
    read_examined,
    repack,
    strip_top,
    write_tar,
)
from aenv_build.planning.lent import Lent
from aenv_build.planning.plan import Stage, argv, copied_to, copy_target, run_context, user_of
from aenv_build.reports.events import Sink
from aenv_build.running.junit import MAX_REPORT_BYTES, failed_tests
from aenv_build.running.ready import is_ready
from aenv_build.running.redact import Redactor
from aenv_build.running.secret_values import lend_secrets
from aenv_build.running.staging import StagingMachine
from aenv_build.running.tail import LAST_LINES, Tail, failure
from aenv_run.errors import AenvError, CommandTimeout, Conflict, NotFound, SandboxDead, StepFailed
from aenv_run.guest import Command, Ended, EntryType, Guest, Output
from aenv_run.printable import printable_lines
from aenv_run.threads import in_thread
from aenv_run.types import Context

DEFAULT_TIMEOUT_S = 3600
READY_POLL_S = 0.2
REMOUNT_TIMEOUT_S = 60.0
#: From the loss of the daemon until the engine must have ended, if it ends.
END_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Given:
    """What a step gets beside the state that it starts from, for its own time only."""

    lent: Lent = field(default_factory=Lent)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    mounts: Mounts | None = None
    #: Keeps out of what is shown the secrets of the whole build.
    redactor: Redactor = field(default_factory=Redactor, repr=False)

    @property
    def leaves_traces(self) -> bool:
        """Whether a machine that had it may hold some of it in its memory."""
        return bool(self.secrets or self.lent.environment)

    @asynccontextmanager
    async def to(self, guest: Guest, user: str) -> AsyncIterator[GivenEnv]:
        """Put it into the guest for a command of ``user``; take it out at the end."""
        async with AsyncExitStack() as stack:
            lent = await stack.enter_async_context(self.lent.given(guest))
            secrets = await stack.enter_async_context(lend_secrets(guest, self.secrets, user))
            yield GivenEnv(lent, secrets)


@dataclass(frozen=True)
class GivenEnv:
    """Variables for commands: those of the recipe are stronger than ``lent`` ones, and weaker than ``secrets``."""

    lent: Mapping[str, str]
    secrets: Mapping[str, str] = field(repr=False)

    def around(self, env: Mapping[str, str]) -> dict[str, str]:
        """All of a command's variables."""
        return {**self.lent, **env, **self.secrets}


async def perform(
    stage: Stage,
    staged: StagingMachine,
    sink: Sink,
    fetched: Path | None = None,
    given: Given | None = None,
) -> None:
    """Do the step's work; ``StepFailed`` names it, a machine that died is ``SandboxDead``.

    ``fetched`` is the tar of another step's files, for a copy that takes them from there.
    """
    given = given if given is not None else Given()
    tail = Tail(stage.id, sink, given.redactor)
    try:
        staged.was_given |= given.leaves_traces
        async with given.to(staged.guest, user_of(stage.step, stage.context)) as env:
            await _Work(stage, staged, tail, env, given.mounts).do(fetched)
    except SandboxDead as error:
        raise await _dead(stage, staged, error, given.redactor) from error
    except CommandTimeout as error:
        raise failure(stage, error.message, tail, by_command=True) from error
    except StepFailed:
        raise
    except AenvError as error:
        raise failure(stage, error.message, tail) from error


async def _dead(stage: Stage, staged: StagingMachine, error: SandboxDead, redactor: Redactor) -> SandboxDead:
    """The machine is gone: no exit code of the command exists, which is another thing than a failed command."""
    reason, text = error.message, ""
    with contextlib.suppress(AenvError, TimeoutError):
        async with asyncio.timeout(END_TIMEOUT_S):
            end = await staged.machine.wait()
        reason, text = end.reason, end.console
    if not text:
        with contextlib.suppress(AenvError):
            text = await staged.machine.console()
    console = printable_lines(redactor.text(text)).strip().splitlines()[-LAST_LINES:]
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


class _Work:
    """One step in its machine. ``env`` is what the step is given for its commands."""

    def __init__(
        self, stage: Stage, staged: StagingMachine, tail: Tail, env: GivenEnv, mounts: Mounts | None
    ) -> None:
        self._stage = stage
        self._staged = staged
        self._guest = staged.guest
        self._tail = tail
        self._env = env
        self._mounts = mounts

    async def do(self, fetched: Path | None) -> None:
        """The step's verb."""
        step = self._stage.step
        if step.run is not None:
            async with self._cached(run_context(step.run, self._stage.context).user):
                code = await self._run(step.run, step.run.command, self._timeout_s(step.run.timeout))
                if code != 0:
                    raise self._failure(f"exited with {code}")
        elif step.copy_ is not None:
            await self._copy(step.copy_, fetched)
        elif step.write is not None:
            await self._write()
        elif step.mkdir is not None:
            await self._make_directory(step.mkdir)
        elif step.apt is not None:
            await self._install(install.apt(step.apt))
        elif step.pip is not None:
            await self._install(install.pip(step.pip, step.cache[0].path if step.cache else None))
        elif step.git is not None:
            to = copy_target(step.git.to, self._stage.context).rstrip("/") or "/"
            await self._install(clone.git(step.git, to, step.secrets))
        elif step.start is not None:
            await self._start(step.start)
        elif step.verify is not None:
            await self._verify(step.verify)

    def _timeout_s(self, own: float | None = None) -> float:
        return own or self._stage.step.timeout or DEFAULT_TIMEOUT_S

    def _failure(self, what: str, *, by_command: bool = True) -> StepFailed:
        return failure(self._stage, what, self._tail, by_command=by_command)

    async def _run(self, command: Run | Verify, words: str | tuple[str, ...], timeout_s: float) -> int:
        return await self._command(
            argv(words, command.shell), run_context(command, self._stage.context), timeout_s
        )

    async def _command(self, words: tuple[str, ...], context: Context, timeout_s: float) -> int:
        """Run it to its end, its output told line by line; its exit code."""
        result = await self._guest.run(
            Command(words, env=self._env.around(context.env), cwd=context.workdir, user=context.user),
            timeout_s=timeout_s,
            on_stdout=lambda data: self._tail.feed("stdout", data),
            on_stderr=lambda data: self._tail.feed("stderr", data),
        )
        self._tail.end()
        return result.exit_code

    async def _copy(self, copy: Copy, fetched: Path | None) -> None:
        stage = self._stage
        target = copied_to(copy, stage.context, stage.files)
        archive = self._staged.scratch("copy.tar")
        try:
            if isinstance(copy.from_, FromStep):
                assert fetched is not None
                is_directory = await in_thread(holds_directory, fetched)
                if not is_directory and target.endswith("/"):
                    target += posixpath.basename(copy.from_.path.rstrip("/"))
            else:
                assert stage.files is not None
                is_directory = stage.files.is_directory or copy.unpack
            if not is_directory and not target.endswith("/") and await self._is_directory(target):
                source = copy.from_.path if isinstance(copy.from_, FromStep) else copy.paths[0]
                target += "/" + posixpath.basename(source.rstrip("/"))
            folder, name = target.rstrip("/") or "/", ""
            if not is_directory:
                folder, _, name = target.rpartition("/")
            if fetched is not None:
                limit = disk_limit(self._staged.snapshot.machine)
                await in_thread(strip_top, fetched, archive, limit, name=name, mode=copy.mode_bits)
            elif stage.files is not None and copy.unpack:
                limit = disk_limit(self._staged.snapshot.machine)
                await in_thread(repack, stage.files, archive, limit, mode=copy.mode_bits)
            elif stage.files is not None:
                await in_thread(write_tar, stage.files, archive, name=name, mode=copy.mode_bits)
            await self._guest.put_archive(folder or "/", archive, user=copy.user or stage.context.user)
        finally:
            archive.unlink(missing_ok=True)

    async def _is_directory(self, path: str) -> bool:
        try:
            entry = await self._guest.stat(path, user="root")
        except NotFound:
            return False
        return entry.type is EntryType.DIRECTORY

    async def _make_directory(self, wanted: Mkdir) -> None:
        path = copy_target(wanted.path, self._stage.context).rstrip("/") or "/"
        with contextlib.suppress(Conflict):  # it is there
            await self._guest.make_dir(path, user=wanted.user or self._stage.context.user)

    async def _write(self) -> None:
        context = self._stage.context
        for file in self._stage.step.files_written:
            folder, _, name = copy_target(file.to, context).rpartition("/")
            archive = one_file_tar(name, file.content.encode(), file.mode_bits)
            await self._guest.put_archive(folder or "/", chunks(archive), user=file.user or context.user)

    async def _install(self, work: install.Installation) -> None:
        """Install, then remove what was only fetched for it: it never gets into the layer."""
        context, files = self._stage.context, self._stage.files
        user = work.user or context.user
        if files is not None:
            await self._guest.write_file(install.REQUIREMENTS, await in_thread(read_examined, files), user="root")
        effective = Context(env={**work.env, **context.env}, workdir=context.workdir, user=user)
        async with AsyncExitStack() as stack:
            if work.clean is not None:
                await stack.enter_async_context(self._giving_back())
            async with self._cached(user):
                if (code := await self._command(work.argv, effective, self._timeout_s())) != 0:
                    raise self._failure(f"exited with {code}")
            if work.clean is not None:
                cleaned = await self._command(work.clean, Context(workdir="/", user="root"), self._timeout_s())
                if cleaned != 0:
                    raise self._failure(f"could not remove what it fetched (exit code {cleaned})")
        if files is not None:
            await self._guest.remove(install.REQUIREMENTS, user="root")

    @asynccontextmanager
    async def _cached(self, user: str) -> AsyncIterator[None]:
        """With the step's cache mounts in place."""
        if self._mounts is None or not self._mounts.wanted:
            yield
            return
        async with self._giving_back(), self._mounts.around(self._guest, user):
            yield

    @asynccontextmanager
    async def _giving_back(self) -> AsyncIterator[None]:
        """What is deleted meanwhile takes no room in the layer, where the guest's kernel can tell its disk."""
        await self._remount("discard")
        yield
        await self._guest.sync()  # the kernel tells of what is deleted when it writes its journal
        await self._remount("nodiscard")

    async def _remount(self, option: str) -> None:
        command = Command(("mount", "-o", f"remount,{option}", "/"), cwd="/", user="root")
        try:
            await self._guest.run(command, timeout_s=REMOUNT_TIMEOUT_S)
        except SandboxDead:
            raise
        except AenvError:
            return  # an image without mount: its layers are larger

    async def _start(self, command: Run) -> None:
        """Start it and leave it running once it is ready."""
        effective = run_context(command, self._stage.context)
        words = argv(command.command, command.shell)
        async with self._guest.start(
            Command(words, env=effective.env, cwd=effective.workdir, user=effective.user)
        ) as process:
            ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

            async def read() -> None:
                async for event in process.events():
                    if isinstance(event, Output):
                        self._tail.feed("stdout" if event.stream == "pty" else event.stream, event.data)
                    elif isinstance(event, Ended):
                        ended.set_result(event.exit_code)

            reader = asyncio.create_task(read())
            try:
                await self._until_ready(ended, self._timeout_s(command.timeout))
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)

    async def _until_ready(self, ended: asyncio.Future[int], timeout_s: float) -> None:
        ready = self._stage.step.ready
        deadline = time.monotonic() + timeout_s
        while True:
            if ended.done() and ended.result() != 0:  # with 0 it may have left a daemon
                raise self._failure(f"ended with {ended.result()} before it was ready")
            if ready is None or await is_ready(ready, self._guest, self._stage.context):
                return
            if time.monotonic() > deadline:
                raise self._failure(f"was not ready within {timeout_s:g} s")
            await asyncio.sleep(READY_POLL_S)

    async def _verify(self, verify: Verify) -> None:
        code = await self._run(verify, verify.run, self._timeout_s(verify.timeout))
        if code != verify.exit_code:
            raise self._failure(f"exited with {code}, not {verify.exit_code}")
        if verify.junit is None:
            return
        try:
            found = failed_tests(await self._guest.read_file(verify.junit, limit_bytes=MAX_REPORT_BYTES))
        except SandboxDead:
            raise
        except AenvError as error:
            raise self._failure(
                f"left no usable report in {verify.junit}: {error.message}", by_command=False
            ) from error
        if verify.failed is not None and found != frozenset(verify.failed):
            raise self._failure(_difference(frozenset(verify.failed), found))


def _difference(wanted: frozenset[str], found: frozenset[str]) -> str:
    parts = []
    if passed := sorted(wanted - found):
        parts.append(f"should have failed but did not: {', '.join(passed[:10])}")
    if broken := sorted(found - wanted):
        parts.append(f"failed but should not have: {', '.join(broken[:10])}")
    return "; ".join(parts)
