"""What of this host gVisor depends on: runsc, its version, what works; found by trying, remembered per boot."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import aenv_run
from aenv_run import erofs, process
from aenv_run.drivers import gvisor_cgroup, gvisor_level, gvisor_spec
from aenv_run.drivers.guest_image import FIX
from aenv_run.drivers.gvisor_level import Level
from aenv_run.drivers.protocol import DriverName, Probe, Requirement
from aenv_run.drivers.qemu_host import architecture, remembered
from aenv_run.errors import AenvError, CommandTimeout, MissingDependency
from aenv_run.paths import Home

PACKAGE = "apt install runsc (on Debian 12 with -t bookworm-backports), or gvisor.dev/docs/user_guide/install"
TRIAL_TIMEOUT_S = 20.0
SOURCE_ROOT = Path(aenv_run.__file__).resolve().parent.parent


@dataclass(frozen=True)
class Verdict:
    """What the trial found. ``platform`` is empty when nothing worked."""

    platform: str
    hide_net_sysctl: bool
    cgroups: bool
    detail: str


def runsc_path() -> Path:
    """The runsc program; MissingDependency when there is none."""
    found = shutil.which("runsc")
    if found is None:
        raise MissingDependency("runsc is not installed", fix=PACKAGE)
    return Path(found).resolve()


def envd_path(home: Home) -> Path:
    """The guest daemon; MissingDependency when it was not built."""
    path = home.guest() / f"envd-{architecture()}"
    if not path.is_file():
        raise MissingDependency(f"the guest daemon {path} is missing", fix=FIX)
    return path.resolve()


def python(module: str, call: str) -> list[str]:
    """A start of our own code in a fresh interpreter, as bare and fast as it gets: standard library only."""
    code = f"import sys; sys.path.insert(0, {str(SOURCE_ROOT)!r}); from {module} import main; {call}"
    return [sys.executable, "-I", "-S", "-c", code]


async def runsc_version(home: Home) -> str:
    """As runsc prints it: ``0.0~20240729.0``."""
    path = runsc_path()
    facts = path.stat()

    async def find() -> str:
        done = await process.check([str(path), "--version"], what="cannot ask runsc's version", timeout_s=20.0)
        match = re.search(r"version (\S+)", done.stdout.decode(errors="replace"))
        if not match:
            raise MissingDependency(f"{path} does not say its version", fix=PACKAGE)
        return match.group(1)

    return await remembered(home, "runsc-version", f"{path}:{facts.st_size}:{facts.st_mtime_ns}", find)


async def verdict(home: Home, level: Level) -> Verdict:
    """Runs the daemon's ``version`` in a sandbox; remembered until the host boots again or runsc changes."""
    version, envd = await runsc_version(home), envd_path(home)

    async def find() -> str:
        argv = [
            *gvisor_level.namespaces(level),
            *python("aenv_run.drivers.gvisor_probe", "main(*sys.argv[1:])"),
        ]
        name = f"aenv-trial-{os.getpid()}" if level.mounts else ""
        group = gvisor_cgroup.spec_path(name) if name else ""
        with tempfile.TemporaryDirectory(prefix="aenv-trial-") as directory:
            image = Path(directory, "root.erofs")
            erofs.write_empty(image)
            programs = [str(runsc_path()), str(envd)]
            trial = [directory, *programs, group, "" if level.mounts else str(image), *gvisor_spec.FLAGS]
            try:
                done = await process.run([*argv, *trial], timeout_s=TRIAL_TIMEOUT_S)
            except CommandTimeout:
                return json.dumps({"detail": f"a trial sandbox did not end in {TRIAL_TIMEOUT_S:g} s"})
            finally:
                if name:
                    await asyncio.to_thread(gvisor_cgroup.remove, gvisor_cgroup.directories(name))
        if done.exit_code != 0:
            said = done.stderr.decode(errors="replace").strip()[-500:]
            return json.dumps({"detail": f"a trial sandbox failed (exit code {done.exit_code}): {said}"})
        return done.stdout.decode()

    found = json.loads(await remembered(home, f"gvisor-{level}", f"3:{version}:{os.geteuid()}", find))
    return Verdict(
        str(found.get("platform", "")),
        bool(found.get("hide_net_sysctl", False)),
        bool(found.get("cgroups", False)),
        str(found.get("detail", "")),
    )


def _program(name: str, fix: str) -> Requirement:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin")
    return Requirement(name, found is not None, found or "not installed", "" if found else fix)


def _whole_root() -> Requirement:
    """In a chroot the kernel refuses the user namespace that runsc makes (user_namespaces(7): EPERM)."""
    if process.in_chroot(Path("/proc/self/mountinfo").read_text()):
        fix = "run on the machine itself or in a container, not in a chroot"
        return Requirement("root directory", False, "it is no mount point, as in a chroot", fix)
    return Requirement("root directory", True, "is a mount point")


def _levels(used: Level) -> list[Requirement]:
    """What each level lacks. One that works is enough, so none of them is required."""
    found = []
    for level in Level:
        name, lacks = f"level {level}", gvisor_level.lacks(level)
        detail = "; ".join(lack.what for lack in lacks) or ("is used" if level is used else "is there")
        found.append(Requirement(name, not lacks, detail, "; ".join(lack.fix for lack in lacks)))
    return found


async def requirements(home: Home) -> tuple[Requirement, ...]:
    """Everything that gVisor needs of the host, whatever its level."""
    items = [_program("runsc", PACKAGE)]
    if items[0].present:
        try:
            items.append(Requirement("runsc version", True, await runsc_version(home)))
        except AenvError as error:
            items.append(Requirement("runsc version", False, error.message, PACKAGE))
    items += [
        _program("qemu-img", "apt install qemu-utils"),
        _program("e2fsck", "apt install e2fsprogs"),
        _program("debugfs", "apt install e2fsprogs"),
        _program("unshare", "apt install util-linux"),
    ]
    items.append(_whole_root())
    try:
        items.append(Requirement("guest daemon", True, str(envd_path(home))))
    except MissingDependency as error:
        items.append(Requirement("guest daemon", False, error.message, FIX))
    return tuple(items)


TRIAL_FIX = "see docs/limits.md, Without root"


async def probe(home: Home, level: Level) -> Probe:
    """Whether gVisor works here at this level, and how."""
    common, levels = await requirements(home), _levels(level)
    needs = (*common, *levels)
    if missing := [one for one in needs if not one.present and (one in common or one.name == f"level {level}")]:
        why = "; ".join(f"{one.name}: {one.detail}" for one in missing)
        return Probe(DriverName.GVISOR, False, "none", why, needs)
    found = await verdict(home, level)
    works = bool(found.platform)
    trial = Requirement(f"a trial sandbox at level {level}", works, found.detail, "" if works else TRIAL_FIX)
    needs = (*needs, trial)
    if not found.platform:
        return Probe(DriverName.GVISOR, False, "none", found.detail, needs)
    return Probe(
        DriverName.GVISOR,
        True,
        found.platform,
        f"runsc runs sandboxes at native speed (level {level}: {found.detail})",
        needs,
    )
