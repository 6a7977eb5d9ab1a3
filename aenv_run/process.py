"""The one spawner of child processes: each in its own session, ended as a group, limited in time and output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aenv_run.errors import AenvError, CommandTimeout, MissingDependency, SandboxDead
from aenv_run.stopping import STOP

#: A log that is larger when a child is spawned is started afresh.
MAX_LOG_BYTES = 4 << 20
#: How long the kernel may take to end a killed process before we say so.
KILL_WAIT_S = 10.0
#: As long, when this process was told to end at once.
END_WAIT_S = 1.0


@dataclass(frozen=True)
class Completed:
    """A child process that ended by itself."""

    argv: tuple[str, ...]
    exit_code: int
    stdout: bytes
    stderr: bytes


def read_start_ticks(pid: int) -> int | None:
    """When the kernel started ``pid``, in clock ticks since boot; None when it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, *rest = stat.rpartition(b")")[2].split()  # the name before it may hold spaces and parentheses
    return None if state in (b"Z", b"X") else int(rest[18])


def is_alive(pid: int, start_ticks: int) -> bool:
    """Whether that very process still runs: a recycled pid has other start ticks."""
    return read_start_ticks(pid) == start_ticks


def kill_group(pid: int) -> None:
    """SIGKILL the process group that ``pid`` leads. Idempotent."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def end_children() -> None:
    """SIGKILL the groups of all children but those that are to outlive this process, and see them end."""
    left = {pid for pid in _children() - STOP.lasting if read_start_ticks(pid) is not None}
    for pid in left:
        kill_group(pid)
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)  # one that leads no group
    deadline_s = time.monotonic() + END_WAIT_S
    while any(read_start_ticks(pid) is not None for pid in left) and time.monotonic() < deadline_s:
        time.sleep(0.005)


def _children() -> set[int]:
    """Asked of the kernel: also one that was forked in this very moment counts."""
    found: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # that thread has just ended
            found.update(map(int, file.read_text().split()))
    return found


STOP.before_end.append(end_children)


@dataclass
class Child:
    """A spawned process that leads its own session. ``popen`` is None when an earlier process spawned it."""

    pid: int
    start_ticks: int
    popen: subprocess.Popen[bytes] | None = None
    reader: int | None = None

    @classmethod
    def adopt(cls, pid: int, start_ticks: int) -> Child:
        """A child that an earlier process spawned with ``bounded``."""
        try:
            # Opening a pipe's descriptor through /proc gives an end of our own.
            reader = os.open(f"/proc/{pid}/fd/2", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            reader = None
        return cls(pid, start_ticks, None, reader)

    def drain(self, log: Path) -> None:
        """Append to ``log`` what a ``bounded`` child has said since the last time, within MAX_LOG_BYTES."""
        if self.reader is None:
            return
        with contextlib.suppress(OSError), log.open("ab") as file:  # BlockingIOError: nothing more now
            while file.tell() < MAX_LOG_BYTES and (said := os.read(self.reader, 1 << 16)):
                file.write(said)

    def close(self) -> None:
        """Let go of its output; the process is not touched. Idempotent."""
        if self.reader is not None:
            os.close(self.reader)
            self.reader = None

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        if self.popen is not None and self.popen.poll() is not None:
            return False
        return is_alive(self.pid, self.start_ticks)

    def how_it_ended(self) -> str:
        """`` by SIGKILL`` or `` with exit code 1``; empty while it runs, or when it was not our child."""
        code = self.popen.poll() if self.popen else None
        if code is None:
            return ""
        if code >= 0:
            return f" with exit code {code}"
        try:
            return f" by {signal.Signals(-code).name}"
        except ValueError:
            return f" by signal {-code}"

    async def wait(self) -> int | None:
        """Return when it has ended: its exit code (negative: a signal), None when it was not our child."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return self.popen.wait() if self.popen else None
        try:
            if self.alive:  # after pidfd_open: the descriptor is then of this process, not of a recycled pid
                await _readable(descriptor)
        finally:
            os.close(descriptor)
        return self.popen.wait() if self.popen else None

    def kill_group(self) -> None:
        """End it and all of its group now, and wait until the kernel has done so. Idempotent."""
        if not self.alive:
            return
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if not self.alive:
                return
            kill_group(self.pid)
            if not _ends_within(descriptor, KILL_WAIT_S):
                raise AenvError(f"process {self.pid} did not end {KILL_WAIT_S:.0f} s after SIGKILL")
        finally:
            os.close(descriptor)
        if self.popen is not None:
            self.popen.wait()


class Watch:
    """The process ``pid``, if ``word`` is in its command line: a pid may by now, or elsewhere, be another's.

    By a pidfd, which never means another process. ``close`` always.
    """

    def __init__(self, pid: int, word: str) -> None:
        self._descriptor: int | None = None
        with contextlib.suppress(OSError, OverflowError):
            self._descriptor = os.pidfd_open(pid)
            if word.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                self.close()

    async def ended_within(self, timeout_s: float) -> bool:
        """Whether it has ended, waiting for that as long; what is not there has."""
        if self._descriptor is None:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await _readable(self._descriptor)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _ends_within(descriptor: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, _resolve, ready)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


