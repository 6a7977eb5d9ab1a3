"""The gVisor driver: runsc at native speed without /dev/kvm, on the same qcow2 layers as every driver."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from aenv_run import disk, process
from aenv_run.drivers import (
    gvisor_cgroup,
    gvisor_checked,
    gvisor_host,
    gvisor_level,
    gvisor_root,
    gvisor_sentry,
    gvisor_spec,
)
from aenv_run.drivers.guest_image import known_digest
from aenv_run.drivers.gvisor_capture import SUFFIX, overlay_name, overlay_path
from aenv_run.drivers.gvisor_commit import ROLE, Below, read_below
from aenv_run.drivers.gvisor_control import Json, error_of, peer_pid
from aenv_run.drivers.gvisor_copies import Copies
from aenv_run.drivers.gvisor_disk import ROOT
from aenv_run.drivers.gvisor_host import Verdict
from aenv_run.drivers.gvisor_level import STORAGE, Level
from aenv_run.drivers.gvisor_machine import BRIDGE_HOST, GvisorMachine, Record, end_started
from aenv_run.drivers.gvisor_plan import Plan
from aenv_run.drivers.gvisor_start import IMAGE, STORAGE_LOG
from aenv_run.drivers.gvisor_supervisor import BUNDLE, CONSOLE, CONTROL, EXIT, PACK, PLAN
from aenv_run.drivers.leftover import end_engines
from aenv_run.drivers.protocol import BootSpec, Caps, DriverName, Probe, RestoreSpec
from aenv_run.drivers.qemu_host import host_cpu
from aenv_run.errors import (
    AenvError,
    BootFailed,
    Conflict,
    CorruptData,
    DriverUnavailable,
    InvalidInput,
    RestoreIncompatible,
    Unsupported,
)
from aenv_run.nbd import DiskLayer
from aenv_run.paths import Home
from aenv_run.snapshot import MemoryFacts
from aenv_run.threads import in_thread
from aenv_run.types import MachineSpec

IMAGE_IN = "image"
ENGINE_LOG = "engine.log"
#: What a guest's account of its disk has beside the content of files.
PACK_OVERHEAD_BYTES = 1 << 30
#: What the sandbox's kernel takes for itself (measured: up to 166 MiB, after some thousand processes in a row).
KERNEL_OWN_MIB = 192
#: The files of a checkpoint that every version has; newer ones may write more.
CHECKPOINT = "checkpoint"
ANSWER_BYTES = 1 << 20


class GvisorDriver:
    """See ``protocol.Driver``. Holds the home, the level at which it works, and what machines are copied from."""

    name = DriverName.GVISOR

    def __init__(self, home: Home, level: Level | None = None) -> None:
        """``level``: the best of this host unless it is given."""
        self._home = home
        self._level = level or gvisor_level.best()
        self._copies = Copies()

    @property
    def caps(self) -> Caps:
        """Without root no network slot can be had, and none is taken."""
        return Caps(
            memory_snapshot=True,
            live_capture=True,
            shares_memory=False,
            native_speed=True,
            slot_kind="veth" if self._level.mounts else None,
            served_layers=self._level.mounts,
        )

    async def probe(self) -> Probe:
        """Does it work here."""
        return await gvisor_host.probe(self._home, self._level)

    async def _verdict(self) -> Verdict:
        found = await gvisor_host.verdict(self._home, self._level)
        if not found.platform:
            raise DriverUnavailable(f"gVisor does not work here: {found.detail}", fix="run `aenv doctor`")
        return found

    async def facts(self, machine: MachineSpec) -> MemoryFacts:
        """What a memory image made here and now would be bound to."""
        found = await self._verdict()
        runsc, envd = gvisor_host.runsc_path(), gvisor_host.envd_path(self._home)
        shape = gvisor_spec.SHAPE if self._level.mounts else gvisor_spec.SHAPE_UNMOUNTED
        return MemoryFacts(
            driver=self.name,
            vmm_version=await gvisor_host.runsc_version(self._home),
            mode="ptrace" if found.platform == "ptrace" else "systrap",
            cpu=host_cpu(),
            kernel_digest=await asyncio.to_thread(known_digest, runsc),
            envd_digest=await asyncio.to_thread(known_digest, envd),
            devices=f"{shape} cpus={machine.cpus} memory={machine.memory_mib}MiB",
        )

    async def check_restore(self, spec: RestoreSpec) -> None:
        """Raise ``RestoreIncompatible`` naming every fact that differs; nothing is started."""
        if spec.facts is None or CHECKPOINT not in spec.memory:
            raise InvalidInput(
                f"a restore needs the facts and the file {CHECKPOINT}; it has {sorted(spec.memory)}"
            )
        here = await self.facts(spec.machine)
        different = [
            f"{field}: it was made with {theirs}, here is {ours}"
            for field in MemoryFacts.model_fields
            if (theirs := getattr(spec.facts, field)) != (ours := getattr(here, field))
        ]
        if different:
            raise RestoreIncompatible(
                "the memory snapshot cannot be restored here:\n  " + "\n  ".join(different),
                fix="boot it cold from its disk part, or restore it where these are equal",
            )
        if not self._level.mounts and ROLE not in spec.memory:
            raise InvalidInput(f"a restore needs the file {ROLE}; it has {sorted(spec.memory)}")

    async def boot(self, spec: BootSpec) -> GvisorMachine:
        """Cold boot; returns when the daemon answers."""
        machine = await self._start(spec, await self.facts(spec.machine), restore="")
        return await _ready(machine, spec.timeout_s, "did not boot")

    async def restore(self, spec: RestoreSpec) -> GvisorMachine:
        """Resume from memory; returns when the daemon has answered: runsc's own word for it is no proof."""
        await self.check_restore(spec)
        assert spec.facts is not None
        image = spec.directory / IMAGE_IN
        shutil.rmtree(image, ignore_errors=True)
        image.mkdir()
        for role, path in spec.memory.items():
            (image / f"{role}{SUFFIX}").symlink_to(path.absolute())
        machine = await self._start(spec, spec.facts, restore=IMAGE_IN)
        return await _ready(machine, spec.timeout_s, "was restored from its memory snapshot and does not answer")

    async def merge_memory(
        self, memory: Mapping[str, Path], target: Path, *, eager: bool
    ) -> dict[str, Path] | None:
        """None: each of its images is whole."""
        return None

    async def attach(self, directory: Path) -> GvisorMachine | None:
        """Take over a machine that an earlier process started in ``directory``; None when it is gone."""
        return await GvisorMachine.attach(self._home, directory)

    async def sweep(self, directory: Path) -> bool:
        """End whatever an earlier process left in ``directory``, and its control groups."""

        def end() -> bool:
            found = end_engines(directory)
            gvisor_cgroup.remove(gvisor_cgroup.directories(gvisor_cgroup.name_of(directory.absolute())))
            return found

        return await asyncio.to_thread(end)

    async def _start(self, spec: BootSpec, facts: MemoryFacts, *, restore: str) -> GvisorMachine:
        """Start the supervisor and wait for its word; on any way out but success nothing is left."""
        if spec.internet and spec.network is None:
            raise Unsupported(
                "the gvisor driver has no internet of its own: it needs a network slot",
                fix="give the machine a network, or boot it without internet",
            )
        directory = spec.directory.absolute()
        found = await self._verdict()
        layers = spec.disk if self._level.mounts else disk.local(spec.disk)
        await in_thread(disk.check_chain, layers, spec.machine.disk_mib)
        _clear(directory)
        below = None if self._level.mounts else await self._below(spec, disk.local(layers), directory)
        name = gvisor_cgroup.name_of(directory)
        groups = gvisor_cgroup.directories(name) if found.cgroups else ()
        self._write_bundle(spec, directory, gvisor_cgroup.spec_path(name) if groups else None)
        checked = below is not None or gvisor_checked.is_checked(self._home, layers)
        plan = _plan(spec, facts, found, groups, restore=restore, check_disk=not checked)
        if below is None:
            disk.write_overlay(overlay_path(directory, 1), spec.machine.disk_mib << 20)
        (directory / PLAN).write_text(json.dumps(asdict(plan)))
        start = Start(self._level, spec, directory, facts, groups, below)
        machine = await _launch(start, self._home, self._copies)
        if not checked:
            gvisor_checked.remember(self._home, layers)
        return machine

    async def _below(self, spec: BootSpec, layers: tuple[Path, ...], directory: Path) -> Below:
        """Make what the guest is shown of its disk: all of it, or what a memory image lies above."""
        known = None
        if isinstance(spec, RestoreSpec):
            known = read_below(spec.memory[ROLE], len(layers))
            layers = layers[: known.layers]
        root = await gvisor_root.prepare(self._home, layers, directory)
        if known is not None and known.digest != root.digest:
            raise RestoreIncompatible(
                "the memory snapshot cannot be restored here: it belongs to another disk",
                fix="boot it cold from its disk part",
            )
        return Below(layers=len(layers), digest=root.digest)

    def _write_bundle(self, spec: BootSpec, directory: Path, cgroup: str | None) -> None:
        envd = gvisor_host.envd_path(self._home)
        image = None if self._level.mounts else directory / gvisor_root.IMAGE
        container = gvisor_spec.Container(spec.machine, directory / ROOT, envd, spec.network, cgroup, image)
        for name in (BUNDLE, ROOT):
            (directory / name).mkdir(exist_ok=True)
        (directory / BUNDLE / "config.json").write_text(json.dumps(gvisor_spec.describe(container)))


