"""What of this host gVisor depends on: runsc, its version, what works; found by trying, remembered per boot."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import aenv_run
from aenv_run import process
from aenv_run.drivers import gvisor_cgroup, gvisor_spec
from aenv_run.drivers.guest_image import FIX
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


async def verdict(home: Home) -> Verdict:
    """Runs the daemon's ``version`` in a sandbox; remembered until the host boots again or runsc changes."""
    version, envd = await runsc_version(home), envd_path(home)

    async def find() -> str:
        argv = [*namespaces(), *python("aenv_run.drivers.gvisor_probe", "main(*sys.argv[1:])")]
        name = f"aenv-trial-{os.getpid()}"
        trial = [str(runsc_path()), str(envd), gvisor_cgroup.spec_path(name), *gvisor_spec.FLAGS]
        try:
            done = await process.run([*argv, *trial], timeout_s=TRIAL_TIMEOUT_S)
        except CommandTimeout:
            return json.dumps({"detail": f"a trial sandbox did not end in {TRIAL_TIMEOUT_S:g} s"})
        finally:
            await asyncio.to_thread(gvisor_cgroup.remove, gvisor_cgroup.directories(name))
        if done.exit_code != 0:
            said = done.stderr.decode(errors="replace").strip()[-500:]
            return json.dumps({"detail": f"a trial sandbox failed (exit code {done.exit_code}): {said}"})
        return done.stdout.decode()

    found = json.loads(await remembered(home, "gvisor", f"2:{version}:{os.geteuid()}", find))
    return Verdict(
        str(found.get("platform", "")),
        bool(found.get("hide_net_sysctl", False)),
        bool(found.get("cgroups", False)),
        str(found.get("detail", "")),
    )


def namespaces() -> list[str]:
    """The program in front of process 1 of a sandbox. Mounts of the host still come in, none goes out."""
    return ["unshare", "--pid", "--fork", "--kill-child=KILL", "--mount", "--propagation", "slave", "--"]


def _program(name: str, fix: str) -> Requirement:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin")
    return Requirement(name, found is not None, found or "not installed", "" if found else fix)


def _whole_root() -> Requirement:
    """In a chroot the kernel refuses the user namespace that runsc makes (user_namespaces(7): EPERM)."""
    if process.in_chroot(Path("/proc/self/mountinfo").read_text()):
        fix = "run on the machine itself or in a container, not in a chroot"
        return Requirement("root directory", False, "it is no mount point, as in a chroot", fix)
    return Requirement("root directory", True, "is a mount point")


def _device(path: str, fix: str) -> Requirement:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return Requirement(path, False, os.strerror(error.errno or 0), fix)
    return Requirement(path, True, "opens")


async def requirements(home: Home) -> tuple[Requirement, ...]:
    """Everything that gVisor needs of the host."""
    items = [_program("runsc", PACKAGE)]
    if items[0].present:
        try:
            items.append(Requirement("runsc version", True, await runsc_version(home)))
        except AenvError as error:
            items.append(Requirement("runsc version", False, error.message, PACKAGE))
    items += [
        _program("qemu-storage-daemon", "apt install qemu-utils"),
        _program("e2fsck", "apt install e2fsprogs"),
        _program("unshare", "apt install util-linux"),
        _device("/dev/fuse", "modprobe fuse; in a container: add the device /dev/fuse"),
        _device("/dev/loop-control", "modprobe loop; in a container: add the loop devices"),
    ]
    items.append(_whole_root())
    root = os.geteuid() == 0
    items.append(Requirement("root", root, "yes" if root else "no", "" if root else "run as root"))
    try:
        items.append(Requirement("guest daemon", True, str(envd_path(home))))
    except MissingDependency as error:
        items.append(Requirement("guest daemon", False, error.message, FIX))
    return tuple(items)


async def probe(home: Home) -> Probe:
    """Whether gVisor works here, and how."""
    needs = await requirements(home)
    if missing := [one for one in needs if not one.present]:
        why = "; ".join(f"{one.name}: {one.detail}" for one in missing)
        return Probe(DriverName.GVISOR, False, "none", why, needs)
    found = await verdict(home)
    trial = Requirement(
        "a trial sandbox", bool(found.platform), found.detail, "" if found.platform else "see docs"
    )
    needs = (*needs, trial)
    if not found.platform:
        return Probe(DriverName.GVISOR, False, "none", found.detail, needs)
    return Probe(
        DriverName.GVISOR, True, found.platform, f"runsc runs sandboxes at native speed ({found.detail})", needs
    )
