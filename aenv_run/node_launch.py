"""How a sandbox comes to be: from a request to a record, from a record to a directory with its files."""

from __future__ import annotations

import asyncio

from pydantic import ValidationError

from aenv_run.catalog import Resolved
from aenv_run.errors import InvalidInput, Unsupported
from aenv_run.node_requests import record_of
from aenv_run.node_wire import CreateRequest, PoolRequest, PoolSettings
from aenv_run.paths import Home
from aenv_run.sandbox import HostedSandbox
from aenv_run.sandbox_files import link_image, link_snapshot
from aenv_run.sandbox_record import Record, SandboxDirectory
from aenv_run.sandbox_tools import Tools
from aenv_run.signatures import Trust, require_signed
from aenv_run.snapshot import MemoryFacts, Snapshot
from aenv_run.threads import in_thread, to_the_end
from aenv_run.types import SnapshotId


class Launcher:
    """Makes sandboxes that are not running yet."""

    def __init__(self, home: Home, tools: Tools) -> None:
        self._home, self._tools = home, tools
        self._imaging: set[SnapshotId] = set()

    async def plan(self, request: CreateRequest, resolved: Resolved) -> tuple[Snapshot, Record]:
        """What a request comes to; refused here if it cannot be had."""
        snapshot = await self._trusted(resolved, request.signed_by)
        memory = snapshot.memory.facts if snapshot.memory and not request.cold else None
        chosen = await self._tools.choose(memory)
        network = self._tools.network
        policy = network.policy(chosen.driver, request.internet, request.allow, request.deny)
        if request.publish:
            network.require_ports(chosen.driver)
        return snapshot, record_of(request, resolved, snapshot, chosen, policy)

    async def make(self, record: Record, snapshot: Snapshot, *, memory: bool) -> HostedSandbox:
        """With its files in place. Failure leaves nothing.

        With ``memory`` of a snapshot that has none, that is the warm image of its first boot here, if any.
        """
        directory = SandboxDirectory(self._home.sandboxes / record.id)
        facts = await self._image_facts(record, snapshot) if memory else None
        try:
            record = await in_thread(self._prepare, directory, record, snapshot, memory, facts)
        except BaseException:
            await in_thread(directory.remove)
            raise
        return HostedSandbox(directory, record, self._tools)

    async def warm(self, snapshot_id: SnapshotId) -> HostedSandbox:
        """For a pool: a machine that stands ready and is in no list. Failure leaves nothing."""
        snapshot, record = await self.plan(CreateRequest(snapshot=snapshot_id), Resolved(snapshot_id=snapshot_id))
        _require_memory(snapshot, snapshot_id.short)
        sandbox = await self.make(record, snapshot, memory=True)
        try:
            await sandbox.warm()
        except BaseException:  # also a cancel while it waits for its turn
            await to_the_end(sandbox.discard())
            raise
        return sandbox

    async def pool_settings(self, request: PoolRequest) -> PoolSettings:
        """What a request for a pool comes to."""
        resolved = await asyncio.to_thread(self._tools.catalog.resolve, request.snapshot)
        snapshot = await self._trusted(resolved, request.signed_by)
        _require_memory(snapshot, request.snapshot)
        reference = f"{resolved.name}:{resolved.version}" if resolved.name else resolved.snapshot_id.short
        try:
            return PoolSettings(
                snapshot_id=resolved.snapshot_id, reference=reference, low=request.low, high=request.high
            )
        except ValidationError as error:
            raise InvalidInput(str(error.errors()[0]["msg"]), fix="--low is at most --high") from error

    async def _trusted(self, resolved: Resolved, signed_by: tuple[str, ...]) -> Snapshot:
        """The snapshot, before anything of it is used; ``Untrusted`` when a key is required and none signed it."""
        repository, id = self._tools.repository, resolved.snapshot_id
        await asyncio.to_thread(require_signed, repository, id, Trust.of_texts(signed_by))
        return await asyncio.to_thread(repository.snapshot, id)

    # -- warm images ---------------------------------------------------------------------------------------

    async def _image_facts(self, record: Record, snapshot: Snapshot) -> MemoryFacts | None:
        """What an image of a disk-only snapshot would be bound to here; None where there can be none."""
        driver = self._tools.named(record.driver)
        if self._tools.images is None or snapshot.memory is not None or not driver.caps.memory_snapshot:
            return None
        return await driver.facts(record.machine) if record.machine == snapshot.machine else None

    async def keep_image(self, snapshot_id: SnapshotId) -> None:
        """After a first boot: boot once more and keep its memory, so that the next launch restores it."""
        if (images := self._tools.images) is None or snapshot_id in self._imaging:
            return
        self._imaging.add(snapshot_id)
        try:
            snapshot, record = await self.plan(
                CreateRequest(snapshot=snapshot_id), Resolved(snapshot_id=snapshot_id)
            )
            facts = await self._image_facts(record, snapshot)
            if facts is None or await in_thread(images.has, snapshot_id, facts):
                return
            await in_thread(images.drop, snapshot_id, facts)  # what cannot be used would be in the way
            layers = self._tools.layers
            watch = layers.watch(snapshot.disk) if layers is not None else None
            sandbox = await self.make(record, snapshot, memory=False)
            try:
                capture = await sandbox.boot_image()
                if watch is not None and (why := await in_thread(watch.unread, "an image of the first boot")):
                    raise why
                await in_thread(images.keep, snapshot_id, capture)
            finally:
                await to_the_end(sandbox.discard())
        finally:
            self._imaging.discard(snapshot_id)

    async def drop_image(self, record: Record, snapshot: Snapshot) -> None:
        """Remove the image of a snapshot that could not be restored."""
        facts = await self._image_facts(record, snapshot)
        if self._tools.images is not None and facts is not None:
            await in_thread(self._tools.images.drop, record.snapshot_id, facts)

    # -- pieces --------------------------------------------------------------------------------------------

    def _prepare(
        self,
        directory: SandboxDirectory,
        record: Record,
        snapshot: Snapshot,
        memory: bool,
        facts: MemoryFacts | None,
    ) -> Record:
        directory.create()
        driver = self._tools.named(record.driver)
        disk, kept, serial = link_snapshot(
            self._tools.cache,
            snapshot,
            directory,
            memory=memory,
            is_far=lambda blob: self._tools.is_far(blob, driver),
        )
        if facts is not None and self._tools.images is not None:
            with self._tools.images.find(record.snapshot_id, facts) as image:
                if image is not None:
                    disk, kept, serial = link_image(image, directory, disk, serial)
        ready = record.model_copy(update={"disk": disk, "memory": kept, "serial": serial})
        directory.write(ready)
        return ready


def _require_memory(snapshot: Snapshot, what: str) -> None:
    if snapshot.memory is None:
        raise Unsupported(
            f"{what} has no memory, so nothing of it can stand ready",
            fix="make a snapshot with memory: start it, then `aenv snapshot create`",
        )
