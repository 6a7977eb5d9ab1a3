"""The network of a node's sandboxes: a slot for each where the host can give one, and their published ports.

Without slots (no root, or switched off) a driver gives what it can by itself: nothing but its daemon's port, and
that is what a sandbox gets. To ask for more is refused with the reason.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from aenv_run.drivers.protocol import Driver, NetworkSlot, Requirement
from aenv_run.errors import AenvError, InvalidInput, NotFound, Unsupported
from aenv_run.network import (
    Answers,
    Lease,
    Network,
    NetworkConfig,
    NetworkPolicy,
    PortForward,
    SlotId,
    TcpAddress,
    UnixAddress,
)
from aenv_run.network.forward import PublishedPort
from aenv_run.network.host import RUN_DIRECTORY
from aenv_run.network.requirements import requirements
from aenv_run.network.state import SlotFiles
from aenv_run.network.temporary import remove_abandoned
from aenv_run.paths import Home

log = logging.getLogger(__name__)

NEEDS_ROOT = "run the node as root, see `aenv doctor`"


class NetworkSettings(NetworkConfig):
    """``<home>/network/config.json``: how the sandboxes of this home get their network."""

    mode: Literal["auto", "none"] = Field("auto", description="none: never a slot, as without root")
    run_directory: Path = Field(RUN_DIRECTORY, description="what all homes of this host share")

    @property
    def of_network(self) -> NetworkConfig:
        """The part that ``Network`` takes."""
        return NetworkConfig(**self.model_dump(exclude={"mode", "run_directory"}))

    @classmethod
    def read(cls, home: Home) -> NetworkSettings:
        """Those of the home; the defaults when it has none."""
        path = home.network / "config.json"
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return cls()
        except (ValidationError, OSError) as error:
            raise InvalidInput(f"{path}: {error}", fix="see docs/network.md for its fields") from error


async def requirements_of(home: Home) -> list[Requirement]:
    """What slots need here, for ``doctor``."""
    try:
        settings = NetworkSettings.read(home)
    except InvalidInput as error:
        return [Requirement("network settings", False, error.message, error.fix)]
    if settings.mode == "none":
        where = home.network / "config.json"
        return [Requirement("network settings", False, f"switched off in {where}", "set mode to auto there")]
    return await requirements(settings.uplink_pool)


class NodeNetwork:
    """What a node's sandboxes share. ``why`` says why none of them has a slot; empty when they may have.

    Each driver takes slots of its own kind, or none.
    """

    def __init__(
        self, network: Network | None, why: str, cleanup: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self._network = network
        self._cleanup = cleanup
        self.why = why

    @classmethod
    def absent(cls, why: str = "this node has no network for sandboxes") -> NodeNetwork:
        """No slots."""
        return cls(None, why)

    @classmethod
    def of(cls, home: Home, driver: Driver, others: Iterable[Driver] = ()) -> NodeNetwork:
        """By the home's settings and what the drivers take; slots of ``driver`` are kept warm.

        ``start`` comes next.
        """
        settings, kind = NetworkSettings.read(home), driver.caps.slot_kind
        config = settings.of_network
        why = ""
        if settings.mode == "none":
            why = f"it is switched off in {home.network / 'config.json'}"
        elif not any(one.caps.slot_kind for one in (driver, *others)):
            why = _takes_none(driver)
        if why and not SlotFiles(home.network / "slots").slots():
            return cls(None, why)
        # Slots of before are still taken care of, though no new ones are made.
        kinds = () if why or kind is None else (kind,)
        shared = settings.run_directory
        cleanup = functools.partial(remove_abandoned, home, config, run_directory=shared)
        return cls(Network(home, config, kinds=kinds, run_directory=shared), why, cleanup)

    async def start(self, live: Collection[SlotId]) -> frozenset[SlotId] | None:
        """Take over the slots of sandboxes that run and remove all others; those taken over.

        None when slots cannot be had here: those that exist stay as they are.
        """
        if self._network is None:
            return None
        try:
            found = await self._network.start(live)
        except (AenvError, OSError) as error:  # no root, no nft, pool in use: safe, since then nothing is reached
            log.warning("sandboxes get no network of their own: %s", error)
            self._network, self.why = None, error.message if isinstance(error, AenvError) else str(error)
            return None
        if self._cleanup is not None:
            await self._cleanup()
        if found.removed or found.lost:
            log.info("network slots: removed %s, lost %s", sorted(found.removed), sorted(found.lost))
        return found.adopted

    def why_not(self, driver: Driver) -> str:
        """Why machines of this driver get no slots; empty when they do."""
        return self.why or ("" if driver.caps.slot_kind else _takes_none(driver))

    async def acquire(self, driver: Driver) -> tuple[Network, Lease] | None:
        """A slot of the driver's kind; None where it gets none."""
        kind = driver.caps.slot_kind
        if self.why_not(driver) or self._network is None or kind is None:
            return None
        return self._network, await self._network.acquire(kind)

    @property
    def existing(self) -> Network | None:
        """Where slots in use are kept, whether or not new ones are given."""
        return self._network

    def policy(
        self, driver: Driver, internet: bool | None, allow: Iterable[str], deny: Iterable[str]
    ) -> NetworkPolicy:
        """What was asked for; internet is on by default where sandboxes have slots, and off elsewhere."""
        wanted = not self.why_not(driver) if internet is None else internet
        policy = NetworkPolicy(internet=wanted, allow=tuple(allow), deny=tuple(deny))
        self.require(policy, driver)
        return policy

    def require(self, policy: NetworkPolicy, driver: Driver) -> None:
        """Refuse what a sandbox without a slot cannot have: the driver's own network would open the host."""
        if (why := self.why_not(driver)) and (policy.internet or policy.allow):
            raise Unsupported(
                f"sandboxes have no network of their own here, so no way out: {why}",
                fix=f"leave internet out, or {NEEDS_ROOT}",
            )

    def require_ports(self, driver: Driver) -> None:
        """Refuse ports where the host reaches nothing of a sandbox but its daemon."""
        if why := self.why_not(driver):
            raise Unsupported(f"the ports of a sandbox cannot be reached here: {why}", fix=NEEDS_ROOT)

    async def close(self) -> None:
        """Let go: slots in use stay."""
        if self._network is not None:
            await self._network.close()


