"""What one sandbox holds while it has a machine: the machine, its guest, its network."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from aenv_run.capture import Capture
from aenv_run.drivers.protocol import BootSpec, Machine, MachineState, RestoreSpec
from aenv_run.errors import AenvError, BootFailed, Conflict, CorruptData, RestoreIncompatible, SandboxDead
from aenv_run.guest import Guest, Identity
from aenv_run.memory_depth import within_depth
from aenv_run.sandbox_files import open_layers
from aenv_run.sandbox_hooks import Before, Start, run_before, run_hooks
from aenv_run.sandbox_network import SandboxNetwork
from aenv_run.sandbox_record import Record, SandboxDirectory
from aenv_run.sandbox_tools import COLD_FIX, Chosen, Tools
from aenv_run.threads import in_thread, to_the_end

log = logging.getLogger(__name__)

#: A restored daemon answers in milliseconds; on a busy host without KVM it needs seconds.
READY_TIMEOUT_S = 60.0
BOOT_TIMEOUT_S = 180.0
#: How long a guest may take to take its identity again before it is left as it is.
REATTACH_TIMEOUT_S = 20.0
#: How long an engine that does not answer is asked again before it is given up.
ATTACH_TIMEOUT_S = 60.0


class SandboxMachine:
    """The record is not its own: each method is given the one that counts."""

    def __init__(self, directory: SandboxDirectory, tools: Tools) -> None:
        self.network = SandboxNetwork(tools.network)
        self.machine: Machine | None = None
        self.guest: Guest | None = None
        self.abandoned = False  # by a kill: nothing is put right any more
        self._directory = directory
        self._tools = tools

    def live(self, record: Record) -> tuple[Machine, Guest]:
        """Both, or ``SandboxDead``."""
        if self.machine is None or self.guest is None:
            raise SandboxDead(f"sandbox {record.id} has no machine")
        return self.machine, self.guest

    # -- start ---------------------------------------------------------------------------------------------

    async def bring_up(self, record: Record, start: Start | None, *, cold: bool) -> Chosen:
        """A machine from the record's files whose guest has its identity, so that others may call it.

        If it is restored, the hooks for this ``start`` have run too (None: none do).
        """
        memory = None if cold else record.memory
        chosen = await self._tools.choose(memory.facts if memory else None, record.driver)
        restored = memory is not None
        async with self._tools.starts, self._readable():
            self.machine = machine = await self._start(record, chosen, cold=cold)
            async with _came_up(record, machine):
                await self._introduce(record, machine, restored=restored)
        await self._greeted(record, machine, start if restored else None)
        return chosen

    async def warm_up(self, record: Record) -> Chosen:
        """A machine restored from the record's files that stands still. Its daemon has answered once: what comes
        with a first answer (pages, translated code) is behind it. It has no identity, so nobody may call it."""
        memory = record.memory
        chosen = await self._tools.choose(memory.facts if memory else None, record.driver)
        async with self._tools.starts, self._readable():
            self.machine = machine = await self._start(record, chosen, cold=False)
            async with self._tools.guests(machine.endpoint, None) as guest:
                await guest.wait_ready(READY_TIMEOUT_S)
            await machine.pause()
        return chosen

    async def boot_image(self, record: Record) -> Capture:
        """Boot, and capture before anybody has used it, with memory. The machine stays stopped."""
        chosen = await self._tools.choose(None, record.driver)
        async with self._tools.starts, self._readable():
            self.machine = machine = await self._start(record, chosen, cold=True)
            async with self._tools.guests(machine.endpoint, None) as guest:
                await guest.wait_ready(READY_TIMEOUT_S)
                await guest.settle()
                await guest.detach()
        return await machine.capture(self._directory.capturing, memory=True, keep_running=False)

    async def wake(self, record: Record) -> None:
        """Make the machine that ``warm_up`` left that of ``record``: its network, its identity, its hooks."""
        if (machine := self.machine) is None:
            raise SandboxDead(f"sandbox {record.id} has no machine")
        await self.network.settle(record.policy)
        await machine.resume()
        async with _came_up(record, machine):
            await self._introduce(record, machine, restored=True)
        await self._greeted(record, machine, "launch")

    @asynccontextmanager
    async def _readable(self) -> AsyncIterator[None]:
        """A machine that does not come up because its disk cannot be read says that, and not what came of it."""
        try:
            yield
        except (SandboxDead, CorruptData) as error:
            if troubles := await in_thread(self._tools.troubles, self._directory):
                why = troubles[0]
                raise type(why)(f"the disk cannot be read: {why.message}", fix=why.fix) from error
            raise

    async def _greeted(self, record: Record, machine: Machine, start: Start | None) -> None:
        """It is who it is: run its hooks, which may take long, so nobody else's start waits for them."""
        if self.guest is not None and start is not None:
            async with _came_up(record, machine):
                await run_hooks(record, self.guest, start)

    async def _start(self, record: Record, chosen: Chosen, *, cold: bool) -> Machine:
        driver = chosen.driver
        memory = self._directory.memory_paths(record)
        served = driver.caps.served_layers
        disk = await in_thread(
            open_layers, self._tools.layers, self._tools.cache, record, self._directory, served=served
        )
        directory = await in_thread(self._directory.fresh_machine)
        slot = await self.network.plug(record.policy, record.answers, driver)
        internet = record.policy.internet
        boot = BootSpec(record.machine, disk, directory, internet, slot, timeout_s=BOOT_TIMEOUT_S)
        if record.memory is None or cold:
            return await driver.boot(boot)
        restore = RestoreSpec(**vars(boot), memory=memory, facts=record.memory.facts)
        try:
            return await driver.restore(restore)
        except RestoreIncompatible as error:
            raise RestoreIncompatible(error.message, fix=COLD_FIX) from error

    async def _introduce(self, record: Record, machine: Machine, *, restored: bool) -> None:
        """The first call that the guest gets is already this one: to ask before whether it answers costs as much.

        It may be repeated: the same identity again changes nothing.
        """
        self.guest = guest = self._tools.guests(machine.endpoint, None)
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while True:
            try:
                return await identify(record, guest, restored=restored)
            except SandboxDead:
                if time.monotonic() > deadline_s or await machine.state() is MachineState.DEAD:
                    raise
            await asyncio.sleep(0.005)

    # -- captures ------------------------------------------------------------------------------------------

    async def capture(
        self,
        record: Record,
        *,
        keep_running: bool,
        memory: bool = True,
        limit_s: float | None = None,
        before: Before | None = None,
    ) -> Capture:
        """Detach (at most ``limit_s``), capture, with ``memory`` or the disk alone.

        Unless it stays stopped, give the guest its identity back.

        ``before``: what its own hooks are run for first; None: none are.
        """
        machine, guest = self.live(record)
        if before is not None:
            await run_before(record, guest, before, limit_s)
        await in_thread(self._directory.tidy, record)  # what a failed operation could not remove
        if not memory and keep_running:
            await guest.sync()
            return await machine.capture(self._directory.capturing, memory=False)
        try:
            try:
                async with asyncio.timeout(limit_s):
                    await guest.detach()
            except TimeoutError as error:
                raise SandboxDead(f"the daemon of sandbox {record.id} does not answer") from error
            capture = await machine.capture(self._directory.capturing, memory=memory, keep_running=keep_running)
            below = self._directory.memory_paths(record)
            if memory:
                capture = await within_depth(self._tools.named(record.driver), capture, below)
        except BaseException:
            await to_the_end(self.run_on(record, limit_s))
            raise
        if keep_running:
            try:
                await identify(record, guest)
            except BaseException:
                await to_the_end(self.undo(record, capture, limit_s))
                raise
        return capture

    async def undo(self, record: Record, capture: Capture, limit_s: float | None = None) -> None:
        """After a failed operation: nothing of the capture stays, and the machine runs on."""
        await asyncio.to_thread(capture.discard)
        try:
            await asyncio.to_thread(self._directory.tidy, record)
        except OSError as error:  # the next capture tries again
            log.warning("sandbox %s: files of a failed operation stay for now: %s", record.id, error)
        await self.run_on(record, limit_s)

    async def run_on(self, record: Record, limit_s: float | None = None) -> None:
        """After a failed operation: the machine as it was. One that died meanwhile is for the watcher."""
        machine, guest = self.machine, self.guest
        if self.abandoned or machine is None or guest is None:
            return
        try:
            async with asyncio.timeout(limit_s or REATTACH_TIMEOUT_S):
                await machine.resume()
                await identify(record, guest)
        except (AenvError, OSError) as error:
            log.warning("sandbox %s does not answer after a failed operation: %s", record.id, error)

    # -- a machine of a former node ------------------------------------------------------------------------

    async def attach(self, record: Record) -> tuple[Machine | None, str]:
        """The machine that runs, or why it cannot be had; then what may be left of it has been ended."""
        directory, reason = self._directory.machine, "its engine ended while no node was watching"
        deadline_s = time.monotonic() + ATTACH_TIMEOUT_S
        while True:
            try:
                machine = await self._tools.named(record.driver).attach(directory)
                break
            except Conflict as error:  # it does not answer, on a busy host perhaps not yet
                machine, reason = None, f"its engine did not answer: {error.message}"
                if time.monotonic() > deadline_s:
                    break
                await asyncio.sleep(1.0)
            except (AenvError, OSError) as error:
                machine, reason = None, f"its engine could not be taken over: {error}"
                break
        if machine is None and await self._tools.sweep(directory, record.driver) and "ended while" in reason:
            reason = "its engine could not be taken over, because its own record (machine.json) is damaged or gone"
        return machine, reason

    async def take_over(self, record: Record, machine: Machine) -> None:
        """A machine of a former node. It may stand still or have forgotten its token: half a pause does that."""
        self.machine = machine
        self.guest = self._tools.guests(machine.endpoint, record.access_token)
        try:
            if self._tools.layers is not None:
                await in_thread(self._tools.layers.go_on, self._directory.below)
            async with asyncio.timeout(REATTACH_TIMEOUT_S):
                if await machine.state() is MachineState.PAUSED:
                    await machine.resume()
                await identify(record, self.guest)
        except (AenvError, OSError) as error:
            log.warning("sandbox %s does not answer after it was attached: %s", record.id, error)
        try:
            await self.network.publish(record.publish, machine.endpoint.host)
        except (AenvError, OSError) as error:
            log.warning("sandbox %s: its ports are not published again: %s", record.id, error)

    # -- the end -------------------------------------------------------------------------------------------

    async def release(self) -> None:
        """End the machine and give all back; a step that fails does not keep the others from being done."""
        machine, self.machine = self.machine, None
        guest, self.guest = self.guest, None
        async with AsyncExitStack() as ends:
            ends.push_async_callback(in_thread, self._directory.drop_below)
            ends.push_async_callback(self.network.unplug)
            if machine is not None:
                ends.push_async_callback(machine.kill)
            if guest is not None:
                ends.push_async_callback(guest.aclose)

    async def close(self) -> None:
        """Let go of it: the machine runs on."""
        await self.network.close()
        if self.guest is not None:
            await self.guest.aclose()


@asynccontextmanager
async def _came_up(record: Record, machine: Machine) -> AsyncIterator[None]:
    """A guest that dies here never came up."""
    try:
        yield
    except SandboxDead as error:
        console = await machine.console()
        tail = "\n".join(console.splitlines()[-10:])
        raise BootFailed(f"sandbox {record.id} did not come up: {error.message}\n{tail}".rstrip()) from error


async def identify(record: Record, guest: Guest, *, restored: bool = False) -> None:
    """Give the guest the identity of its record."""
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