def _plan(
    spec: BootSpec,
    facts: MemoryFacts,
    found: Verdict,
    groups: tuple[Path, ...],
    *,
    restore: str,
    check_disk: bool,
) -> Plan:
    slot = spec.network
    return Plan(
        top=overlay_name(1),
        pack=[gvisor_spec.DAEMON, "pack"],
        stopped=[gvisor_spec.DAEMON, "stopped"],
        pack_bytes=(spec.machine.disk_mib << 20) + PACK_OVERHEAD_BYTES,
        runsc=gvisor_spec.flags(
            gvisor_host.runsc_path(), found.platform, network=slot is not None, cgroups=found.cgroups
        ),
        restore=restore,
        known_version=facts.vmm_version.startswith(gvisor_sentry.KNOWN_VERSIONS),
        check_disk=check_disk,
        hide_net_sysctl=found.hide_net_sysctl and slot is not None,
        netns=str(slot.guest_netns) if slot else "",
        router_netns=str(slot.router_netns) if slot else "",
        guest_address=slot.guest_address.partition("/")[0] if slot else "",
        device=slot.device if slot else "",
        gateway=slot.gateway if slot else "",
        addresses=gvisor_spec.addresses(slot) if slot else "",
        bridge=[] if slot else [gvisor_spec.DAEMON, "bridge", "--port", str(gvisor_spec.DAEMON_PORT)],
        deleted=[gvisor_spec.DAEMON, "deleted"],
        keep=gvisor_spec.KEEP,
        out_of_memory_file=str(gvisor_cgroup.out_of_memory_file(groups) or ""),
        process_limit_file=str(gvisor_cgroup.process_limit_file(groups) or ""),
    )


