"""What ``aenv doctor`` found, as values: also read by clients that are no machine for sandboxes."""

from __future__ import annotations

from aenv_run.drivers.protocol import DriverName
from aenv_run.types import Model


class Check(Model):
    """One thing that was looked at."""

    name: str
    present: bool
    detail: str
    fix: str = ""


class DriverReport(Model):
    """One driver: whether it works here, how guest code would run, and what it needs."""

    driver: DriverName
    usable: bool
    mode: str
    why: str
    requirements: tuple[Check, ...]


class Report(Model):
    """All of it. ``chosen`` is the driver that auto picks, None when none works.

    ``network`` is what a network of its own for each sandbox needs; without it they run with no way out.
    ``programs`` are those that some recipes and pictures need and nothing else does.
    """

    home: str
    chosen: str | None
    why: str
    fix: str = ""
    drivers: tuple[DriverReport, ...]
    checks: tuple[Check, ...]
    network: tuple[Check, ...] = ()
    programs: tuple[Check, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether sandboxes can be launched and snapshots committed."""
        return self.chosen is not None and all(check.present for check in self.checks)
