"""The network of one node: warm slots, leases, and what is left of a node that was killed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path

from pydantic import Field, field_validator, model_validator

from aenv_run.errors import AenvError, InvalidInput, LimitReached, NotFound, Unsupported
from aenv_run.network.addressing import SlotId, SlotKind, UplinkPool, home_tag
from aenv_run.network.answers import Answers
from aenv_run.network.host import RUN_DIRECTORY, HostFacts, HostSide
from aenv_run.network.links import NumberTaken, Shape, configure_guest, create, destroy, namespaces, uplinks
from aenv_run.network.policy import NetworkPolicy
from aenv_run.network.requirements import missing_privilege
from aenv_run.network.resolver import Upstream
from aenv_run.network.slot import Lease, LiveSlot, own_networks
from aenv_run.network.state import SlotFiles, SlotRecord
from aenv_run.paths import Home
from aenv_run.types import Model

log = logging.getLogger(__name__)

MAX_BACKOFF_S = 30.0
#: Making slots takes processor time that the launches which take them need: so it waits until they are over.
QUIET_S = 0.5
#: As many as were taken within this time are kept warm, if that is more than the high water mark.
REMEMBERED_S, MAX_WARM = 60.0, 32


class NetworkConfig(Model):
    """Settings of a node's network."""

    uplink_pool: str = Field("100.96.0.0/16", description="addresses between the host and the sandboxes' routers")
    low_water: int = Field(1, ge=0, le=1024, description="refill at once when fewer slots than this are warm")
    high_water: int = Field(4, ge=0, le=1024, description="refill up to this many, or as were lately taken")
    always_denied: tuple[str, ...] = Field((), description="CIDRs that no policy may open, beside the host itself")
    nameservers: tuple[str, ...] = Field((), description="ask these instead of those of /etc/resolv.conf")
    host_poll_s: float = Field(30.0, gt=0, description="how often the host's interfaces are looked at again")

    @field_validator("always_denied")
    @classmethod
    def _networks_only(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        if domains := NetworkPolicy(deny=entries).deny_domains:
            raise InvalidInput(f"always_denied takes CIDRs, not {domains[0]!r}")
        return entries

    @model_validator(mode="after")
    def _ordered(self) -> NetworkConfig:
        if self.high_water < self.low_water:
            raise ValueError("high_water must not be below low_water")
        return self


@dataclass(frozen=True)
class Reconciled:
    """What a start found: slots taken over, slots removed, and those of live sandboxes that are gone."""

    adopted: frozenset[SlotId] = frozenset()
    removed: frozenset[SlotId] = frozenset()
    lost: frozenset[SlotId] = frozenset()


@dataclass(frozen=True)
class PoolStatus:
    """For people and metrics. ``last_error`` is the last failure to make or remove a slot."""

    warm: dict[SlotKind, int]
    leased: tuple[SlotId, ...]
    releasing: int
    capacity: int
    last_error: str = ""


class Network:
    """All slots of one home. One process at a time; slots outlive it."""

    def __init__(
        self,
        home: Home,
        config: NetworkConfig = NetworkConfig(),  # noqa: B008 - frozen
        *,
        kinds: tuple[SlotKind, ...] = ("tap",),
        run_directory: Path = RUN_DIRECTORY,
    ) -> None:
        self._config = config
        self._pool = UplinkPool.parse(config.uplink_pool)
        self._files = SlotFiles(home.network / "slots")
        self._tag = home_tag(home.root)
        self._host = HostSide(self._pool, self._tag, run_directory)
        self._upstream = Upstream(config.nameservers)
        self._facts: HostFacts | None = None
        self._warm: dict[SlotKind, deque[LiveSlot]] = {kind: deque() for kind in kinds}
        self._leased: dict[SlotId, LiveSlot] = {}
        self._numbers: set[int] = set()  # taken, by any home
        self._next = 0
        self._wanted = {kind: asyncio.Event() for kind in kinds}
        self._taken_s: dict[SlotKind, deque[float]] = {kind: deque(maxlen=MAX_WARM) for kind in kinds}
        self._background: list[asyncio.Task[None]] = []
        self._releases: set[asyncio.Task[None]] = set()
        self._last_error = ""

    async def start(self, live: Collection[SlotId] = ()) -> Reconciled:
        """Take over the slots in ``live`` (those of sandboxes that still run), remove all others of this home.

        ``Unsupported`` without the privileges; ``Conflict`` when the uplink pool overlaps a route of the host.
        """
        if reason := missing_privilege():
            raise Unsupported(
                f"a network of its own for each sandbox is not possible here: {reason}", fix="run as root"
            )
        self._facts = await self._host.prepare()
        result = await self._reconcile(frozenset(live))
        self._numbers = {int(name.rpartition("-")[2], 16) for name in await uplinks()}
        await self._host.forget_openings({self._pool.router_end(number) for number in self._numbers})
        for taken_s in self._taken_s.values():
            taken_s.append(time.monotonic())  # the launch that started this node comes first
        self._background = [asyncio.create_task(self._follow_host())]
        self._background += [asyncio.create_task(self._refill(kind)) for kind in self._warm]
        return result

    async def _reconcile(self, live: frozenset[SlotId]) -> Reconciled:
        records = self._files.slots()
        present = namespaces(self._tag)
        aliases = [link.ifalias for link in (await uplinks()).values()]
        linked = {SlotId(alias) for alias in aliases if alias.startswith(f"{self._tag}-")}
        adopted: set[SlotId] = set()
        for slot_id in live & present & linked:
            if (record := records.get(slot_id)) and await self._adopt(record):
                adopted.add(slot_id)
        removed = (set(records) | present | linked) - adopted
        for slot_id in removed:
            await destroy(slot_id)
            self._files.remove(slot_id)
        return Reconciled(frozenset(adopted), frozenset(removed), live - adopted)

    async def _adopt(self, record: SlotRecord) -> bool:
        slot = LiveSlot(record, self._pool, self._files, self._upstream)
        try:
            await slot.take_over(self._own())
        except (AenvError, OSError) as error:
            # Its sandbox loses the network rather than running on under rules that nobody vouches for.
            self._last_error = str(error)
            log.warning("network slot %s could not be taken over: %s", record.slot_id, error)
            await slot.close()
            return False
        self._leased[record.slot_id] = slot
        return True

    def _own(self) -> tuple[IPv4Network, ...]:
        assert self._facts is not None, "start() comes first"
        always = NetworkPolicy(deny=self._config.always_denied).deny_networks
        return (*own_networks(self._pool, self._facts.addresses), *always)

    async def acquire(self, kind: SlotKind) -> Lease:
        """A slot with the default policy: at once when one is warm, else it is made now (tens of milliseconds)."""
        warm = self._warm.get(kind)
        slot = warm.popleft() if warm else await self._make(kind)
        self._leased[slot.lease.slot_id] = slot
        if warm is not None:
            self._taken_s[kind].append(time.monotonic())
            self._wanted[kind].set()
        return slot.lease

    def lease(self, slot_id: SlotId) -> Lease:
        """The lease of a slot in use, also one that was taken over."""
        return self._slot(slot_id).lease

    def policy(self, slot_id: SlotId) -> NetworkPolicy:
        """The policy in force."""
        return self._slot(slot_id).record.policy

    def answers(self, slot_id: SlotId) -> Answers:
        """What its guest was told for which names: for ``apply`` of a fork or resume, whose guest knows them."""
        return self._slot(slot_id).answers

    async def apply(self, slot_id: SlotId, policy: NetworkPolicy, *, answers: Answers | None = None) -> None:
        """Put ``policy`` in force now; established connections that it denies are cut."""
        await self._slot(slot_id).apply(policy, answers, self._own())

    async def refit(self, slot_id: SlotId) -> None:
        """Give the guest's end (kind "veth") its address and route again, before another engine starts in it."""
        if self._slot(slot_id).record.kind == "veth":
            await configure_guest(slot_id)

    async def release(self, slot_id: SlotId) -> None:
        """The sandbox is gone: its slot is removed in the background. Idempotent."""
        if slot := self._leased.pop(slot_id, None):
            task = asyncio.create_task(self._remove(slot))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def close(self) -> None:
        """Remove the warm slots; those in use stay for the next ``start``. The last home puts the host back."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        warm = [slot for slots in self._warm.values() for slot in slots]
        for slots in self._warm.values():
            slots.clear()
        for slot in warm:
            await self._remove(slot)
        await asyncio.gather(*self._releases)
        for slot in self._leased.values():
            await slot.close()
        self._leased.clear()
        await self._host.dispose()

    async def status(self) -> PoolStatus:
        """How the pool stands."""
        return PoolStatus(
            warm={kind: len(slots) for kind, slots in self._warm.items()},
            leased=tuple(sorted(self._leased)),
            releasing=len(self._releases),
            capacity=len(self._pool.numbers),
            last_error=self._last_error,
        )

    def _slot(self, slot_id: SlotId) -> LiveSlot:
        try:
            return self._leased[slot_id]
        except KeyError:
            raise NotFound(f"network slot {slot_id} is not in use", fix="acquire one first") from None

    async def _make(self, kind: SlotKind) -> LiveSlot:
        while True:
            number = self._number()
            try:
                return await self._make_numbered(SlotId.of(self._tag, number), kind)
            except NumberTaken:
                continue  # it stays in _numbers: another home has it
            except BaseException:
                self._numbers.discard(number)
                raise

    async def _make_numbered(self, slot_id: SlotId, kind: SlotKind) -> LiveSlot:
        assert self._facts is not None, "start() comes first"
        slot = LiveSlot(SlotRecord(slot_id=slot_id, kind=kind), self._pool, self._files, self._upstream)
        self._files.write(slot.record)  # first: a killed node's half-made slot is found by it
        try:
            await create(Shape(slot_id, kind, self._pool, self._facts.mtu), slot.first_rules(self._own()))
            try:
                await slot.listen()
            except BaseException:
                await asyncio.shield(destroy(slot_id))
                raise
        except BaseException:
            self._files.remove(slot_id)
            raise
        return slot

    def _number(self) -> int:
        """The next free one, round and round: an address is not used again at once."""
        numbers = self._pool.numbers
        for _ in numbers:
            self._next = self._next + 1 if self._next + 1 in numbers else numbers.start
            if self._next not in self._numbers:
                self._numbers.add(self._next)
                return self._next
        raise LimitReached(
            f"all {len(numbers)} slots of the uplink pool {self._pool.network} are in use",
            fix="set a larger uplink pool, or end sandboxes",
        )

    async def _remove(self, slot: LiveSlot) -> None:
        slot_id = slot.lease.slot_id
        failures = 0
        for part in (slot.close(), destroy(slot_id), slot.shut_on_host()):
            try:
                await part
            except (AenvError, OSError) as error:
                failures += 1
                self._last_error = str(error)
                log.warning("network slot %s could not be removed: %s", slot_id, error)
        if not failures:  # else its record and number stay, and the next start tries again
            self._files.remove(slot_id)
            self._numbers.discard(slot_id.number)

    async def _refill(self, kind: SlotKind) -> None:
        slots, backoff_s = self._warm[kind], 0.5
        while True:
            while len(slots) < self._wanted_count(kind):
                await self._until_due(kind)
                try:
                    slots.append(await self._make(kind))
                    backoff_s = 0.5
                except (AenvError, OSError) as error:
                    self._last_error = str(error)
                    log.warning("a warm network slot could not be made: %s", error)
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)
            await self._wanted[kind].wait()
            self._wanted[kind].clear()

    def _wanted_count(self, kind: SlotKind) -> int:
        high, since_s = self._config.high_water, time.monotonic() - REMEMBERED_S
        return max(high, sum(taken_s > since_s for taken_s in self._taken_s[kind])) if high else 0

    async def _until_due(self, kind: SlotKind) -> None:
        while len(self._warm[kind]) >= self._config.low_water:
            left_s = self._taken_s[kind][-1] + QUIET_S - time.monotonic()
            if left_s <= 0:
                return
            self._wanted[kind].clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wanted[kind].wait(), left_s)

    async def _follow_host(self) -> None:
        while True:
            await asyncio.sleep(self._config.host_poll_s)
            try:
                self._facts, reloaded = await self._host.refresh()
                for slot in list(self._leased.values()) if reloaded else []:
                    await slot.open_on_host()
            except (AenvError, OSError) as error:
                self._last_error = str(error)
                log.warning("the host's network could not be read: %s", error)