def _open_log(log: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
        flags |= os.O_TRUNC
    return os.open(log, flags, 0o600)


async def spawn(
    argv: Sequence[str],
    *,
    log: Path,
    ephemeral: bool,
    bounded: bool = False,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
) -> Child:
    """Start a long-lived child in a session of its own, stdin empty, output appended to ``log``.

    With ``bounded`` its output waits in a pipe until ``Child.drain``, and what does not fit is lost: for a child
    that somebody hostile can make talk without end. The child holds both ends, so that it outlives this process.
    With ``ephemeral`` the kernel ends it when this process ends. That is bound to the spawning *thread*
    (prctl(2), PR_SET_PDEATHSIG), so the child is started right here and not in a worker thread. Popen rather
    than asyncio's subprocess, whose transport kills the child when the loop's objects are collected.
    """
    full = ["setpriv", "--pdeathsig", "KILL", "--", *argv] if ephemeral else list(argv)
    reader, output = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if bounded else (None, _open_log(log))
    try:
        popen = subprocess.Popen(  # noqa: ASYNC220 - see above
            full,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=cwd,
            env=env,
            pass_fds=[*pass_fds, *([] if reader is None else [reader])],
            start_new_session=True,
        )
    except FileNotFoundError as error:
        if reader is not None:
            os.close(reader)
        raise _missing(full[0], "") from error
    finally:
        os.close(output)
    ticks = read_start_ticks(popen.pid)
    if ticks is None:
        popen.wait()
        if reader is not None:
            os.close(reader)
        raise SandboxDead(f"{argv[0]} ended as soon as it was started (exit code {popen.returncode})")
    if not ephemeral:
        STOP.lasting.add(popen.pid)
    return Child(popen.pid, ticks, popen, reader)


def _missing(program: str, fix: str) -> MissingDependency:
    return MissingDependency(f"{program} is not installed", fix=fix or "run `aenv doctor`")


async def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    stdin: bytes | None = None,
    limit_bytes: int = 16 << 20,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Completed:
    """Run a program to its end. An exit code is a result; a time-out or endless output is an error."""
    process = await _started(argv, stdin is not None, cwd, env)
    try:
        async with asyncio.timeout(timeout_s):
            out, err, _ = await asyncio.gather(
                _read(process.stdout, limit_bytes, argv),
                _read(process.stderr, limit_bytes, argv),
                _feed(process.stdin, stdin),
            )
            code = await process.wait()
    except BaseException as error:
        await _end(process)
        if isinstance(error, TimeoutError):
            raise CommandTimeout(f"{argv[0]} ran longer than {timeout_s:g} s and was killed") from error
        raise
    return Completed(tuple(argv), code, out, err)


async def _started(
    argv: Sequence[str], with_input: bool, cwd: Path | None, env: Mapping[str, str] | None
) -> asyncio.subprocess.Process:
    creating = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE if with_input else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=cwd,
            env=env,
            start_new_session=True,
        )
    )
    try:
        # asyncio itself, cancelled here, ends the child alone and waits for all who hold its pipes.
        return await asyncio.shield(creating)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            await _end(await creating)
        raise
    except FileNotFoundError as error:
        if cwd is not None and not cwd.is_dir():
            raise
        raise _missing(argv[0], "") from error


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the group, also when its leader has ended and others hold on to its pipes."""
    kill_group(process.pid)
    # asyncio sees its end only once its pipes are read to theirs, and nobody else reads them any more.
    ending = asyncio.ensure_future(process.wait())
    rest = [asyncio.ensure_future(_discard(stream)) for stream in (process.stdout, process.stderr) if stream]
    await asyncio.wait([ending], timeout=KILL_WAIT_S)
    for reading in rest:
        reading.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


async def _read(stream: asyncio.StreamReader | None, limit_bytes: int, argv: Sequence[str]) -> bytes:
    assert stream is not None
    data = bytearray()
    while chunk := await stream.read(1 << 16):
        data += chunk
        if len(data) > limit_bytes:
            raise AenvError(f"{argv[0]} printed more than {limit_bytes} bytes and was killed")
    return bytes(data)


async def _discard(stream: asyncio.StreamReader) -> None:
    while await stream.read(1 << 16):
        pass


async def _feed(stream: asyncio.StreamWriter | None, data: bytes | None) -> None:
    if stream is None or data is None:
        return
    try:
        stream.write(data)
        await stream.drain()
        stream.close()
    except (BrokenPipeError, ConnectionResetError):
        return  # it did not want the rest; its exit code tells


async def check(
    argv: Sequence[str],
    *,
    what: str,
    fix: str = "",
    timeout_s: float,
    stdin: bytes | None = None,
    limit_bytes: int = 16 << 20,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Completed:
    """As ``run``; an exit code other than 0 is an error that says ``what`` failed, with its last lines."""
    try:
        done = await run(argv, timeout_s=timeout_s, stdin=stdin, limit_bytes=limit_bytes, cwd=cwd, env=env)
    except MissingDependency as error:
        raise _missing(argv[0], fix) from error
    if done.exit_code != 0:
        lines = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()[-10:]
        detail = "\n".join(lines) or "no output"
        raise AenvError(f"{what}: {argv[0]} exited with {done.exit_code}: {detail}", fix=fix)
    return done


def in_chroot(mountinfo: str) -> bool:
    """Whether the root directory is no mount point; ``mountinfo`` is /proc/self/mountinfo."""
    return not any(line.split(" ", 5)[4] == "/" for line in mountinfo.splitlines())
