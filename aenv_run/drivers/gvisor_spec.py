"""What runsc is told: the container's ``config.json`` and the global flags. Equal at boot and at every restore."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aenv_run.drivers.gvisor_level import rootfs_annotations
from aenv_run.drivers.protocol import NetworkSlot
from aenv_run.network.addressing import DNS
from aenv_run.types import MachineSpec

#: Names what a memory image depends on beside the facts: mounts and their order, flags, capabilities.
SHAPE = "gvisor/1 root run-tmpfs envd-bind"
#: The same where the disk is not mounted: what the guest writes is part of the memory image.
SHAPE_UNMOUNTED = "gvisor/1 erofs-memory run-tmpfs envd-bind"
DAEMON = "/run/aenv/envd"
DAEMON_PORT = 49983
#: Left in /tmp before a cold boot, removed by the daemon: see ``disk_mount.prepare_root``.
KEEP = ".aenv-keep"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OPEN_FILES = 1 << 16
#: The sandbox's kernel counts as well (some 22 threads when idle) and dies when it can start no more. A process of
#: the guest takes 0.6 MiB of its memory limit, so that with this many per MiB the memory ends first.
MIN_PROCESSES, PROCESSES_PER_MIB = 4096, 4
CPU_PERIOD_US = 100_000
#: All of them: they count against gVisor's kernel, not against the host's.
CAPABILITY_NAMES = (
    "AUDIT_CONTROL AUDIT_WRITE CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID IPC_LOCK IPC_OWNER KILL LEASE "
    "LINUX_IMMUTABLE MKNOD NET_ADMIN NET_BIND_SERVICE NET_BROADCAST NET_RAW SETFCAP SETGID SETPCAP SETUID "
    "SYS_ADMIN SYS_BOOT SYS_CHROOT SYS_NICE SYS_PACCT SYS_PTRACE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG"
)
CAPABILITIES = [f"CAP_{name}" for name in CAPABILITY_NAMES.split()]

Value = str | int | bool | list["Value"] | dict[str, "Value"]


@dataclass(frozen=True)
class Container:
    """One container to describe. ``image`` is the root file system that runsc reads by itself, below memory."""

    machine: MachineSpec
    root: Path
    envd: Path
    network: NetworkSlot | None
    cgroup: str | None
    image: Path | None = None


def _mount(destination: str, kind: str, *options: str, source: str | None = None) -> Value:
    return {"destination": destination, "type": kind, "source": source or kind, "options": list(options)}


def _mounts(envd: Path) -> list[Value]:
    return [
        _mount("/proc", "proc"),
        _mount("/dev", "tmpfs"),
        _mount("/sys", "sysfs", "nosuid", "noexec", "nodev", "ro"),
        _mount("/dev/shm", "tmpfs", "nosuid", "nodev", "mode=1777"),
        _mount("/dev/pts", "devpts"),
        _mount("/run", "tmpfs", "nosuid", "nodev", "mode=0755"),
        _mount(DAEMON, "bind", "bind", "ro", source=str(envd)),
    ]


def describe(container: Container) -> dict[str, Value]:
    """The OCI configuration."""
    network: dict[str, Value] = {"type": "network"}
    # Also without a slot: what is restored later on one has its resolver from here. Every slot's is the same.
    daemon = [DAEMON, "container", "--dns", DNS]
    if (slot := container.network) is not None:
        network["path"] = str(slot.guest_netns)
    namespaces: list[Value] = [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]
    linux: dict[str, Value] = {"namespaces": [*namespaces, network]}
    if container.cgroup is not None:
        linux["cgroupsPath"] = container.cgroup
        linux["resources"] = {
            "memory": {"limit": container.machine.memory_mib << 20},
            "cpu": {"quota": container.machine.cpus * CPU_PERIOD_US, "period": CPU_PERIOD_US},
            "pids": {"limit": max(MIN_PROCESSES, PROCESSES_PER_MIB * container.machine.memory_mib)},
        }
    sets: dict[str, Value] = {
        name: [*CAPABILITIES] for name in ("bounding", "effective", "inheritable", "permitted")
    }
    return {
        "ociVersion": "1.0.2",
        "annotations": {**rootfs_annotations(container.image)},
        "hostname": "sandbox",
        "root": {"path": str(container.root), "readonly": False},
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": [*daemon],
            "env": [f"PATH={PATH}", "HOME=/root"],
            "cwd": "/",
            "capabilities": sets,
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": OPEN_FILES, "soft": OPEN_FILES}],
        },
        "mounts": _mounts(container.envd),
        "linux": linux,
    }


def addresses(slot: NetworkSlot) -> str:
    """Commands for ``ip -batch`` in the guest's namespace. Some may be in place already: run them with -force."""
    address = slot.guest_address if "/" in slot.guest_address else f"{slot.guest_address}/24"
    return (
        f"link set lo up\naddr replace {address} dev {slot.device}\nlink set {slot.device} up\n"
        f"route replace default via {slot.gateway} dev {slot.device}\n"
    )


#: overlay2=none: files go to the disk. net-disconnect-ok: else any TCP connection breaks a checkpoint.
FLAGS = ("--overlay2=none", "--net-disconnect-ok", "--net-raw")


def flags(program: Path, platform: str, *, network: bool, cgroups: bool) -> list[str]:
    """runsc and its global flags."""
    return [
        str(program),
        f"--platform={platform}",
        f"--network={'sandbox' if network else 'none'}",
        *FLAGS,
        *(["--cpu-num-from-quota"] if cgroups else ["--ignore-cgroups"]),
    ]
