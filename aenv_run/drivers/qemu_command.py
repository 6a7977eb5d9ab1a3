"""QEMU's command lines. Facts are measured (QEMU 10.0.2, kernel 6.12, in software) unless a line says else.

Values that hold paths are given as JSON, so that no character of a path means anything to QEMU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from aenv_run import disk
from aenv_run.drivers.protocol import BootSpec
from aenv_run.drivers.qemu_ram import Handover
from aenv_run.nbd import DiskLayer

#: Names the virtual machine's shape in MemoryFacts. Change it whenever a device, their order, the machine type or
#: the way RAM is mapped changes: device state of another shape is then refused instead of half loaded.
#: "netdev-user" stands for user networking and for a tap alike: device state crosses both ways, since the tap has
#: no vnet_hdr (it would change the network card's features) and comes with the same sections (see ``tap``).
SHAPE = "qemu-microvm/2 serial-ringbuf virtio-blk netdev-user virtio-net virtio-balloon"
QMP_SOCKET = "qmp.sock"
CONSOLE_BYTES = 65536
DAEMON_PORT = 49983
GUEST_ADDRESS, GATEWAY, NAMESERVER = "10.0.2.15", "10.0.2.2", "10.0.2.3"
GUEST_MAC = "52:54:00:ae:00:01"
NETWORK = f"aenv.ip={GUEST_ADDRESS}/24 aenv.gw={GATEWAY} aenv.dns={NAMESERVER}"
#: Exactly 2 GiB with an initrd corrupts the initramfs on microvm, every time (2047 and 2052 MiB boot).
BROKEN_MEMORY_MIB, WORKING_MEMORY_MIB = 2048, 2052


@dataclass(frozen=True)
class Cpu:
    """How guest code runs: ``mode`` kvm or tcg."""

    mode: str
    tsc_khz: int

    @property
    def model(self) -> str:
        """QEMU's CPU model: in software all that QEMU knows, the same on every host."""
        return "host" if self.mode == "kvm" else "max"


def ram_bytes(memory_mib: int) -> int:
    """The RAM a machine gets: what was asked, but for the one size that does not boot."""
    return (WORKING_MEMORY_MIB if memory_mib == BROKEN_MEMORY_MIB else memory_mib) << 20


def shape(*, reporting: bool) -> str:
    """See SHAPE. A guest that reports free pages is not restored where nobody takes reports, nor the reverse."""
    return f"{SHAPE}{'-reporting' if reporting else ''}"


def kernel_command_line(cpu: Cpu) -> str:
    """reboot=t with panic=-1: a panic ends in a triple fault, which QEMU reports as SHUTDOWN."""
    words = ["console=ttyS0", "reboot=t", "panic=-1", "quiet", "no_timer_check", "random.trust_cpu=on"]
    if cpu.mode == "tcg" and cpu.tsc_khz:
        # Without it the guest calibrates its clock against an emulated timer and hangs at random when the
        # host is busy (3 of 4 boots; 0 of 40 with it). It also allows pit=off,pic=off.
        words.append(f"tsc_early_khz={cpu.tsc_khz}")
        # It is the host's own counter. The watchdog compares it with timer ticks, which a busy host makes late,
        # and lets the guest count such ticks instead: its clock fell seconds behind (measured).
        words.append("tsc=reliable")
    return " ".join([*words, "aenv.root=/dev/vda", NETWORK])


def network(internet: bool) -> str:
    """User networking. The host port is 0: the kernel picks a free one, read back by ``info usernet``.

    Without ``internet`` the guest is restricted: it can answer the forwarded port and reach nothing. With it
    the guest reaches whatever this process could, *the host's loopback as 10.0.2.2 included*: user networking
    has no finer control. A network slot (``tap``) has.
    """
    return json.dumps(
        {
            "type": "user",
            "id": "n0",
            "ipv6": False,
            "restrict": not internet,
            "hostfwd": [{"str": f"tcp:127.0.0.1:0-{GUEST_ADDRESS}:{DAEMON_PORT}"}],
        }
    )


