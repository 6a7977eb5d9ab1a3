"""One gVisor machine: its supervisor, control socket and directory. See ``protocol.Machine`` for the promises."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
from pathlib import Path

from aenv_run import disk
from aenv_run.capture import Capture
from aenv_run.drivers import gvisor_capture, gvisor_cgroup, gvisor_checked, gvisor_commit
from aenv_run.drivers.gvisor_commit import Below
from aenv_run.drivers.gvisor_control import first_reply, request
from aenv_run.drivers.gvisor_supervisor import CONSOLE, CONTROL, EXIT
from aenv_run.drivers.protocol import Endpoint, MachineExit, MachineState
from aenv_run.drivers.qemu_machine import clean_console, last_lines
from aenv_run.errors import AenvError, BootFailed, SandboxDead
from aenv_run.nbd import DiskLayer
from aenv_run.paths import Home
from aenv_run.process import KILL_WAIT_S, Child, is_alive
from aenv_run.snapshot import MemoryFacts
from aenv_run.types import MachineSpec, Model

RECORD = "machine.json"
CONSOLE_BYTES = 65536
CALL_TIMEOUT_S = 70.0
#: Where the supervisor's forwarder listens.
BRIDGE_HOST = "127.0.0.1"


class Record(Model):
    """``machine.json``: what a later process needs to take the machine over. Written once, after the start.

    ``pid`` is the supervisor, process 1 of the machine's own pid namespace: it ends and all ends. ``front`` is the
    process that made the namespace and waits for it. ``below`` is there where the disk is not mounted.
    """

    format: str = "aenv.gvisor-machine/1"
    pid: int
    start_ticks: int
    front: int
    front_start_ticks: int
    host: str
    port: int
    machine: MachineSpec
    facts: MemoryFacts
    disk: tuple[DiskLayer, ...]
    cgroups: tuple[Path, ...] = ()
    below: Below | None = None

    def write(self, directory: Path) -> None:
        """Replace the file at once."""
        temporary = directory / f".{RECORD}"
        temporary.write_text(self.model_dump_json(indent=1))
        temporary.rename(directory / RECORD)

    @classmethod
    def read(cls, directory: Path) -> Record | None:
        """None when there is no (readable) record."""
        try:
            return cls.model_validate_json((directory / RECORD).read_bytes())
        except (OSError, ValueError):
            return None


class GvisorMachine:
    """See ``protocol.Machine``. ``child`` is the process in front of the supervisor, if started here."""

    def __init__(self, home: Home, directory: Path, record: Record, child: Child | None = None) -> None:
        self._home, self._directory, self._record, self._child = home, directory, record, child
        self._exit: MachineExit | None = None
        self._busy = asyncio.Lock()

    @classmethod
    async def attach(cls, home: Home, directory: Path) -> GvisorMachine | None:
        """The machine that an earlier process left in ``directory``; None when it is gone, and its traces too."""
        record = Record.read(directory)
        if record is None:
            return None
        machine = cls(home, directory, record)
        if await machine.state() is MachineState.DEAD:
            await machine.kill()
            return None
        return machine

    @property
    def directory(self) -> Path:
        """The directory it owns."""
        return self._directory

    @property
    def endpoint(self) -> Endpoint:
        """Where its daemon answers."""
        return Endpoint(self._record.host, self._record.port)

    @property
    def pid(self) -> int:
        """The supervisor's process id: all of the machine ends with it."""
        return self._record.pid

    def _alive(self) -> bool:
        return self._exit is None and is_alive(self._record.pid, self._record.start_ticks)

    async def _ask(self, op: str, **arguments: str | bool) -> dict[str, object]:
        if not self._alive():
            raise SandboxDead(f"the machine in {self._directory} is dead: {self._reason()}")
        try:
            return dict(await request(self._directory, {"op": op, **arguments}, timeout_s=CALL_TIMEOUT_S))
        except SandboxDead as error:
            raise SandboxDead(f"the machine in {self._directory} is dead: {error.message}") from error

    async def state(self) -> MachineState:
        """What the supervisor says; DEAD when it or the sandbox is gone."""
        try:
            answer = await self._ask("state")
        except SandboxDead:
            return MachineState.DEAD
        if answer.get("over"):
            return MachineState.DEAD
        return MachineState.PAUSED if answer.get("paused") else MachineState.RUNNING

    async def pause(self) -> None:
        """Stop every process of the guest. Idempotent. The sandbox's kernel still takes 4-6 % of a core."""
        await self._ask("pause")

    async def resume(self) -> None:
        """Let them run again. Idempotent."""
        await self._ask("resume")

    async def capture(self, directory: Path, *, memory: bool, keep_running: bool = True) -> Capture:
        """See the protocol. Never abandoned half-way: a cancellation is delivered when it has ended."""
        before = await self.state()
        if before is MachineState.DEAD:
            raise SandboxDead(f"the machine in {self._directory} is dead: {self._reason()}")
        task = asyncio.ensure_future(self._capture(directory, memory, keep_running))
        try:
            return await asyncio.shield(task)
        except SandboxDead as error:
            if not (reason := self._told()):
                raise
            raise SandboxDead(f"the machine in {self._directory} is dead: {reason}") from error
        except asyncio.CancelledError:
            while not task.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([task])
            if not task.cancelled() and task.exception() is None:
                task.result().discard()
                if before is MachineState.RUNNING and not keep_running:
                    await asyncio.shield(self.resume())
            raise

    async def _capture(self, directory: Path, memory: bool, keep_running: bool) -> Capture:
        facts = self._record.facts if memory else None
        async with self._busy:
            if self._record.below is not None:
                return await gvisor_commit.capture(
                    self._directory,
                    directory,
                    below=self._record.below,
                    chain=disk.local(self._record.disk),
                    facts=facts,
                    endpoint=self.endpoint,
                    keep_running=keep_running,
                )
            capture = await gvisor_capture.capture(
                self._directory,
                directory,
                facts=facts,
                endpoint=self.endpoint,
                disk_mib=self._record.machine.disk_mib,
                keep_running=keep_running,
            )
        gvisor_checked.remember(self._home, (*self._record.disk, *capture.disk))
        return capture

    async def wait(self) -> MachineExit:
        """Return when the machine is dead."""
        await Child(self._record.pid, self._record.start_ticks).wait()
        if self._exit is None:
            self._exit = MachineExit(self._reason(), await self.console())
        await self.kill()
        return self._exit

    def _reason(self) -> str:
        if self._exit is not None:
            return self._exit.reason
        return self._told() or "its process ended"

    def _told(self) -> str:
        """The reason that the supervisor left at its end; empty until then."""
        try:
            return str(json.loads((self._directory / EXIT).read_bytes())["reason"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    async def console(self) -> str:
        """The last console output, at most 64 KiB, control characters removed."""
        try:
            with (self._directory / CONSOLE).open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - CONSOLE_BYTES))
                return clean_console(file.read())
        except OSError:
            return ""

    async def kill(self) -> None:
        """End it with all its processes and mounts, and remove its control groups. Idempotent."""
        if self._exit is None:
            self._exit = MachineExit("it was killed" if self._still_there() else self._reason())
        await asyncio.shield(asyncio.to_thread(self.kill_now))

    def _still_there(self) -> bool:
        return is_alive(self._record.pid, self._record.start_ticks)

    def kill_now(self) -> None:
        """As ``kill``, without awaiting: for the way out after an error or a cancellation."""
        end(self._record.pid, self._record.start_ticks)
        end(self._record.front, self._record.front_start_ticks)
        if self._child is not None:
            self._child.kill_group()  # reaps it
        gvisor_cgroup.remove(self._record.cgroups)
        for name in (CONTROL, RECORD):
            (self._directory / name).unlink(missing_ok=True)

    async def wait_ready(self, timeout_s: float, what: str) -> None:
        """Return when the daemon answers; BootFailed as soon as it is clear that it never will."""
        ready = asyncio.create_task(
            first_reply(self.endpoint, timeout_s, patient=self._record.host == BRIDGE_HOST)
        )
        ended = asyncio.create_task(Child(self._record.pid, self._record.start_ticks).wait())
        try:
            await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise await self._failed(what, self._reason())
            if not await ready:
                raise await self._failed(what, f"its daemon did not answer within {timeout_s:g} s")
        finally:
            for task in (ready, ended):
                task.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)

    async def _failed(self, what: str, reason: str) -> BootFailed:
        tail = last_lines(await self.console()) or "(the console is empty)"
        return BootFailed(f"the machine {what}: {reason}. The end of its console:\n{tail}")


def _start_ticks(pid: int) -> int | None:
    """As ``read_start_ticks``, also of a zombie: a leader is one while its threads (and their work) still end."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def end(pid: int, start_ticks: int) -> None:
    """Kill a process and wait until it is gone; of a supervisor, with its whole pid namespace. Idempotent."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _start_ticks(pid) != start_ticks:
            return  # another process
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(KILL_WAIT_S * 1000):
            raise AenvError(f"process {pid} did not end {KILL_WAIT_S:.0f} s after SIGKILL")
    finally:
        os.close(descriptor)


def end_started(child: Child) -> None:
    """End a machine that is not recorded yet: ``child`` and its supervisor, known by the session they share.

    The supervisor counts as there until all of its namespace is gone, also when it has begun to end by itself
    and its leader is a zombie. It may be started while this looks: look again when its parent is gone.
    """
    for _ in range(2):
        for pid, ticks in _session(child.pid):
            if pid != child.pid:
                end(pid, ticks)
        child.kill_group()
    if child.popen is not None:
        child.popen.wait()


def _session(leader: int) -> list[tuple[int, int]]:
    """Process ids and start ticks of all in a session, zombies too."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.name)
            words = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            if int(words[3]) == leader:
                found.append((pid, int(words[19])))
    return found
