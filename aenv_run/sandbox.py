"""One sandbox as its node sees it: a record, a directory, and a machine while it runs.

The public ``Sandbox`` of the SDK is a client of the node; this is the thing itself.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from aenv_run.cache import BlobCache
from aenv_run.capture import Capture
from aenv_run.catalog import Catalog
from aenv_run.drivers.protocol import BootSpec, Driver, Endpoint, Machine, MachineState, RestoreSpec
from aenv_run.errors import AenvError, BootFailed, NotFound, RestoreIncompatible, SandboxDead
from aenv_run.guest import Guest, Identity
from aenv_run.lifecycle import AFTER_CRASH, Operation, State, Transition, refusal, transition
from aenv_run.network import NetworkPolicy, SlotId
from aenv_run.repository import Repository
from aenv_run.sandbox_files import adopt, child_record, commit, in_thread
from aenv_run.sandbox_network import NodeNetwork, SandboxNetwork
from aenv_run.sandbox_record import Address, Record, SandboxDirectory
from aenv_run.snapshot import Snapshot
from aenv_run.types import SandboxId

log = logging.getLogger(__name__)

#: A restored daemon answers in milliseconds; on a busy host without KVM it needs seconds.
READY_TIMEOUT_S = 60.0
BOOT_TIMEOUT_S = 180.0
#: How long a reattached guest may take to take its identity again before it is left as it is.
REATTACH_TIMEOUT_S = 20.0
#: One whose time is over is kept at least this long, so that whoever asks is told why.
KEEP_ENDED_S = 300.0


@dataclass(frozen=True)
class Tools:
    """What every sandbox of a node shares."""

    driver: Driver
    mode: str
    repository: Repository
    catalog: Catalog
    cache: BlobCache
    guests: Callable[[Endpoint, str | None], Guest]
    network: NodeNetwork = field(default_factory=NodeNetwork.absent)


class HostedSandbox:
    """The only mutable noun. One operation at a time; ``kill`` interrupts whichever runs."""

    def __init__(self, directory: SandboxDirectory, record: Record, tools: Tools) -> None:
        self.directory = directory
        self.record = record
        self._tools = tools
        self._lock = asyncio.Lock()  # one operation at a time
        self._record_lock = asyncio.Lock()  # one change of the record at a time
        self._doing: State | None = None
        self._machine: Machine | None = None
        self._guest: Guest | None = None
        self._network = SandboxNetwork(tools.network)
        self._watcher: asyncio.Task[None] | None = None
        self._operations: set[asyncio.Task[object]] = set()
        self._killed = False

    @property
    def id(self) -> SandboxId:
        """Its id."""
        return self.record.id

    @property
    def state(self) -> State:
        """What it is doing now: a passing state, or the one of its record."""
        return self._doing or self.record.state

    # -- operations ----------------------------------------------------------------------------------------

    async def launch(self, *, cold: bool = False) -> None:
        """From STARTING to RUNNING. On failure nothing of it is left; the caller forgets it."""
        try:
            async with self._tracked():
                machine = await self._bring_up(cold=cold)
                restored = self.record.memory is not None and not cold
                await self._settle_running(machine, origin="restored" if restored else "booted")
        except BaseException:
            await asyncio.shield(self.discard())
            raise

    async def pause(self) -> None:
        """Memory and disk go to files, the machine ends."""
        async with self._operation(Operation.PAUSE):
            machine, guest = self._live()
            capture = await self._capture(machine, guest, keep_running=False)
            try:
                record = await in_thread(adopt, self.directory, self.record, capture, self.directory)
                files = {"disk": record.disk, "memory": record.memory, "serial": record.serial}
                gone = {"address": None, "slot": None, "expires_at_s": None, **self._stop_clock()}
                await self._update({**files, **gone}, state=State.PAUSED, answers=self._network.answers())
            except BaseException:
                await asyncio.shield(self._run_on(machine, guest))
                raise
            await asyncio.shield(self._release())
            await asyncio.to_thread(self.directory.tidy, self.record)

    async def resume(self, *, expires_at_s: float | None, cold: bool = False) -> None:
        """Back from its files, on a new machine."""
        async with self._operation(Operation.RESUME):
            try:
                machine = await self._bring_up(cold=cold)
                origin = "booted" if cold else "restored"
                await self._settle_running(machine, origin=origin, expires_at_s=expires_at_s)
            except BaseException:
                await asyncio.shield(self._release())
                raise

    async def split(
        self, ids: list[SandboxId], *, expires_at_s: float | None
    ) -> tuple[list[HostedSandbox], float]:
        """Fork: a directory that is ready to launch for each id, and how long (ms) this one stood still."""
        async with self._operation(Operation.FORK):
            machine, guest = self._live()
            capture = await self._capture(machine, guest, keep_running=True)
            children: list[HostedSandbox] = []
            try:
                for child in ids:
                    children.append(await self._child(child, capture, expires_at_s))
                return children, capture.stopped_ms
            except BaseException:
                for made in children:
                    await asyncio.shield(made.discard())
                raise
            finally:
                await asyncio.to_thread(capture.discard)

    async def snapshot(self, *, memory: bool, labels: dict[str, str]) -> tuple[Snapshot, float]:
        """Commit the present state; the snapshot and for how long (ms) the sandbox stood still."""
        async with self._operation(Operation.SNAPSHOT):
            machine, guest = self._live()
            capture = await self._capture(machine, guest, keep_running=True, memory=memory)
            try:
                snapshot = await in_thread(
                    commit, self._tools.repository, self.record, self.directory, capture, labels
                )
            finally:
                await asyncio.to_thread(capture.discard)
            known = tuple(
                layer.model_copy(update={"blob": blob})
                for layer, blob in zip(self.record.disk, snapshot.disk, strict=False)
            )
            await self._update(disk=known, base_id=snapshot.id)
            return snapshot, capture.stopped_ms

    async def set_expiry(self, expires_at_s: float | None) -> None:
        """Move the end of its time; paused sandboxes have none."""
        async with self._record_lock:
            if self.record.state is not State.RUNNING:
                raise self._refusal("set the timeout of")
            await self._write({"expires_at_s": expires_at_s})

    async def set_policy(self, policy: NetworkPolicy) -> None:
        """Change what it may reach, at once; a paused one has it from its resume on."""
        async with self._tracked(), self._lock, self._record_lock:
            if self._killed:
                raise NotFound(f"{self._subject()} was killed")
            if self.record.state is State.DEAD:
                raise self._refusal("change the network of")
            before = self.record.policy
            await self._write({"policy": policy})  # first: a node that takes it over applies what is written
            try:
                await self._network.apply(policy)
            except BaseException:
                await asyncio.shield(self._write({"policy": before}))
                raise

    async def end_episode(self) -> None:
        """Its ``max_seconds`` are over: the machine ends, and whoever asks is told why."""
        async with self._lock:
            if self._killed or not self.record.time_over(time.time()):
                return
            reason = f"time over: its {self.record.max_seconds:g} s (max seconds) are used up"
            log.info("sandbox %s ends: %s", self.id, reason)
            keep_until_s = max(self.record.expires_at_s or 0, time.time() + KEEP_ENDED_S)
            # Written first: whoever's call breaks off now finds the reason.
            await self._update(self._gone(reason), ended_by="time_over", expires_at_s=keep_until_s)
            await asyncio.shield(self._release())

    async def discard(self) -> None:
        """Kill: interrupt what runs, end the machine, delete the directory. Idempotent."""
        self._killed = True
        current = asyncio.current_task()
        for task in list(self._operations):
            if task is not current:
                task.cancel()
        pending = [task for task in self._operations if task is not current]
        if pending:
            await asyncio.wait(pending)
        await self._release()
        await asyncio.to_thread(self.directory.remove)

    async def close(self) -> None:
        """Let go of it: the machine runs on and another node can attach it."""
        await self._unwatch()
        await self._network.close()
        if self._guest is not None:
            await self._guest.aclose()

    async def reattach(self, slots: frozenset[SlotId] | None = None) -> bool:
        """Take it over from a node that is gone; False when it was only half made and has been removed.

        ``slots`` are the network slots that were taken over too; None: nobody looked.
        """
        machine = await self._tools.driver.attach(self.directory.machine)
        slot, reason = self.record.slot, "its engine ended while no node was watching"
        if machine is not None and slot is not None and slots is not None and slot not in slots:
            await machine.kill()
            machine, reason = None, "its network was gone"
        elif slot is not None and slots is not None and slot in slots:
            await self._network.take_over(slot, self.record.policy)
        after = AFTER_CRASH[self.record.state][0 if machine else 1]
        if machine is not None and after is not State.RUNNING:
            await machine.kill()
        if after is None:
            await asyncio.to_thread(self.directory.remove)
            return False
        if after is State.RUNNING and machine is not None:
            await self._take_over(machine)
        elif after is not self.record.state:
            await self._network.unplug()
            await self._update(self._gone(reason), state=after)
        await asyncio.to_thread(self.directory.tidy, self.record)
        return True

    # -- pieces --------------------------------------------------------------------------------------------

    def _subject(self) -> str:
        return f"sandbox {self.id}"

    def _refusal(self, what: str) -> AenvError:
        record = self.record
        return refusal(what, record.state, subject=self._subject(), reason=record.reason, ended_by=record.ended_by)

    def _gone(self, reason: str) -> dict[str, object]:
        """The fields of the record of one whose machine has ended."""
        return {"state": State.DEAD, "reason": reason, "address": None, "slot": None, "time_over_at_s": None}

    def _start_clock(self) -> dict[str, object]:
        left = self.record.seconds_left
        return {} if left is None else {"time_over_at_s": time.time() + left}

    def _stop_clock(self) -> dict[str, object]:
        end_s = self.record.time_over_at_s
        return {} if end_s is None else {"seconds_left": max(0.0, end_s - time.time()), "time_over_at_s": None}

    def _live(self) -> tuple[Machine, Guest]:
        if self._machine is None or self._guest is None:
            raise SandboxDead(f"{self._subject()} has no machine")
        return self._machine, self._guest

    @asynccontextmanager
    async def _tracked(self) -> AsyncIterator[None]:
        """Make the running task one that ``discard`` cancels; then its caller sees NotFound, not a cancel."""
        task = asyncio.current_task()
        assert task is not None
        self._operations.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._killed and task.uncancel() == 0:
                raise NotFound(f"{self._subject()} was killed") from None
            raise
        finally:
            self._operations.discard(task)

    @asynccontextmanager
    async def _operation(self, operation: Operation) -> AsyncIterator[Transition]:
        async with self._tracked(), self._lock:
            if self._killed:
                raise NotFound(f"{self._subject()} was killed")
            row = transition(
                operation,
                self.record.state,
                subject=self._subject(),
                reason=self.record.reason,
                ended_by=self.record.ended_by,
            )
            self._doing = row.during
            try:
                yield row
            finally:
                self._doing = None

    async def _update(self, changes: Mapping[str, object] | None = None, **more: object) -> None:
        """Change fields of the record, on disk first. The timeout may be set while an operation runs."""
        async with self._record_lock:
            await self._write({**(changes or {}), **more})

    async def _write(self, changes: Mapping[str, object]) -> None:
        record = self.record.model_copy(update=dict(changes))
        await in_thread(self.directory.write, record)
        self.record = record

    async def _bring_up(self, *, cold: bool) -> Machine:
        """A machine from the record's files whose guest has its identity, so that others may call it."""
        machine = await self._start_machine(cold=cold)
        guest = self._tools.guests(machine.endpoint, None)
        self._machine, self._guest = machine, guest
        try:
            await self._introduce(machine, guest, restored=self.record.memory is not None and not cold)
        except SandboxDead as error:
            console = await machine.console()
            tail = "\n".join(console.splitlines()[-10:])
            raise BootFailed(f"{self._subject()} did not come up: {error.message}\n{tail}".rstrip()) from error
        return machine

    async def _start_machine(self, *, cold: bool) -> Machine:
        driver, record = self._tools.driver, self.record
        disk, memory = self.directory.paths(record)
        directory = await asyncio.to_thread(self.directory.fresh_machine)
        slot = await self._network.plug(record.policy, record.answers)
        internet = record.policy.internet
        boot = BootSpec(record.machine, disk, directory, internet, slot, timeout_s=BOOT_TIMEOUT_S)
        if record.memory is None or cold:
            return await driver.boot(boot)
        restore = RestoreSpec(**vars(boot), memory=memory, facts=record.memory.facts)
        try:
            return await driver.restore(restore)
        except RestoreIncompatible as error:
            raise RestoreIncompatible(
                error.message, fix="start it from its disk alone: `--cold`, or cold=True in Python"
            ) from error

    async def _introduce(self, machine: Machine, guest: Guest, *, restored: bool) -> None:
        """The first call that the guest gets is already this one: to ask before whether it answers costs as much.

        It may be repeated: the same identity again changes nothing.
        """
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while True:
            try:
                return await self._identify(guest, restored=restored)
            except SandboxDead:
                if time.monotonic() > deadline_s or await machine.state() is MachineState.DEAD:
                    raise
            await asyncio.sleep(0.005)

    async def _identify(self, guest: Guest, *, restored: bool = False) -> None:
        record = self.record
        own = {"AENV_SANDBOX_ID": str(record.id), "E2B_SANDBOX": "true", "E2B_SANDBOX_ID": str(record.id)}
        identity = Identity(
            access_token=record.access_token,
            hostname=str(record.id),
            machine_id=record.machine_id,
            boot_id=str(uuid.uuid4()),
            entropy=secrets.token_bytes(256),
            env={**record.context.env, **record.env, **own},
            default_user=record.context.user,
            default_workdir=record.context.workdir,
        )
        await guest.initialise(identity, restored=restored)

    async def _settle_running(self, machine: Machine, *, origin: str, expires_at_s: float | None = None) -> None:
        address = Address(host=machine.endpoint.host, port=machine.endpoint.port)
        await self._network.publish(self.record.publish, address.host)
        update: dict[str, object] = {
            "state": State.RUNNING,
            "address": address,
            "slot": self._network.slot_id,
            "origin": origin,
            "reason": "",
            **self._start_clock(),
        }
        if expires_at_s is not None:
            update["expires_at_s"] = expires_at_s
        await self._update(update)
        self._watch(machine)

    async def _capture(
        self, machine: Machine, guest: Guest, *, keep_running: bool, memory: bool = True
    ) -> Capture:
        """Detach, capture, and (unless it stays stopped) give the guest its identity back."""
        if not memory:
            await guest.sync()
            return await machine.capture(self.directory.capturing, memory=False)
        try:
            await guest.detach()
            capture = await machine.capture(self.directory.capturing, memory=True, keep_running=keep_running)
        except BaseException:
            await asyncio.shield(self._run_on(machine, guest))
            raise
        if keep_running:
            try:
                await self._identify(guest)
            except BaseException:
                capture.discard()
                raise
        return capture

    async def _run_on(self, machine: Machine, guest: Guest) -> None:
        """After a failed operation: the sandbox as it was. A machine that died meanwhile is for the watcher."""
        if self._killed:
            return
        with suppress(AenvError):
            await machine.resume()
            await self._identify(guest)

    async def _child(self, child: SandboxId, capture: Capture, expires_at_s: float | None) -> HostedSandbox:
        directory = SandboxDirectory(self.directory.root.parent / child)
        record = child_record(self.record, child, expires_at_s)
        record = record.model_copy(update={"answers": self._network.answers()})

        def prepare() -> Record:
            directory.create()
            adopted = adopt(directory, record, capture, self.directory)
            directory.write(adopted)
            return adopted

        try:
            return HostedSandbox(directory, await in_thread(prepare), self._tools)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(directory.remove))
            raise

    # -- the machine's end ---------------------------------------------------------------------------------

    def _watch(self, machine: Machine) -> None:
        self._watcher = asyncio.create_task(self._bury(machine), name=f"watch {self.id}")

    async def _bury(self, machine: Machine) -> None:
        ended = await machine.wait()
        async with self._lock:
            if self._machine is not machine or self._killed:
                return
            last = [line for line in ended.console.splitlines() if line.strip()][-1:]
            reason = ended.reason + (f" (console: {last[0][:200]})" if last else "")
            log.warning("sandbox %s is dead: %s", self.id, reason)
            await self._release()
            await self._update(self._gone(reason))

    async def _unwatch(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None and watcher is not asyncio.current_task():
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    async def _release(self) -> None:
        await self._unwatch()
        machine, self._machine = self._machine, None
        guest, self._guest = self._guest, None
        if guest is not None:
            await guest.aclose()
        if machine is not None:
            await machine.kill()
        await self._network.unplug()

    async def _take_over(self, machine: Machine) -> None:
        """A machine of a former node. It may stand still or have forgotten its token: half a pause does that."""
        self._machine = machine
        self._guest = self._tools.guests(machine.endpoint, self.record.access_token)
        try:
            async with asyncio.timeout(REATTACH_TIMEOUT_S):
                if await machine.state() is MachineState.PAUSED:
                    await machine.resume()
                await self._identify(self._guest)
        except (AenvError, TimeoutError) as error:
            log.warning("sandbox %s does not answer after it was attached: %s", self.id, error)
        try:
            await self._network.publish(self.record.publish, machine.endpoint.host)
        except (AenvError, OSError) as error:
            log.warning("sandbox %s: its ports are not published again: %s", self.id, error)
        self._watch(machine)
