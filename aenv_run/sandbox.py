"""One sandbox as its node sees it: a record, a directory, and a machine while it runs.

The public ``Sandbox`` of the SDK is a client of the node; this is the thing itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from aenv_run.capture import Capture
from aenv_run.drivers.protocol import Machine
from aenv_run.errors import AenvError, NotFound, SandboxKilled
from aenv_run.hooks import Hooks
from aenv_run.lifecycle import AFTER_CRASH, Operation, State, Transition, refusal, transition
from aenv_run.network import NetworkPolicy, SlotId
from aenv_run.network.forward import PublishedPort
from aenv_run.sandbox_files import adopt, child_record, commit, known_blobs
from aenv_run.sandbox_hooks import Before, Start
from aenv_run.sandbox_log import SandboxLog
from aenv_run.sandbox_machine import SandboxMachine
from aenv_run.sandbox_merge import LayerMerge
from aenv_run.sandbox_record import Address, Record, SandboxDirectory
from aenv_run.sandbox_tools import Chosen, Tools
from aenv_run.sandbox_turns import Turns
from aenv_run.snapshot import Snapshot
from aenv_run.threads import in_thread, to_the_end
from aenv_run.types import SandboxId

log = logging.getLogger(__name__)

#: One whose time is over is kept at least this long, so that whoever asks is told why.
KEEP_ENDED_S = 300.0


class HostedSandbox:
    """The only mutable noun. One operation at a time; ``kill`` interrupts whichever runs."""

    def __init__(self, directory: SandboxDirectory, record: Record, tools: Tools) -> None:
        self.directory = directory
        self.record = record
        self.log = SandboxLog(directory.root)
        self._tools = tools
        self._turns = Turns(self.settled)  # one operation at a time
        self._record_lock = asyncio.Lock()  # one change of the record at a time
        self._doing: State | None = None
        self._held = SandboxMachine(directory, tools)
        self._merge = LayerMerge(directory, tools)
        self._watcher: asyncio.Task[None] | None = None
        self._chosen: Chosen | None = None  # of one that was warmed up
        self._ending: asyncio.Task[None] | None = None  # of a machine that was paused
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def id(self) -> SandboxId:
        """Its id."""
        return self.record.id

    @property
    def state(self) -> State:
        """What it is doing now: a passing state, or the one of its record."""
        return self._doing or self.record.state

    # -- operations ----------------------------------------------------------------------------------------

    async def launch(self, *, cold: bool = False, hooks: bool = True) -> None:
        """From STARTING to RUNNING. On failure nothing of it is left; the caller forgets it."""
        try:
            async with self._turns.tracked():
                start: Start = "launch" if self.record.parent is None else "fork"
                chosen = await self._held.bring_up(self.record, start if hooks else None, cold=cold)
                restored = self.record.memory is not None and not cold
                await self._settle_running(chosen, origin="restored" if restored else "booted")
        except BaseException:
            await to_the_end(self.discard())
            raise

    async def warm(self) -> None:
        """A machine that stands still, for a pool: STARTING all the while. On failure nothing of it is left."""
        try:
            async with self._turns.tracked():
                self._chosen = await self._held.warm_up(self.record)
        except BaseException:
            await to_the_end(self.discard())
            raise

    async def boot_image(self) -> Capture:
        """A capture with memory of a machine that has just booted; after it the sandbox can only be discarded."""
        async with self._turns.tracked():
            return await self._held.boot_image(self.record)

    async def claim(self, record: Record) -> None:
        """From ``warm`` to RUNNING, as what ``record`` describes; its id and files stay. Fails as ``launch``."""
        own = ("id", "disk", "memory", "serial", "driver", "mode")
        changes = {name: getattr(record, name) for name in Record.model_fields if name not in own}
        try:
            async with self._turns.tracked():
                assert self._chosen is not None
                self.record = self.record.model_copy(update=changes)
                await self._held.wake(self.record)
                await self._settle_running(self._chosen, origin="restored")
        except BaseException:
            await to_the_end(self.discard())
            raise

    async def publish(self, ports: tuple[PublishedPort, ...]) -> None:
        """Bring ports of a running sandbox to unix sockets, from now on and after every resume."""
        async with self._turns.tracked(), self._turns.lock:
            machine, _ = self._held.live(self.record)
            await self._held.network.publish(ports, machine.endpoint.host)
            await self._update(publish=ports)

    async def ended(self) -> None:
        """Return when its machine is dead; for one that nobody was given yet."""
        if self._held.machine is not None:
            await self._held.machine.wait()

    async def pause(
        self, *, limit_s: float | None = None, before: Before | None = "pause", memory: bool = True
    ) -> None:
        """Memory and disk go to files (without ``memory`` the disk alone, which a resume boots).

        The machine stands still and ends, which nobody but ``freed`` waits for.

        ``limit_s``: how long its guest may take to prepare. ``before`` None: its hooks do not run.
        """
        async with self._operation(Operation.PAUSE):
            capture = await self._held.capture(
                self.record, keep_running=False, memory=memory, limit_s=limit_s, before=before
            )
            try:
                record = await in_thread(adopt, self.directory, self.record, capture, self.directory)
                files = {"disk": record.disk, "memory": record.memory, "serial": record.serial}
                gone = {"address": None, "slot": None, "expires_at_s": None, **self.record.clock_stopped()}
                await self._update({**files, **gone}, state=State.PAUSED, answers=self._held.network.answers())
            except BaseException:
                await to_the_end(self._held.undo(self.record, capture, limit_s))
                raise
            await to_the_end(self._let_go())  # as one: it is paused, whoever gives up waiting

    async def _let_go(self) -> None:
        """Of the machine that a pause is through with; its end is nobody's wait."""
        await self._unwatch()  # what ends now did not die
        await self._held.network.close()  # nobody reaches a port of it any more
        self._ending = asyncio.create_task(self._after_pause(), name=f"end the machine of {self.id}")

    async def freed(self) -> None:
        """Return when the machine that a pause left behind is gone."""
        if self._ending is not None:
            await asyncio.wait([self._ending])

    async def _after_pause(self) -> None:
        """It is paused: what fails now fails no more than the tidying up."""
        try:
            await self._release()
            await asyncio.to_thread(self.directory.tidy, self.record)
        except (AenvError, OSError) as error:
            log.error("sandbox %s is paused, but not all of its machine could be removed: %s", self.id, error)
        self._merge.begin(self.record, self._stand_on_merged)

    async def _stand_on_merged(self, merged: Record) -> None:
        """Its memory layers became fewer while it was paused."""
        await self._update(memory=merged.memory, serial=merged.serial)
        await asyncio.to_thread(self.directory.tidy, self.record)

    async def resume(self, *, timeout_s: float, cold: bool = False, hooks: bool = True) -> None:
        """Back from its files, on a new machine."""
        async with self._operation(Operation.RESUME):
            cold = cold or self.record.memory is None
            await self._merge.stop()
            try:
                chosen = await self._held.bring_up(self.record, "resume" if hooks else None, cold=cold)
                origin = "booted" if cold else "restored"
                kept = None if cold else self.record.hooks  # what they were for is gone
                end: dict[str, object] = {"expires_at_s": time.time() + timeout_s, "timeout_s": timeout_s}
                await self._settle_running(chosen, origin=origin, hooks=kept, **end)
            except BaseException:
                await to_the_end(self._release())
                raise

    async def split(
        self, calls: Mapping[SandboxId, str], *, timeout_s: float
    ) -> tuple[list[HostedSandbox], float]:
        """Fork: a directory that is ready to launch for each id, and how long (ms) this one stood still.

        ``calls`` are the children's ids, each with the call that it is made by.
        """
        async with self._operation(Operation.FORK):
            capture = await self._held.capture(self.record, keep_running=True)
            children: list[HostedSandbox] = []
            try:
                for child, call in calls.items():
                    children.append(await self._child(child, call, capture, timeout_s))
                return children, capture.stopped_ms
            except BaseException:
                await to_the_end(_discard_all(children))
                raise
            finally:
                await asyncio.to_thread(capture.discard)

    async def snapshot(
        self, *, memory: bool, labels: dict[str, str], hooks: Hooks | None, before: Before | None = None
    ) -> tuple[Snapshot, float]:
        """Commit the present state; the snapshot and for how long (ms) the sandbox stood still."""
        async with self._operation(Operation.SNAPSHOT):
            capture = await self._held.capture(self.record, keep_running=True, memory=memory, before=before)
            try:
                snapshot = await in_thread(
                    commit, self._tools.repository, self.record, self.directory, capture, labels, hooks
                )
            finally:
                await asyncio.to_thread(capture.discard)
            await self._update(known_blobs(self.record, snapshot, capture), base_id=snapshot.id)
            return snapshot, capture.stopped_ms

    async def set_timeout(self, timeout_s: float, *, only_later: bool = False) -> None:
        """Its time ends ``timeout_s`` from now, or as before if that is later; paused ones have no end."""
        await self.settled()
        async with self._record_lock:
            if self.record.state is not State.RUNNING:
                raise self._refusal("set the timeout of")
            expires_at_s, present_s = time.time() + timeout_s, self.record.expires_at_s
            if not only_later or present_s is None or expires_at_s > present_s:
                await self._write({"expires_at_s": expires_at_s, "timeout_s": timeout_s})

    async def set_policy(self, policy: NetworkPolicy) -> None:
        """Change what it may reach, at once; a paused one has it from its resume on."""
        async with self._turns.tracked():
            await self.settled()
            async with self._turns.lock, self._record_lock:
                await self.freed()
                if self._turns.killed:
                    raise SandboxKilled(f"{self._subject()} was killed")
                if self.record.state is State.DEAD:
                    raise self._refusal("change the network of")
                before = self.record.policy
                await self._write({"policy": policy})  # first: a node that takes it over applies what is written
                try:
                    await self._held.network.apply(policy)
                except BaseException:
                    await to_the_end(self._write({"policy": before}))
                    raise

    async def end_episode(self) -> None:
        """Its ``max_seconds`` are over: the machine ends, and whoever asks is told why."""
        if self.record.time_over(time.time()):
            await self.end(f"time over: its {self.record.max_seconds:g} s (max seconds) are used up", "time_over")

    async def end(self, reason: str, ended_by: str = "") -> None:
        """The machine ends, and whoever asks is told why. Nothing happens to one that has none."""
        told = refusal("use", State.DEAD, subject=self._subject(), reason=reason, ended_by=ended_by)
        async with self._turns.tracked():
            await self._turns.take(told)
            try:
                if not self._turns.killed and self.record.state is State.RUNNING:
                    await self._die(reason, ended_by=ended_by)
            finally:
                self._turns.lock.release()

    async def console(self) -> str:
        """What its guest's console shows, at most 64 KiB; empty while it has no machine."""
        return await machine.console() if (machine := self._held.machine) is not None else ""

    async def discard(self) -> None:
        """Kill: interrupt what runs, end the machine, delete the directory. Idempotent."""
        self._turns.killed = self._held.abandoned = True
        await self._turns.cancel(SandboxKilled(f"{self._subject()} was killed"))
        await self.freed()
        await self._merge.stop()
        await self._end_machine()
        await in_thread(self.directory.remove)

    async def close(self) -> None:
        """Let go of it: the machine runs on and another node can attach it."""
        await self.freed()
        await self._merge.stop()
        await self._unwatch()
        await self._held.close()

    # -- taken over from a node that is gone ---------------------------------------------------------------

    async def settled(self) -> None:
        """Return when it is known what became of it."""
        await self._settled.wait()

    def begin_take_over(self) -> None:
        """From now on whoever asks for it waits until ``take_over`` is through."""
        self._settled.clear()

    async def take_over(self, slots: frozenset[SlotId] | None = None) -> bool:
        """Take it over; False when it was only half made and has been removed.

        ``slots`` are the network slots that were taken over too; None: nobody looked.
        """
        try:
            async with self._turns.tracked():
                return await self._take_over(slots)
        except Exception as error:
            if self._turns.killed:
                raise
            log.exception("sandbox %s could not be taken over", self.id)
            await self._die(f"it could not be taken over: {error}")
            return True
        finally:
            self._settled.set()

    async def _take_over(self, slots: frozenset[SlotId] | None) -> bool:
        record, network = self.record, self._held.network
        alive, gone = AFTER_CRASH[record.state]
        machine, reason = None, ""
        if alive is State.RUNNING:
            machine, reason = await self._held.attach(record)
        else:  # of a resume or a launch that was cut short
            await self._tools.sweep(self.directory.machine, record.driver)
        if gone is None:
            await asyncio.to_thread(self.directory.remove)
            return False
        if record.slot is not None and slots is not None:
            if record.slot in slots:
                await network.take_over(record.slot, record.policy)
            elif machine is not None:
                await machine.kill()
                machine, reason = None, "its network was gone"
        if machine is not None:
            await self._held.take_over(record, machine)
            self._watch(machine)
        elif gone is not record.state:
            await self._die(reason)
        await asyncio.to_thread(self.directory.tidy, self.record)
        return True

    # -- pieces --------------------------------------------------------------------------------------------

    def _subject(self) -> str:
        return f"sandbox {self.id}"

    def _refusal(self, what: str) -> AenvError:
        record = self.record
        return refusal(what, record.state, subject=self._subject(), reason=record.reason, ended_by=record.ended_by)

    @asynccontextmanager
    async def _operation(self, operation: Operation) -> AsyncIterator[Transition]:
        async with self._turns.tracked():
            await self.settled()
            async with self._turns.lock:
                await self.freed()
                if self._turns.killed:
                    raise SandboxKilled(f"{self._subject()} was killed")
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
        """What fails or is cancelled has not happened, on disk neither."""
        record = self.record.model_copy(update=dict(changes))
        try:
            await in_thread(self.directory.write, record)
        except BaseException:
            with suppress(AenvError, OSError):
                await in_thread(self.directory.keep, self.record)
            raise
        before, self.record = self.record, record
        self.log.changed(before, record)

    async def _settle_running(self, chosen: Chosen, *, origin: str, **more: object) -> None:
        """It runs: so it is written down, with ``more`` of the record."""
        machine, _ = self._held.live(self.record)
        address = Address(host=machine.endpoint.host, port=machine.endpoint.port)
        await self._held.network.publish(self.record.publish, address.host)
        update: dict[str, object] = {
            "state": State.RUNNING,
            "driver": chosen.driver.name,
            "mode": chosen.mode,
            "address": address,
            "launches": self.record.launches + 1,
            "slot": self._held.network.slot_id,
            "origin": origin,
            "reason": "",
            **self.record.clock_started(),
        }
        await self._update(update, **more)
        self._watch(machine)

    async def _child(self, child: SandboxId, call: str, capture: Capture, timeout_s: float) -> HostedSandbox:
        directory = SandboxDirectory(self.directory.root.parent / child)
        record = child_record(self.record, child, call, timeout_s)
        record = record.model_copy(update={"answers": self._held.network.answers()})

        def prepare() -> Record:
            directory.create()
            adopted = adopt(directory, record, capture, self.directory)
            directory.write(adopted)
            return adopted

        try:
            return HostedSandbox(directory, await in_thread(prepare), self._tools)
        except BaseException:
            await in_thread(directory.remove)
            raise

    # -- the machine's end ---------------------------------------------------------------------------------

    def _watch(self, machine: Machine) -> None:
        self._watcher = asyncio.create_task(self._bury(machine), name=f"watch {self.id}")

    async def _bury(self, machine: Machine) -> None:
        ended = await machine.wait()
        with suppress(NotFound):  # killed meanwhile
            async with self._turns.tracked(), self._turns.lock:
                if self._held.machine is not machine or self._turns.killed:
                    return
                self._watcher = None  # this task, which nobody must wait for in what follows
                last = [line for line in ended.console.splitlines() if line.strip()][-1:]
                await self._die(ended.reason + (f" (console: {last[0][:200]})" if last else ""))

    async def _die(self, reason: str, *, ended_by: str = "") -> None:
        """It has no machine any more, and says why. That is so also if it cannot be written: no engine is left."""
        log.warning("sandbox %s is dead: %s", self.id, reason)
        told: dict[str, object] = {"state": State.DEAD, "reason": reason, "ended_by": ended_by}
        kept_until_s = max(self.record.expires_at_s or 0, time.time() + KEEP_ENDED_S)
        gone = {"address": None, "slot": None, "time_over_at_s": None}
        changes = {**told, **gone, "expires_at_s": kept_until_s}
        try:
            await self._update(changes)  # first: whoever's call breaks off now finds the reason
        except (AenvError, OSError) as error:
            log.error("sandbox %s: its end could not be written down: %s", self.id, error)
            self.record = self.record.model_copy(update=changes)
        try:
            await to_the_end(self._end_machine())
        except (AenvError, OSError) as error:
            log.error("sandbox %s: not all of its machine could be removed: %s", self.id, error)

    async def _unwatch(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None and watcher is not asyncio.current_task():
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    async def _end_machine(self) -> None:
        """Also one that was never taken over, whatever the records say."""
        known = self._held.machine is not None
        await self._release()
        if not known:
            await self._tools.sweep(self.directory.machine, None)

    async def _release(self) -> None:
        await self._unwatch()
        await self._held.release()


async def _discard_all(sandboxes: list[HostedSandbox]) -> None:
    for result in await asyncio.gather(*(one.discard() for one in sandboxes), return_exceptions=True):
        if isinstance(result, Exception):
            log.error("a child that is not wanted could not be removed: %s", result)