def _storage(layers: tuple[DiskLayer, ...]) -> list[str]:
    """The storage daemon's command line, without its monitor."""
    argv = [STORAGE]
    for node in disk.graph(layers, Path(f"{overlay_name(1)}.qcow2"), overlay_name(1)):
        argv += ["--blockdev", json.dumps(node)]
    export = {
        "type": "fuse", "id": "disk", "node-name": overlay_name(1), "mountpoint": IMAGE, "writable": True,
        "growable": False,
    }  # fmt: skip
    return [*argv, "--export", json.dumps(export)]


@dataclass(frozen=True)
class Start:
    """One start of a machine."""

    level: Level
    spec: BootSpec
    directory: Path
    facts: MemoryFacts
    groups: tuple[Path, ...]
    below: Below | None


async def _begin(start: Start, copies: Copies, answer_to: int) -> process.Child:
    """The process in front of the supervisor. Without root it makes a user namespace, which copies do not."""
    directory, ephemeral, log = start.directory, start.spec.ephemeral, start.directory / ENGINE_LOG
    storage = [] if start.below else _storage(disk.located(start.spec.disk, directory))
    if start.level.mounts:
        return await copies.start(directory, storage, answer_to, log, ephemeral=ephemeral)
    argv = gvisor_host.python("aenv_run.drivers.gvisor_start", "main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])")
    front = gvisor_level.namespaces(start.level, ephemeral=ephemeral)
    return await process.spawn(
        [*front, *argv, str(directory), str(answer_to), *storage],
        log=log, ephemeral=ephemeral, cwd=directory, pass_fds=(answer_to,),
    )  # fmt: skip


