"""One QEMU machine: its process, its QMP connection, its directory. See ``protocol.Machine`` for the promises."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
from pathlib import Path

from aenv_run.capture import Capture
from aenv_run.drivers import qemu_command
from aenv_run.drivers.protocol import Endpoint, MachineExit, MachineState
from aenv_run.drivers.qemu_capture import Capturer
from aenv_run.drivers.qmp import Qmp, QmpError
from aenv_run.errors import AenvError, BootFailed, Conflict, ProtocolError, SandboxDead
from aenv_run.guest import Guest
from aenv_run.memory import Mapping
from aenv_run.nbd import DiskLayer
from aenv_run.process import Child, is_alive
from aenv_run.snapshot import MemoryFacts
from aenv_run.types import MachineSpec, Model

RECORD = "machine.json"
LOG = "engine.log"
DEVICE_STATE_IN = "device_state.in"
READY, FAILED = "aenv-ready", "aenv-init: FAILED"
POLL_S = 0.02
#: QEMU stops a machine at a write that the host's disk has no room for; it never lets it go on by itself.
NO_ROOM_STATE, NO_ROOM_RETRY_S = "io-error", 1.0
#: Run states of a machine that will not run again.
DEAD_STATES = {
    "shutdown": "the guest shut down or rebooted",
    "guest-panicked": "the guest's kernel panicked",
    "internal-error": "the virtual CPU met an internal error",
}
DEAD_EVENTS = {"SHUTDOWN": DEAD_STATES["shutdown"], "GUEST_PANICKED": DEAD_STATES["guest-panicked"]}
#: QEMU warns of these always, and they explain nothing. Of the first once, when the guest's first free pages are
#: dropped: the library lets nothing happen to the file. Of the second at the start of each machine with a tap.
UNFOUNDED = (
    "Discarding RAM in private file mappings is possibly dangerous",
    "warning: netdev unused has no peer",
)
#: By how ``Child.how_it_ended`` names it.
MEANINGS = {" by SIGBUS": " (a file that it maps became shorter, or the host ran out of memory for it)"}
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-Z\\-_])")
CONTROLS = re.compile(r"[^\t\n\x20-\x7e\x80-\U0010ffff]|[\x7f-\x9f]")


class Record(Model):
    """``machine.json``: what a later process needs to take the machine over. Written once, after the start.

    Which overlay is the top one is not kept here but asked of QEMU, which cannot be out of date. ``ram_start`` is
    where its RAM is in its address space (0: not checked yet); ``ram_roles`` are those of the image that it was
    restored from.
    """

    format: str = "aenv.qemu-machine/2"
    pid: int
    start_ticks: int
    host: str = "127.0.0.1"
    port: int
    machine: MachineSpec
    disk: tuple[DiskLayer, ...]
    ram_start: int = 0
    ram_roles: tuple[str, ...]
    facts: MemoryFacts

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


def clean_console(raw: bytes) -> str:
    """Text for people: escape sequences and control characters but tab and newline removed."""
    text = raw.decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    return CONTROLS.sub("", ESCAPES.sub("", text))


def last_lines(text: str, count: int = 15) -> str:
    """The last lines that say something."""
    return "\n".join([line for line in text.splitlines() if line.strip()][-count:])


def read_log(directory: Path, child: Child) -> str:
    """The end of what QEMU itself said."""
    child.drain(directory / LOG)
    try:
        with (directory / LOG).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 4096))
            said = clean_console(file.read()).strip()
    except OSError:
        return ""
    return "\n".join([line for line in said.splitlines() if not any(words in line for words in UNFOUNDED)])


def how_it_ended(directory: Path, child: Child) -> str:
    """Why a QEMU that is gone is gone: how its process ended, what that means, and what it said last."""
    how = child.how_it_ended()
    said = last_lines(read_log(directory, child), 3)
    return f"its process ended{how}{MEANINGS.get(how, '')}" + (f": {said}" if said else "")


async def forwarded_port(qmp: Qmp) -> int:
    """The host port that the kernel picked for the daemon."""
    reply = await qmp.execute("human-monitor-command", {"command-line": "info usernet"})
    match = re.search(r"HOST_FORWARD\]\s+\d+\s+127\.0\.0\.1\s+(\d+)\s", str(reply))
    if not match:
        raise ProtocolError(f"QEMU forwards no port: {str(reply)[:400]}")
    return int(match.group(1))


async def top_overlay(qmp: Qmp) -> int:
    """The number of the overlay that the root disk writes now."""
    reply = await qmp.execute("query-block")
    for block in reply if isinstance(reply, list) else []:
        inserted = block.get("inserted") if isinstance(block, dict) else None
        name = inserted.get("node-name") if isinstance(inserted, dict) else None
        if isinstance(name, str) and (match := re.fullmatch(r"disk-(\d+)", name)):
            return int(match.group(1))
    raise ProtocolError("QEMU has no root disk")


class QemuMachine:
    """See ``protocol.Machine``."""

    def __init__(self, directory: Path, record: Record, child: Child, qmp: Qmp, top: int = 1) -> None:
        self._directory, self._record, self._child, self._qmp = directory, record, child, qmp
        self._console = b""
        self._exit: MachineExit | None = None
        self._held = False  # by a caller, or for a capture
        self._capturer = Capturer(
            directory=directory,
            pid=record.pid,
            qmp=qmp,
            virtual_bytes=record.machine.disk_mib << 20,
            ram=Mapping(record.pid, record.ram_start, qemu_command.ram_bytes(record.machine.memory_mib)),
            ram_roles=record.ram_roles,
            facts=record.facts,
            top=top,
        )
        self._watcher = asyncio.create_task(self._watch())

    @classmethod
    async def attach(cls, directory: Path) -> QemuMachine | None:
        """The machine that an earlier process left in ``directory``; None when it is gone."""
        record = Record.read(directory)
        if record is None or not record.ram_start or not is_alive(record.pid, record.start_ticks):
            return None
        try:
            qmp = await Qmp.connect(directory, qemu_command.QMP_SOCKET, 5.0)
        except TimeoutError as error:
            raise Conflict(f"another process holds the machine in {directory}") from error
        except (OSError, SandboxDead):
            return None
        child = Child.adopt(record.pid, record.start_ticks)
        try:
            machine = cls(directory, record, child, qmp, await top_overlay(qmp))
            if await machine.state() is MachineState.DEAD:
                await machine.kill()
                return None
        except BaseException:
            child.close()
            qmp.close()
            raise
        return machine

    @property
    def qmp(self) -> Qmp:
        """The connection to QEMU, for the driver."""
        return self._qmp

    def engine_log(self) -> str:
        """The end of what QEMU itself said."""
        return read_log(self._directory, self._child)

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
        """QEMU's process id."""
        return self._record.pid

    async def state(self) -> MachineState:
        """What QEMU itself says; a guest that shut down or panicked is DEAD although its process is there.

        A write that the host's disk had no room for stops the machine: PAUSED, and tried again every second.
        """
        if self._exit is not None or not self._child.alive or self._qmp.closed.is_set():
            return MachineState.DEAD
        try:
            status = await self._qmp.status()
        except SandboxDead:
            return MachineState.DEAD
        if status in DEAD_STATES:
            return MachineState.DEAD
        return MachineState.RUNNING if status == "running" else MachineState.PAUSED

    async def _alive_state(self) -> MachineState:
        state = await self.state()
        if state is MachineState.DEAD:
            raise SandboxDead(f"the machine in {self._directory} is dead: {await self._reason()}")
        return state

    async def pause(self) -> None:
        """Stop the virtual CPUs. Idempotent."""
        self._held = True
        if await self._alive_state() is MachineState.RUNNING:
            await self._qmp.execute("stop")

    async def resume(self) -> None:
        """Let them run again. Idempotent."""
        self._held = False
        if await self._alive_state() is MachineState.PAUSED:
            await self._qmp.execute("cont")

    async def capture(self, directory: Path, *, memory: bool, keep_running: bool = True) -> Capture:
        """See the protocol. Never abandoned half-way: a cancellation is delivered when it has ended."""
        was_held, self._held = self._held, True
        try:
            capture = await self._capture(directory, memory=memory, keep_running=keep_running)
        except BaseException:
            self._held = was_held
            raise
        self._held = was_held or not keep_running
        return capture

    async def _capture(self, directory: Path, *, memory: bool, keep_running: bool) -> Capture:
        was_running = await self._alive_state() is MachineState.RUNNING
        task = asyncio.ensure_future(
            self._capturer.capture(directory, memory=memory, was_running=was_running, keep_running=keep_running)
        )
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            while not task.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([task])
            if not task.cancelled() and task.exception() is None:
                task.result().discard()
                if was_running and not keep_running:
                    await asyncio.shield(self._qmp.execute("cont"))
            raise

    async def wait(self) -> MachineExit:
        """Return when the machine is dead."""
        await asyncio.shield(self._watcher)
        assert self._exit is not None
        return self._exit

    async def _watch(self) -> None:
        """End the engine of a guest that shut down or panicked; let one go on that the host had no room for.

        It stays, stopped, so that its console can be read here; but its daemon's connections stay open too, and
        whoever waits for a command in it would wait for ever.
        """
        ended = asyncio.create_task(self._child.wait())
        try:
            while self._exit is None and not ended.done():
                self._qmp.changed.clear()
                if await self.state() is MachineState.DEAD:
                    break
                retry_s = NO_ROOM_RETRY_S if await self._has_no_room() else None
                changed = asyncio.create_task(self._qmp.changed.wait())
                try:
                    done, _ = await asyncio.wait(
                        [ended, changed], timeout=retry_s, return_when=asyncio.FIRST_COMPLETED
                    )
                finally:
                    changed.cancel()
                if not done and await self._has_no_room() and not self._held:
                    with contextlib.suppress(SandboxDead, QmpError):
                        await self._qmp.execute("cont")  # it repeats the write, and stops again if that fails
        finally:
            ended.cancel()
        if self._exit is None:
            reason, console = await self._reason(), await self.console()
            self._exit = self._exit or MachineExit(reason, console)
        await self._end()

    async def _has_no_room(self) -> bool:
        with contextlib.suppress(SandboxDead, QmpError):
            return await self._qmp.status() == NO_ROOM_STATE
        return False

    async def _reason(self) -> str:
        if self._exit is not None:
            return self._exit.reason
        if event := self._qmp.seen(*DEAD_EVENTS):
            return DEAD_EVENTS[event]
        if self._child.alive and not self._qmp.closed.is_set():
            with contextlib.suppress(SandboxDead, QmpError):
                status = await self._qmp.status()
                return DEAD_STATES.get(status, f"its state is {status}")
        return how_it_ended(self._directory, self._child)

    async def console(self) -> str:
        """The last console output, at most 64 KiB, control characters removed."""
        await self._read_console()
        return clean_console(self._console)

    async def _read_console(self) -> None:
        """Reading takes the bytes out of QEMU's ring, so they are kept here."""
        size = qemu_command.CONSOLE_BYTES
        try:
            reply = await self._qmp.execute(
                "ringbuf-read", {"device": "console", "size": size, "format": "base64"}, timeout_s=10.0
            )
        except (SandboxDead, QmpError):
            return
        self._console = (self._console + base64.b64decode(str(reply)))[-size:]

    async def kill(self) -> None:
        """End it now. Nothing of it is outside its directory. Idempotent."""
        if self._exit is None:
            self._exit = MachineExit("it was killed")
        await self._end()
        await asyncio.wait([self._watcher])

    async def _end(self) -> None:
        self._qmp.close()
        await asyncio.shield(asyncio.to_thread(self._child.kill_group))
        self._tidy()

    def _tidy(self) -> None:
        self._child.drain(self._directory / LOG)
        self._child.close()
        (self._directory / qemu_command.QMP_SOCKET).unlink(missing_ok=True)
        (self._directory / RECORD).unlink(missing_ok=True)

    def kill_now(self) -> None:
        """As ``kill``, without awaiting: for the way out after an error or a cancellation."""
        self._exit = self._exit or MachineExit("it was killed")
        self._watcher.cancel()
        self._qmp.close()
        self._child.kill_group()
        self._tidy()

    async def wait_booted(self, timeout_s: float) -> None:
        """Return when the daemon answers; BootFailed as soon as it is clear that it never will.

        No connection is tried before the console says that the daemon listens: one that is made earlier sits
        in SYN back-off for up to 18 s (measured).
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            state = await self.state()
            await self._read_console()
            text = clean_console(self._console)
            if READY in text:
                break
            if FAILED in text:
                # Its reason may be longer than what had arrived.
                await asyncio.sleep(POLL_S)
                raise await self._boot_failed("the guest's init failed")
            if state is MachineState.DEAD:
                raise await self._boot_failed(await self._reason())
            if loop.time() > deadline:
                raise await self._boot_failed(f"it was not ready in {timeout_s:g} s")
            await asyncio.sleep(POLL_S)
        try:
            async with Guest(self.endpoint) as guest:
                await guest.wait_ready(max(1.0, deadline - loop.time()))
        except AenvError as error:
            raise await self._boot_failed(f"its daemon does not answer: {error.message}") from error

    async def _boot_failed(self, reason: str) -> BootFailed:
        tail = last_lines(await self.console()) or last_lines(self.engine_log()) or "(the console is empty)"
        return BootFailed(f"the machine did not boot: {reason}. The end of its console:\n{tail}")
