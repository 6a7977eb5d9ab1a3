"""What gVisor may do on this host, in three levels. Found by trying; standard library only."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from aenv_run.errors import InvalidInput

CAP_SYS_ADMIN, CAP_SETFCAP = 21, 31
VARIABLE = "AENV_GVISOR_LEVEL"
FUSE, LOOP = "/dev/fuse", "/dev/loop-control"
STORAGE = "qemu-storage-daemon"
ROOTFS = "dev.gvisor.spec.rootfs"
#: Where a distribution forbids what else every user may.
SYSCTLS = ("user/max_user_namespaces", "kernel/unprivileged_userns_clone")


class Level(StrEnum):
    """Best first. All but root run in a user namespace and mount no disk: see ``gvisor_root``."""

    ROOT = "root"
    USERNS = "userns"
    NONE = "none"

    @property
    def mounts(self) -> bool:
        """Whether the disk is mounted, and so written as the guest writes."""
        return self is Level.ROOT


@dataclass(frozen=True)
class Lack:
    """What a level lacks here."""

    what: str
    fix: str


def lacks(level: Level) -> list[Lack]:
    """All that it lacks, as far as looking tells; empty when it can be tried."""
    found = []
    if level is Level.ROOT:
        if os.geteuid() != 0:
            return [Lack("this user is not root", "run as root")]
        if not _capable(CAP_SYS_ADMIN):
            found.append(Lack("root may not mount here", "give the container the capability SYS_ADMIN"))
        if shutil.which(STORAGE) is None:
            found.append(Lack(f"{STORAGE} is not installed", "apt install qemu-utils"))
        if reason := _refused(LOOP):
            found.append(Lack(f"{LOOP}: {reason}", "modprobe loop; in a container: add the loop devices"))
    else:
        if os.geteuid() == 0 and not _capable(CAP_SETFCAP):  # user_namespaces(7)
            what = "root without the capability SETFCAP makes no user namespace"
            found.append(Lack(what, "run as another user, or give the container SETFCAP"))
        for name in SYSCTLS:
            if _text(Path("/proc/sys", name)) == "0":
                found.append(Lack("users may make no user namespaces", f"sysctl {name.replace('/', '.')}"))
    if level is not Level.NONE and (reason := _refused(FUSE)):
        fix = f"modprobe fuse; in a container: add the device; for users: chmod 0666 {FUSE}"
        found.append(Lack(f"{FUSE}: {reason}", fix))
    return found


def best() -> Level:
    """That of ``AENV_GVISOR_LEVEL``, else the best that lacks nothing that can be seen; the last, if all do."""
    if name := os.environ.get(VARIABLE):
        try:
            return Level(name)
        except ValueError as error:
            fix = f"use one of: {', '.join(Level)}"
            raise InvalidInput(f"{VARIABLE} is {name!r}, which is no level", fix=fix) from error
    return next((level for level in Level if not lacks(level)), Level.NONE)


def namespaces(level: Level, *, ephemeral: bool = False) -> list[str]:
    """The program in front of process 1 of a sandbox. Mounts of the host still come in, none goes out.

    ``ephemeral``: it ends with the process that started it, which a new user namespace makes the kernel forget.
    """
    alone = ["unshare", "--pid", "--fork", "--kill-child=KILL", "--mount", "--propagation", "slave", "--"]
    if level.mounts:
        return alone
    again = ["setpriv", "--pdeathsig", "KILL", "--"] if ephemeral else []
    return ["unshare", "--user", "--map-root-user", "--", *again, *alone]


def rootfs_annotations(image: Path | None) -> dict[str, str]:
    """How runsc is told to read an EROFS image and to keep writes in memory (runsc/boot/mount_hints.go)."""
    if image is None:
        return {}
    return {f"{ROOTFS}.source": str(image), f"{ROOTFS}.type": "erofs", f"{ROOTFS}.overlay": "memory"}


def _capable(number: int) -> bool:
    for line in _text(Path("/proc/self/status")).splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


def _refused(device: str) -> str:
    """Why it does not open; empty when it does."""
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return os.strerror(error.errno or 0)
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
