"""Which driver to use: the best that really works here, and why. A new engine is one more entry in ``ENGINES``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aenv_run.drivers.gvisor import GvisorDriver
from aenv_run.drivers.protocol import Caps, Driver, DriverName, Probe
from aenv_run.drivers.qemu import QemuDriver
from aenv_run.errors import DriverUnavailable, InvalidInput, Unsupported
from aenv_run.paths import Home

#: Best first, as ``auto`` tries them.
ENGINES: tuple[tuple[DriverName, Callable[[Home], Driver]], ...] = (
    (DriverName.QEMU, QemuDriver),
    (DriverName.GVISOR, GvisorDriver),
)


@dataclass(frozen=True)
class Selected:
    """The driver to use; ``why`` is one sentence for people."""

    driver: Driver
    probe: Probe
    why: str


def all_drivers(home: Home) -> dict[DriverName, Driver]:
    """Every driver of this build by name, whether or not it works here. They hold nothing."""
    return {engine: make(home) for engine, make in ENGINES}


async def all_probes(home: Home) -> list[Probe]:
    """Every engine's verdict, best first."""
    return [await make(home).probe() for _, make in ENGINES]


async def select(
    name: str = "auto", home: Home | None = None, *, lacks: Callable[[Caps], str] = lambda caps: ""
) -> Selected:
    """The named driver; with ``auto`` the first that runs at native speed here, else the first that works.

    ``lacks`` says what a driver's capabilities lack for what is to be done; ``auto`` passes such a one by.
    """
    home = home or Home.default()
    wanted = _wanted(name)
    slow: Selected | None = None
    refused: list[str] = []
    for engine, make in ENGINES:
        if wanted is not None and engine is not wanted:
            continue
        driver = make(home)
        probe = await driver.probe()
        why = "" if probe.usable else probe.why
        if probe.usable and wanted is None:
            why = lacks(driver.caps)
        if why:
            refused.append(f"{engine}: {why}")
            continue
        found = Selected(driver, probe, f"{engine} ({probe.mode}): {probe.why}")
        if wanted is not None or driver.caps.native_speed:
            passed = f"; before {slow.probe.driver}: {slow.probe.why}" if slow else ""
            return Selected(driver, probe, found.why + passed)
        slow = slow or found
    if slow is not None:
        return slow
    raise DriverUnavailable("no driver works here:\n  " + "\n  ".join(refused), fix="run `aenv doctor`")


def _wanted(name: str) -> DriverName | None:
    if name == "auto":
        return None
    existing = ", ".join(engine for engine, _ in ENGINES)
    try:
        wanted = DriverName(name)
    except ValueError as error:
        raise InvalidInput(f"no driver is called {name!r}", fix=f"use auto or one of: {existing}") from error
    if wanted not in [engine for engine, _ in ENGINES]:
        raise Unsupported(f"the driver {name} is not part of this build of aenv", fix=f"use auto or: {existing}")
    return wanted