def tap(descriptor: int) -> tuple[str, str]:
    """A network slot's tap, opened by this process and passed on. No vhost: it would need vnet_hdr, see SHAPE.

    User networking has a section of its own in the device state ("slirp"), which does not load where there is none
    (measured). So there is one here too, restricted and wired to nothing.
    """
    unused = {"type": "user", "id": "unused", "ipv6": False, "restrict": True}
    return json.dumps({"type": "tap", "id": "n0", "fd": str(descriptor), "vhost": False}), json.dumps(unused)


def common(
    program: Path,
    spec: BootSpec,
    layers: tuple[DiskLayer, ...],
    cpu: Cpu,
    ram: Handover,
    overlay: Path,
    overlay_name: str,
    netdevs: tuple[str, ...],
) -> list[str]:
    """What a boot and a restore share: it must be equal but for ``netdevs``, or the device state does not load."""
    size = ram_bytes(spec.machine.memory_mib)
    # share=off: writes stay in this process. readonly=on: the base can never change, not even through a
    # balloon's hole punching. rom=off: but the guest may write its private copy. Preloaded (engine/ram.c), QEMU
    # only thinks that it could write the base: it would not drop the private copy of a freed page otherwise.
    memory = {
        "qom-type": "memory-backend-file", "id": "mem", "size": size, "mem-path": str(ram.path),
        "share": False, "readonly": not ram.preloaded, "rom": "off",
    }  # fmt: skip
    # suppress-vmdesc and send-configuration=off: what xen-save-devices-state writes has neither, and
    # migrate-incoming loads it only when it expects neither.
    argv = [
        str(program),
        "-M", "microvm,acpi=on,pit=off,pic=off,rtc=on,suppress-vmdesc=on,memory-backend=mem",
        "-object", json.dumps(memory),
        "-accel", cpu.mode, "-cpu", cpu.model, "-m", f"{size >> 20}M", "-smp", str(spec.machine.cpus),
        "-nodefaults", "-no-user-config", "-display", "none",
        # A guest that breaks into this process cannot start another or gain privileges (seccomp).
        "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        "-global", "migration.send-configuration=off",
        # A guest that ends stays, stopped, so that its console can still be read; then the driver ends it.
        "-action", "reboot=shutdown,shutdown=pause,panic=pause",
        "-chardev", f"socket,id=qmp,path={QMP_SOCKET},server=on,wait=off", "-mon", "chardev=qmp,mode=control",
        # Bounded in memory: a hostile guest cannot fill the host's disk through its console.
        "-chardev", f"ringbuf,id=console,size={CONSOLE_BYTES}", "-serial", "chardev:console",
    ]  # fmt: skip
    for node in disk.graph(layers, overlay, overlay_name):
        argv += ["-blockdev", json.dumps(node)]
    argv += ["-device", f"virtio-blk-device,id=root,drive={overlay_name}"]
    argv += [part for netdev in netdevs for part in ("-netdev", netdev)]
    argv += ["-device", f"virtio-net-device,netdev=n0,mac={GUEST_MAC}"]
    # A freed page that is dropped has the base's bytes when it is used again. page-poison=off: a guest that counts
    # on the bytes of freed pages (init_on_free, page_poison) then reports none, by itself.
    balloon = {"driver": "virtio-balloon-device", "free-page-reporting": ram.preloaded, "page-poison": False}
    argv += ["-device", json.dumps(balloon)]
    return argv


def boot_arguments(kernel: Path, initramfs: Path, cpu: Cpu) -> list[str]:
    """For a cold boot."""
    return ["-kernel", str(kernel), "-initrd", str(initramfs), "-append", kernel_command_line(cpu)]


def restore_arguments() -> list[str]:
    """For a restore: neither kernel nor initramfs, they are in RAM (30 % less time to spawn)."""
    return ["-incoming", "defer"]
