"""Base from a Debian package archive, by mmdebstrap: it makes a tar, which is unpacked as any other archive."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from aenv_build.language.recipe import Debootstrap
from aenv_run import process
from aenv_run.errors import BaseUnavailable, MissingDependency
from aenv_run.types import Architecture

TIMEOUT_S = 3600.0
#: Files that the installation itself writes get this time, so that the same packages give the same bytes.
EPOCH_S = 1_735_689_600
#: mmdebstrap leaves the host's own names in them; the guest gets its own at every start.
HOST_FILES = ("etc/hostname", "etc/resolv.conf")
#: Root mode mounts /proc, /sys and /dev below its directory. In namespaces of its own, mounts and processes go
#: with it however it ends: nothing stays mounted, and removing the directory cannot reach the host's files.
_DIE_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")
_NAMESPACES = ("--pid", "--fork", "--kill-child=KILL", "--mount", "--mount-proc")


def alone(mountinfo: str) -> tuple[str, ...]:
    """What runs a program in namespaces of its own, which end with it and with us.

    ``mountinfo`` is /proc/self/mountinfo: in a chroot the root directory need not be a mount point, and then its
    propagation cannot be changed.
    """
    propagation = "unchanged" if process.in_chroot(mountinfo) else "private"
    return (*_DIE_WITH_US, "unshare", *_NAMESPACES, "--propagation", propagation, "--")


async def bootstrap(base: Debootstrap, architecture: Architecture, target: Path) -> None:
    """Write the tar of a fresh installation to ``target`` (a name that ends with .tar)."""
    if shutil.which("mmdebstrap") is None:
        raise MissingDependency("mmdebstrap is not installed", fix="apt-get install mmdebstrap")
    root = os.geteuid() == 0
    mode = "root" if root else "unshare"
    argv = [
        *(alone(Path("/proc/self/mountinfo").read_text()) if root else ()),
        "mmdebstrap",
        "--quiet",
        f"--mode={mode}",
        f"--variant={base.variant}",
        f"--architectures={architecture}",
    ]
    if base.packages:
        argv.append("--include=" + ",".join(sorted(set(base.packages))))
    argv.append("--customize-hook=rm -f " + " ".join(f'"$1/{name}"' for name in HOST_FILES))
    argv.append('--customize-hook=: > "$1/etc/machine-id"')
    argv += [base.suite, str(target), *([base.mirror] if base.mirror else [])]
    environment = {
        **os.environ,
        "SOURCE_DATE_EPOCH": str(EPOCH_S),
        "LC_ALL": "C.UTF-8",
        "TMPDIR": str(target.parent),
    }
    done = await process.run(argv, timeout_s=TIMEOUT_S, env=environment)
    if done.exit_code != 0:
        target.unlink(missing_ok=True)
        lines = done.stderr.decode(errors="replace").strip().splitlines()[-20:]
        raise BaseUnavailable(
            f"cannot make {base.suite} from {base.mirror or 'the default mirror'} "
            f"(mmdebstrap exited with {done.exit_code}):\n" + "\n".join(f"  | {line}" for line in lines),
            fix="check that the mirror is reachable and that suite and packages are spelt right",
        )