def _takes_none(driver: Driver) -> str:
    return f"the driver {driver.name} takes none"


class SandboxNetwork:
    """What one sandbox holds of the network while it has a machine."""

    def __init__(self, node: NodeNetwork) -> None:
        self._node = node
        self._forwards: list[PortForward] = []
        self.slot_id: SlotId | None = None

    async def plug(self, policy: NetworkPolicy, answers: Answers, driver: Driver) -> NetworkSlot | None:
        """A slot with ``policy`` in force for a machine of ``driver``; None where it gets and needs none."""
        self._node.require(policy, driver)
        if (found := await self._node.acquire(driver)) is None:
            return None
        network, lease = found
        self.slot_id = lease.slot_id
        if policy != network.policy(lease.slot_id) or answers.names:
            await network.apply(lease.slot_id, policy, answers=answers)
        return lease.slot

    async def take_over(self, slot_id: SlotId, policy: NetworkPolicy) -> None:
        """The slot of a sandbox that a former node ran; the sandbox's record says which policy counts."""
        network = self._node.existing
        if network is None:
            return
        self.slot_id = network.lease(slot_id).slot_id
        if network.policy(slot_id) != policy:
            await network.apply(slot_id, policy)

    async def settle(self, policy: NetworkPolicy) -> None:
        """As ``apply``, but nothing is done when it is in force already."""
        network = self._node.existing
        if network is not None and self.slot_id is not None and network.policy(self.slot_id) != policy:
            await network.apply(self.slot_id, policy)

    async def apply(self, policy: NetworkPolicy) -> None:
        """Put another policy in force now, if there is a machine."""
        if (network := self._node.existing) is not None and self.slot_id is not None:
            await network.apply(self.slot_id, policy)

    def answers(self) -> Answers:
        """What the guest was told for which names."""
        network = self._node.existing
        if network is None or self.slot_id is None:
            return Answers()
        try:
            return network.answers(self.slot_id)
        except NotFound:
            return Answers()

    async def publish(self, ports: Iterable[PublishedPort], host: str) -> None:
        """Forward each port until ``unplug`` or ``close``."""
        for port in ports:
            forward = PortForward(UnixAddress(port.path), TcpAddress(host, port.port))
            await forward.start()
            self._forwards.append(forward)

    async def unplug(self) -> None:
        """The machine is gone: give the slot back. Idempotent."""
        await self.close()
        slot_id, self.slot_id = self.slot_id, None
        if slot_id is not None and (network := self._node.existing) is not None:
            await network.release(slot_id)

    async def close(self) -> None:
        """Stop forwarding; the slot stays."""
        forwards, self._forwards = self._forwards, []
        for forward in forwards:
            try:
                await forward.close()
            except (AenvError, OSError) as error:
                log.warning("a published port could not be closed: %s", error)