async def _launch(start: Start, home: Home, copies: Copies) -> GvisorMachine:
    spec, directory, groups = start.spec, start.directory, start.groups
    receive, send = os.pipe()
    try:
        child = await _begin(start, copies, send)
    except BaseException:
        os.close(receive)
        raise
    finally:
        os.close(send)
    try:
        answer = await _answer(receive, spec.timeout_s)
        if "error" in answer:
            raise _start_failed(answer, directory, isinstance(spec, RestoreSpec))
        pid = peer_pid(directory)
        ticks = process.read_start_ticks(pid)
        if ticks is None:
            raise BootFailed("the sandbox ended as soon as it was started")
        if groups:  # not in the configuration: the guest would take it for its own memory
            await asyncio.to_thread(
                gvisor_cgroup.set_memory_limit, groups, (spec.machine.memory_mib + KERNEL_OWN_MIB) << 20
            )
        host = spec.network.host_address if spec.network else BRIDGE_HOST
        port = int(str(answer["port"])) or gvisor_spec.DAEMON_PORT
        record = Record(
            pid=pid, start_ticks=ticks, front=child.pid, front_start_ticks=child.start_ticks, host=host, port=port,
            machine=spec.machine, facts=start.facts, cgroups=groups, below=start.below,
            disk=disk.absolute(spec.disk),
        )  # fmt: skip
        record.write(directory)
    except BaseException:
        await asyncio.shield(asyncio.to_thread(end_started, child))
        await asyncio.shield(asyncio.to_thread(gvisor_cgroup.remove, groups))
        raise
    return GvisorMachine(home, directory, record, child)


def _start_failed(answer: Json, directory: Path, restoring: bool) -> AenvError:
    error = error_of(answer)
    if isinstance(error, CorruptData):
        return error
    said = ""
    with contextlib.suppress(OSError):
        said = (directory / ENGINE_LOG).read_text(errors="replace").strip()[-1000:]
    what = "the memory snapshot was not restored" if restoring else "the sandbox did not start"
    return BootFailed(f"{what}: {error.message}\n{said}".strip())


async def _answer(descriptor: int, timeout_s: float) -> Json:
    """The supervisor's first line; none at all when it ended before it could write one."""
    reader = asyncio.StreamReader(limit=ANSWER_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    try:
        async with asyncio.timeout(timeout_s):
            line = await reader.readline()
    except TimeoutError as error:
        raise BootFailed(f"the sandbox did not start in {timeout_s:g} s") from error
    finally:
        transport.close()
    if not line:
        return {"error": "its supervisor ended without a word"}
    answer: Json = json.loads(line)
    return answer


async def _ready(machine: GvisorMachine, timeout_s: float, what: str) -> GvisorMachine:
    try:
        await machine.wait_ready(timeout_s, what)
    except BaseException:
        await asyncio.shield(asyncio.to_thread(machine.kill_now))
        raise
    return machine


def _clear(directory: Path) -> None:
    """Remove a former machine's files; Conflict when it lives."""
    record = Record.read(directory)
    if record is not None and process.is_alive(record.pid, record.start_ticks):
        raise Conflict(f"a machine lives in {directory} (process {record.pid})", fix="kill it first")
    names = (
        "disk-*.qcow2",
        "machine.json",
        PLAN,
        CONTROL,
        EXIT,
        CONSOLE,
        ENGINE_LOG,
        STORAGE_LOG,
        IMAGE,
        gvisor_root.IMAGE,
        gvisor_root.METADATA,
        PACK,
    )
    for pattern in names:
        for path in directory.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
