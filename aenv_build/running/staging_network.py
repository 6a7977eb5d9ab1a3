"""The network of a build's machines: a slot where the recipe asks for internet and this host can give one."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from ipaddress import IPv4Address

from aenv_run.drivers.protocol import Caps, Driver
from aenv_run.errors import InvalidInput, Unsupported
from aenv_run.network import Lease, NetworkPolicy
from aenv_run.network.policy import NEVER, PRIVATE
from aenv_run.network.requirements import missing_privilege
from aenv_run.network.temporary import TemporaryNetwork
from aenv_run.paths import Home
from aenv_run.sandbox_network import NetworkSettings


def lacks_internet(home: Home, caps: Caps) -> str:
    """Why machines of such a driver cannot have internet here; empty when they can."""
    if caps.own_internet:
        return ""
    if caps.slot_kind is None:
        return "it has no internet here"
    if missing := missing_privilege():
        return f"it has no internet without a network slot: {missing}"
    return "" if NetworkSettings.read(home).mode != "none" else "it has no internet: networks are switched off"


@dataclass(frozen=True)
class Reach:
    """What a machine reaches: the internet or not, and ``hosts`` of the builder's place, private ones too."""

    internet: bool = False
    hosts: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.internet or bool(self.hosts)


NOTHING = Reach()


class StagingNetwork:
    """Of one build. Without slots the driver does what it can by itself."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._network: TemporaryNetwork | None = None

    async def plug(self, driver: Driver, reach: Reach) -> Lease | None:
        """A slot that reaches that and nothing else; None where none is needed or possible.

        ``Unsupported`` if a machine may reach some hosts alone and there is no slot to hold it to that.
        """
        kind = driver.caps.slot_kind
        if not reach:
            return None
        if kind is None or missing_privilege() or NetworkSettings.read(self._home).mode == "none":
            if not reach.internet:
                raise Unsupported(
                    f"a step may reach {', '.join(reach.hosts)} alone, and this host can make no network for that",
                    fix="build as root, or say 'machine: {internet: true}'",
                )
            return None
        policy = await self.policy(reach)
        if self._network is None:
            settings = NetworkSettings.read(self._home)
            self._network = TemporaryNetwork(self._home, settings.of_network, run_directory=settings.run_directory)
        return await self._network.acquire(kind, policy)

    async def policy(self, reach: Reach) -> NetworkPolicy:
        """Public addresses are open with the internet; a private one is named, and then all others are too."""
        for host in reach.hosts:
            if host not in self._addresses:
                self._addresses[host] = await _resolve(host)
        found = dict.fromkeys(address for host in reach.hosts for address in self._addresses[host])
        if reach.internet and not any(IPv4Address(address) in net for address in found for net in PRIVATE):
            return NetworkPolicy(internet=True)
        everything = ("0.0.0.0/0",) if reach.internet else ()
        return NetworkPolicy(internet=reach.internet, allow=(*everything, *reach.hosts, *found))

    async def unplug(self, lease: Lease) -> None:
        """Its machine is gone."""
        if self._network is not None:
            await self._network.release(lease.slot_id)

    async def close(self) -> None:
        """The build is over."""
        if self._network is not None:
            await self._network.close()


async def _resolve(host: str) -> tuple[str, ...]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, family=socket.AF_INET)
    except OSError as error:
        raise InvalidInput(
            f"{host}, which this build lends to its steps, has no address: {error.strerror}",
            fix="correct the setting AENV_BUILD_* that names it",
        ) from error
    addresses = tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
    if any(IPv4Address(address) in network for address in addresses for network in NEVER):
        raise InvalidInput(
            f"{host}, which this build lends to its steps, is this host itself, which no machine reaches",
            fix="name a proxy or index on another host",
        )
    return addresses
