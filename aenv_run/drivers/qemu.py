"""The QEMU driver: a kernel per sandbox, machine type microvm, KVM where it really works, software elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from aenv_run import disk, memory, memory_files, process
from aenv_run.drivers import guest_image, qemu_command, qemu_host, qemu_ram
from aenv_run.drivers.leftover import end_engines
from aenv_run.drivers.protocol import BootSpec, Caps, DriverName, Probe, RestoreSpec
from aenv_run.drivers.qemu_capture import overlay_name
from aenv_run.drivers.qemu_command import GUEST_ADDRESS, GUEST_MAC, Cpu
from aenv_run.drivers.qemu_machine import DEVICE_STATE_IN, LOG, QemuMachine, Record, forwarded_port, read_log
from aenv_run.drivers.qemu_ram import DEVICE_STATE, RamImage
from aenv_run.drivers.qmp import Qmp, QmpError
from aenv_run.errors import BootFailed, Conflict, InvalidInput, RestoreIncompatible, SandboxDead
from aenv_run.memory_layers import Piece
from aenv_run.network.namespace import open_tap
from aenv_run.paths import Home
from aenv_run.snapshot import MemoryFacts
from aenv_run.threads import in_thread
from aenv_run.types import MachineSpec

START_TIMEOUT_S, LOAD_TIMEOUT_S = 20.0, 30.0
POLL_S = 0.001


class QemuDriver:
    """See ``protocol.Driver``. Holds nothing but where the home is."""

    name = DriverName.QEMU

    def __init__(self, home: Home) -> None:
        self._home = home
        self._mode = "tcg"

    @property
    def caps(self) -> Caps:
        """Speed as found by the last ``probe``; the rest does not depend on the host."""
        return Caps(
            memory_snapshot=True,
            live_capture=True,
            shares_memory=True,
            native_speed=self._mode == "kvm",
            slot_kind="tap",
            own_internet=True,
            served_layers=True,
        )

    async def probe(self) -> Probe:
        """Does it work here."""
        found = await qemu_host.probe(self._home)
        self._mode = found.mode
        return found

    async def _cpu(self) -> Cpu:
        mode, _ = await qemu_host.mode(self._home)
        return Cpu(mode, await qemu_host.tsc_khz(self._home) if mode == "tcg" else 0)

    async def facts(self, machine: MachineSpec) -> MemoryFacts:
        """What a memory image made here and now would be bound to."""
        cpu = await self._cpu()
        image = await asyncio.to_thread(guest_image.prepare, self._home, qemu_host.architecture())
        shape = qemu_command.shape(reporting=qemu_host.ram_library(self._home) is not None)
        return MemoryFacts(
            driver=self.name,
            vmm_version=await qemu_host.qemu_version(self._home),
            mode="kvm" if cpu.mode == "kvm" else "tcg",
            # In software QEMU shows the same CPU on every host. KVM was never run: the host's own CPU.
            cpu=qemu_host.host_cpu() if cpu.mode == "kvm" else f"qemu:{cpu.model}",
            kernel_digest=image.kernel_digest,
            envd_digest=image.envd_digest,
            devices=f"{shape} cpus={machine.cpus} memory={machine.memory_mib}MiB",
            tsc_khz=cpu.tsc_khz,
        )

    async def check_restore(self, spec: RestoreSpec) -> None:
        """Raise ``RestoreIncompatible`` naming every fact that differs; nothing is started."""
        ram = RamImage.of(spec.memory)
        if spec.facts is None:
            raise InvalidInput("a restore needs the facts of its memory image")
        here = await self.facts(spec.machine)
        different = [
            f"{field}: it was made with {theirs}, here is {ours}"
            for field in MemoryFacts.model_fields
            if (theirs := getattr(spec.facts, field)) != (ours := getattr(here, field))
        ]
        expected = qemu_command.ram_bytes(spec.machine.memory_mib)
        if (size := ram.base.stat().st_size) != expected:
            different.append(f"RAM: the file has {size} bytes and the machine {expected}")
        if different:
            raise RestoreIncompatible(
                "the memory snapshot cannot be restored here:\n  " + "\n  ".join(different),
                fix="boot it cold from its disk part, or restore it where these are equal",
            )

    async def boot(self, spec: BootSpec) -> QemuMachine:
        """Cold boot; returns when the daemon answers."""
        image = await asyncio.to_thread(guest_image.prepare, self._home, qemu_host.architecture())
        ram = RamImage(zero_ram(self._home, qemu_command.ram_bytes(spec.machine.memory_mib)).absolute())
        facts = await self.facts(spec.machine)
        cpu = await self._cpu()
        arguments = qemu_command.boot_arguments(image.kernel.absolute(), image.initramfs.absolute(), cpu)
        machine = await self._start(spec, cpu, ram, facts, arguments)
        try:
            await machine.wait_booted(spec.timeout_s)
        except BaseException:
            machine.kill_now()
            raise
        return machine

    async def restore(self, spec: RestoreSpec) -> QemuMachine:
        """Resume from memory; returns when the virtual CPUs run."""
        await self.check_restore(spec)
        assert spec.facts is not None
        link = spec.directory / DEVICE_STATE_IN
        link.unlink(missing_ok=True)
        link.symlink_to(spec.memory[DEVICE_STATE].absolute())  # its path may hold anything, a URI may not
        ram, arguments = RamImage.of(spec.memory), qemu_command.restore_arguments()
        machine = await self._start(spec, await self._cpu(), ram, spec.facts, arguments)
        try:
            await _load(machine, min(spec.timeout_s, LOAD_TIMEOUT_S))
        except BaseException:
            machine.kill_now()
            raise
        return machine

    async def merge_memory(
        self, memory: Mapping[str, Path], target: Path, *, eager: bool
    ) -> dict[str, Path] | None:
        """The same memory image in fewer files."""
        return await qemu_ram.merged(memory, target, eager=eager)

    async def attach(self, directory: Path) -> QemuMachine | None:
        """Take over a machine that an earlier process started in ``directory``; None when it is gone."""
        return await QemuMachine.attach(directory)

    async def sweep(self, directory: Path) -> bool:
        """End whatever an earlier process left in ``directory``."""
        return await asyncio.to_thread(end_engines, directory)

    async def _start(
        self, spec: BootSpec, cpu: Cpu, image: RamImage, facts: MemoryFacts, arguments: list[str]
    ) -> QemuMachine:
        """Spawn QEMU and connect to it; on any way out but success no process is left."""
        slot = spec.network
        if slot is not None and (slot.kind, slot.mac, slot.guest_address) != ("tap", GUEST_MAC, GUEST_ADDRESS):
            raise InvalidInput(f"the qemu driver takes a network slot of kind tap whose guest is {GUEST_ADDRESS}")
        virtual_bytes = await in_thread(disk.check_chain, spec.disk, spec.machine.disk_mib)
        layers = disk.located(spec.disk, spec.directory)
        _clear(spec.directory)
        preload = qemu_host.ram_library(self._home)
        ram, whole = await in_thread(_prepare_ram, image, preload, spec.directory)
        overlay = Path(f"{overlay_name(1)}.qcow2")
        disk.write_overlay(spec.directory / overlay, virtual_bytes)
        tap = await open_tap(slot.router_netns, slot.device) if slot else None
        try:
            netdevs = (qemu_command.network(spec.internet),) if tap is None else qemu_command.tap(tap)
            with qemu_ram.handed_over(preload, ram, whole) as handover:
                argv = qemu_command.common(
                    qemu_host.qemu_path(), spec, layers, cpu, handover, overlay, overlay_name(1), netdevs
                )
                child = await process.spawn(
                    [*argv, *arguments],
                    log=spec.directory / LOG,
                    ephemeral=spec.ephemeral,
                    bounded=True,
                    cwd=spec.directory,
                    pass_fds=(*handover.descriptors, *([] if tap is None else [tap])),
                    env=handover.variables or None,
                )
        finally:
            if tap is not None:
                os.close(tap)
        try:
            record = Record(
                pid=child.pid, start_ticks=child.start_ticks, port=0, machine=spec.machine,
                disk=disk.absolute(spec.disk), ram_roles=ram.roles, facts=facts,
            )  # fmt: skip
            if slot is not None:
                record = record.model_copy(update={"host": slot.host_address, "port": qemu_command.DAEMON_PORT})
            record.write(spec.directory)  # at once: a crash of this process must not lose sight of the engine
            qmp = await _connect(spec.directory, child)
            mapping = await asyncio.to_thread(memory.find_mapping, child.pid, whole)  # or the guest sees other RAM
            port = await forwarded_port(qmp) if slot is None else record.port
            record = record.model_copy(update={"ram_start": mapping.start, "port": port})
            record.write(spec.directory)
        except BaseException:
            child.kill_group()
            child.close()
            (spec.directory / "machine.json").unlink(missing_ok=True)
            raise
        return QemuMachine(spec.directory, record, child, qmp)


def _prepare_ram(image: RamImage, preload: Path | None, directory: Path) -> tuple[RamImage, list[Piece]]:
    """What QEMU is to map, and what that makes; every layer has been checked."""
    whole = memory_files.whole_of(image.base, image.layers)
    qemu_ram.check_depth(whole, image)
    if preload is None and image.layers:
        flat = directory.absolute() / qemu_ram.FLAT
        memory_files.flatten(image.base, image.layers, flat)
        image = RamImage(flat, (), image.roles)
        whole = memory_files.whole_of(flat, ())
    return image, whole


async def _connect(directory: Path, child: process.Child) -> Qmp:
    deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
    while True:  # nothing tells when QEMU begins to listen
        try:
            return await Qmp.connect(directory, qemu_command.QMP_SOCKET, START_TIMEOUT_S)
        except (OSError, SandboxDead, TimeoutError) as error:
            if not child.alive:
                raise BootFailed(
                    f"QEMU did not start: {read_log(directory, child) or 'it said nothing'}"
                ) from error
            if asyncio.get_running_loop().time() > deadline:
                raise BootFailed(f"QEMU did not answer in {START_TIMEOUT_S:g} s") from error
        await asyncio.sleep(POLL_S)


async def _load(machine: QemuMachine, timeout_s: float) -> None:
    """Load the device state and let the machine run.

    When an image lock cannot be taken QEMU stays in `inmigrate` for ever (measured): hence the time-out.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await machine.qmp.execute("migrate-incoming", {"uri": f"file:{DEVICE_STATE_IN}"})
            while (status := await machine.qmp.status()) == "inmigrate":  # noqa: ASYNC110 - no event tells the end
                await asyncio.sleep(POLL_S)
            if status != "running":
                await machine.qmp.execute("cont")
    except TimeoutError as error:
        raise BootFailed(
            f"the memory snapshot was not loaded in {timeout_s:g} s: {machine.engine_log()}"
        ) from error
    except (SandboxDead, QmpError) as error:
        await asyncio.sleep(0.05)  # QEMU's last words are on their way
        raise BootFailed(
            f"the memory snapshot could not be loaded: {machine.engine_log() or error.message}"
        ) from error


def zero_ram(home: Home, size_bytes: int) -> Path:
    """The immutable RAM file of all cold boots of this size: one hole, mapped privately like any other base."""
    path = home.cache / "guest" / f"zero-ram-{size_bytes >> 20}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}-{os.getpid()}")
        with temporary.open("wb") as file:
            file.truncate(size_bytes)
        temporary.chmod(0o444)
        temporary.rename(path)
    return path


def _clear(directory: Path) -> None:
    """Remove a former machine's files; Conflict when it lives."""
    record = Record.read(directory)
    if record is not None and process.is_alive(record.pid, record.start_ticks):
        raise Conflict(f"a machine lives in {directory} (process {record.pid})", fix="kill it first")
    for pattern in ("disk-*.qcow2", "machine.json", qemu_command.QMP_SOCKET, LOG, qemu_ram.FLAT):
        for path in directory.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
