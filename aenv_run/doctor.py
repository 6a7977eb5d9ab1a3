"""What this machine has and lacks: drivers, their requirements, the repository, the guest's files."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from aenv_run.config import open_repository, repository_directory, repository_name
from aenv_run.doctor_report import Check as Check
from aenv_run.doctor_report import DriverReport as DriverReport
from aenv_run.doctor_report import Report as Report
from aenv_run.drivers.select import all_probes, select
from aenv_run.errors import AenvError
from aenv_run.paths import Home
from aenv_run.sandbox_network import requirements_of
from aenv_run.store import Store
from aenv_run.store.posix_rights import concerns

#: Snapshots are counted to see whether they can be listed; in a bucket that takes a request for each thousand.
MAX_COUNTED = 1000
#: Of some recipes and commands alone: the program, its package, who needs it.
PROGRAMS = (
    ("mmdebstrap", "mmdebstrap", "recipes with a debootstrap base"),
    ("skopeo", "skopeo", "recipes whose base is an image, and aenv pull"),
    ("zstd", "zstd", "bases and layers that zstd compressed"),
    ("dot", "graphviz", "graphs with --format svg"),
)


async def examine(home: Home, driver: str = "auto") -> Report:
    """Look at everything; changes nothing that lasts. A home that cannot be used is a finding, not an error."""
    with ExitStack() as stack:
        probed = home
        if not _keeps_files(home):
            probed = Home(Path(stack.enter_context(TemporaryDirectory(prefix="aenv-doctor-"))))
        return await _examine(home, probed, driver)


async def _examine(home: Home, probed: Home, driver: str) -> Report:
    drivers = tuple(
        DriverReport(
            driver=probe.driver,
            usable=probe.usable,
            mode=probe.mode,
            why=probe.why,
            requirements=tuple(
                Check(name=r.name, present=r.present, detail=r.detail, fix=r.fix) for r in probe.requirements
            ),
        )
        for probe in await all_probes(probed)
    )
    network = tuple(
        Check(name=r.name, present=r.present, detail=r.detail, fix=r.fix) for r in await requirements_of(probed)
    )
    programs = tuple(_check_program(*program) for program in PROGRAMS)
    checks = tuple(await asyncio.to_thread(lambda: [_check_home(home), _check_repository(home)]))
    chosen: str | None = None
    try:
        selected = await select(driver, probed)
        chosen, why, fix = selected.probe.driver.value, selected.why, ""
    except AenvError as error:
        why, fix = error.message, error.fix
    return Report(
        home=str(home.root),
        chosen=chosen,
        why=why,
        fix=fix,
        drivers=drivers,
        checks=checks,
        network=network,
        programs=programs,
    )


def _keeps_files(home: Home) -> bool:
    """Whether probes can keep in it what they find."""
    try:
        home.cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return False
    return os.access(home.cache, os.W_OK)


def _check_program(program: str, package: str, needed_for: str) -> Check:
    found = shutil.which(program)
    detail = found or f"not installed; only for {needed_for}"
    return Check(
        name=program, present=found is not None, detail=detail, fix="" if found else f"apt install {package}"
    )


def _check_home(home: Home) -> Check:
    name = "home directory"
    try:
        home.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe = home.root / f".doctor-{secrets.token_hex(4)}"
        try:
            probe.write_bytes(b"x")
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        fix = "set AENV_HOME to a directory that you may write"
        return Check(name=name, present=False, detail=f"{home.root}: {error.strerror}", fix=fix)
    free = os.statvfs(home.root)
    free_gib = free.f_bavail * free.f_frsize / 2**30
    detail = f"{home.root} is writable, {free_gib:.1f} GiB free"
    return Check(name=name, present=free_gib >= 1, detail=detail, fix="" if free_gib >= 1 else "free some space")


def _check_repository(home: Home) -> Check:
    name = "repository"
    try:
        place = repository_name(None, home)
        repository = open_repository(None, home)
        count = sum(1 for _ in islice(repository.ids(), MAX_COUNTED))
        elsewhere = repository_directory(None, home) is None
        how = _how_it_is_written(repository.store) if elsewhere else ""
    except AenvError as error:
        return Check(name=name, present=False, detail=error.message, fix=error.fix)
    except OSError as error:
        return Check(name=name, present=False, detail=str(error), fix="see AENV_REPOSITORY and AENV_HOME")
    writable = elsewhere or _writable(home)
    more = " or more" if count == MAX_COUNTED else ""
    detail = f"{place}: {count}{more} snapshots" + (how if writable else ", not writable")
    detail += "".join(f"; WARNING: {one.detail} ({one.fix})" for one in concerns(repository.store))
    return Check(name=name, present=writable, detail=detail, fix="" if writable else f"make {place} writable")


def _how_it_is_written(store: Store) -> str:
    """Tried; raises if nothing can be written."""
    store.require_writable()
    if store.conditional:
        return ", conditional writes work"
    return ", only this home may write (writers=one)"


def _writable(home: Home) -> bool:
    if os.environ.get("AENV_REPOSITORY"):
        return True  # only a write could tell, and doctor writes to no shared place
    path = home.repository
    with suppress(OSError):
        return os.access(path if path.exists() else home.root, os.W_OK)
    return False
