"""The network of a build's machines: a slot where the recipe asks for internet and this host can give one."""

from __future__ import annotations

from aenv_run.drivers.protocol import Caps, Driver
from aenv_run.network import Lease, NetworkPolicy
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


class StagingNetwork:
    """Of one build. Without slots the driver does what it can by itself."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._network: TemporaryNetwork | None = None

    async def plug(self, driver: Driver, *, internet: bool) -> Lease | None:
        """A slot that reaches public addresses and nothing else; None where none is needed or possible."""
        kind = driver.caps.slot_kind
        if not internet or kind is None or missing_privilege():
            return None
        if self._network is None:
            settings = NetworkSettings.read(self._home)
            if settings.mode == "none":
                return None
            self._network = TemporaryNetwork(self._home, settings.of_network, run_directory=settings.run_directory)
        return await self._network.acquire(kind, NetworkPolicy(internet=True))

    async def unplug(self, lease: Lease) -> None:
        """Its machine is gone."""
        if self._network is not None:
            await self._network.release(lease.slot_id)

    async def close(self) -> None:
        """The build is over."""
        if self._network is not None:
            await self._network.close()
