"""A trial sandbox, in a namespace of its own: which platform runs, and which workarounds this host needs.

Prints one JSON object. Standard library only. Everything it starts dies with it: it is process 1.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from aenv_run import disk_mount
from aenv_run.drivers.gvisor_children import Children
from aenv_run.drivers.gvisor_level import rootfs_annotations
from aenv_run.drivers.gvisor_supervisor import NET_SYSCTL, STATE

PLATFORMS = ("systrap", "ptrace")
ATTEMPT_S = 5.0


def config(root: str, envd: str, cgroup: str, image: str) -> dict[str, object]:
    """The smallest container that runs the daemon's ``version``."""
    kinds = ("pid", "ipc", "uts", "mount", "network")
    linux: dict[str, object] = {"namespaces": [{"type": kind} for kind in kinds]}
    if cgroup:
        linux["cgroupsPath"] = cgroup
        linux["resources"] = {"memory": {"limit": 256 << 20}}
    return {
        "ociVersion": "1.0.2",
        "annotations": rootfs_annotations(Path(image) if image else None),
        "root": {"path": root, "readonly": True},
        "process": {"user": {"uid": 0, "gid": 0}, "args": ["/run/envd", "version"], "cwd": "/"},
        "mounts": [
            {"destination": "/run", "type": "tmpfs", "source": "tmpfs"},
            {"destination": "/run/envd", "type": "bind", "source": envd, "options": ["bind", "ro"]},
        ],
        "linux": linux,
    }


class Trial:
    """Attempts with one runsc."""

    def __init__(self, runsc: str, envd: str, image: str, flags: tuple[str, ...], directory: Path) -> None:
        self._runsc, self._envd, self._flags, self._directory = runsc, envd, flags, directory
        self._image = image
        self._children = Children()
        self._children.start_reaping()
        self._count = 0

    def attempt(self, platform: str, *, network: str, cgroup: str = "") -> str:
        """Empty when the sandbox ran, else what went wrong."""
        self._count += 1
        bundle = self._directory / f"bundle{self._count}"
        root = bundle / "root"
        root.mkdir(parents=True)
        (bundle / "config.json").write_text(json.dumps(config(str(root), self._envd, cgroup, self._image)))
        argv = [self._runsc, "--root", STATE, f"--platform={platform}", f"--network={network}"]
        argv += [*self._flags, "--cpu-num-from-quota" if cgroup else "--ignore-cgroups"]
        argv += ["run", "-bundle", str(bundle), f"trial{self._count}"]
        code, said = self._children.run(argv, timeout_s=ATTEMPT_S)
        return "" if code == 0 else said[-600:] or f"exit code {code}"


def find(trial: Trial, cgroup: str) -> dict[str, object]:
    """What works, tried in the order of what is best. Without a ``cgroup``: no limits, and no network."""
    said = ""
    for platform in PLATFORMS:
        said = trial.attempt(platform, network="none")
        if not said:
            break
    else:
        return {"detail": f"no platform of runsc runs here: {said}"}
    if not cgroup:
        return {"platform": platform, "detail": f"{platform}, no limits by cgroups, no internet"}
    hide = bool(trial.attempt(platform, network="sandbox"))
    if hide:
        disk_mount.mount("tmpfs", NET_SYSCTL, "tmpfs", disk_mount.MS_RDONLY, "size=4k")
        if said := trial.attempt(platform, network="sandbox"):
            return {"detail": f"runsc runs here but not with a network: {said}"}
    limits = trial.attempt(platform, network="none", cgroup=cgroup)
    notes = [platform] + (["its test for the host's network is worked around"] if hide else [])
    notes.append(f"no limits by cgroups: {limits[-200:]}" if limits else "limits by cgroups")
    return {"platform": platform, "hide_net_sysctl": hide, "cgroups": not limits, "detail": ", ".join(notes)}


def main(directory: str, runsc: str, envd: str, cgroup: str, image: str, *flags: str) -> None:
    """Try, with scratch in ``directory``, and print the verdict."""
    try:
        disk_mount.mount("proc", "/proc", "proc")
        disk_mount.mount("tmpfs", STATE, "tmpfs")
    except OSError as error:  # a container hides parts of /proc, or its namespaces have no rights
        detail = f"a namespace of this user may not have a /proc of its own: {os.strerror(error.errno or 0)}"
        sys.stdout.write(json.dumps({"detail": detail}))
        return
    verdict = find(Trial(runsc, envd, image, flags, Path(directory)), cgroup)
    sys.stdout.write(json.dumps(verdict))
