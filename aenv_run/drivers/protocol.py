"""What every driver and every machine promises. One contract suite (tests/contracts/) checks each driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal, Protocol

from aenv_run.capture import Capture
from aenv_run.nbd import DiskLayer
from aenv_run.snapshot import MemoryFacts
from aenv_run.types import MachineSpec


class DriverName(StrEnum):
    """The engines that aenv knows."""

    QEMU = "qemu"
    GVISOR = "gvisor"
    FIRECRACKER = "firecracker"


@dataclass(frozen=True)
class Requirement:
    """One thing that a driver needs of the host; ``doctor`` prints them all."""

    name: str
    present: bool
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Probe:
    """Whether a driver really works here, found by trying, not by looking at files.

    ``mode`` is how guest code would run (kvm, pvm, tcg, systrap, …); ``why`` is one sentence for people.
    """

    driver: DriverName
    usable: bool
    mode: str
    why: str
    requirements: tuple[Requirement, ...] = ()


@dataclass(frozen=True)
class Caps:
    """What a driver can do, as data: callers and tests ask this, never the driver's name."""

    memory_snapshot: bool
    live_capture: bool
    shares_memory: bool
    native_speed: bool
    slot_kind: Literal["tap", "veth"] | None = None  # of the NetworkSlot that it takes
    own_internet: bool = False  # whether it gives ``BootSpec.internet`` without a slot
    served_layers: bool = False  # whether a layer of the disk need not be a file


@dataclass(frozen=True)
class Endpoint:
    """Where the host reaches the guest daemon: TCP on a loopback address, or on a network slot's."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """``http://host:port``."""
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True)
class NetworkSlot:
    """One sandbox's network, made before its machine: a router namespace and what the guest plugs into.

    Every guest sees the same addresses (``guest_address``, ``gateway``, ``dns``), so that a memory image fits any
    slot. ``router_netns`` holds the uplink, the policy and, for kind "tap", the persistent tap ``device`` (opened
    without vnet_hdr). For kind "veth", ``guest_netns`` holds the guest's end, named ``device``.
    ``host_address`` is where the host reaches every TCP port of the guest.
    """

    kind: Literal["tap", "veth"]
    router_netns: Path
    guest_netns: Path | None
    device: str
    mac: str
    guest_address: str
    gateway: str
    dns: str
    host_address: str


@dataclass(frozen=True)
class BootSpec:
    """A machine to start. The driver opens ``disk`` (base first, all qcow2) read-only and writes an overlay.

    ``directory`` exists and belongs to the machine until it is killed; a former machine's files in it are
    replaced. The layers of ``disk`` stay valid for as long; some are served where ``Caps.served_layers`` says that
    the driver takes them. With ``ephemeral`` the engine dies
    with this process (build stages); without it the engine outlives it and can be attached again (sandboxes).
    Without a ``network`` slot the driver gives what it can by itself; ``internet`` then says how much.
    """

    machine: MachineSpec
    disk: tuple[DiskLayer, ...]
    directory: Path
    internet: bool = False
    network: NetworkSlot | None = None
    ephemeral: bool = False
    timeout_s: float = 120.0


@dataclass(frozen=True)
class RestoreSpec(BootSpec):
    """A machine to restore: as ``BootSpec``, and the memory files by role with the facts they are bound to."""

    memory: dict[str, Path] = field(default_factory=dict)
    facts: MemoryFacts | None = None


class MachineState(StrEnum):
    """Seen from the host."""

    RUNNING = "running"
    PAUSED = "paused"
    DEAD = "dead"


@dataclass(frozen=True)
class MachineExit:
    """Why a machine ended: ``reason`` for people, with the last console lines in ``console``."""

    reason: str
    console: str = ""


class Machine(Protocol):
    """One live machine. Methods are called by one task at a time; after it died they raise ``SandboxDead``."""

    @property
    def directory(self) -> Path:
        """The directory it owns."""

    @property
    def endpoint(self) -> Endpoint:
        """Where its daemon answers."""

    @property
    def pid(self) -> int:
        """The engine's process id on the host."""

    async def state(self) -> MachineState:
        """What the engine itself says; DEAD when it is gone."""

    async def pause(self) -> None:
        """Stop the virtual CPUs. Idempotent."""

    async def resume(self) -> None:
        """Let them run again. Idempotent."""

    async def capture(self, directory: Path, *, memory: bool, keep_running: bool = True) -> Capture:
        """Seal the disk, and with ``memory`` also RAM and device state, all of one instant, into ``directory``.

        The directory is created. The machine is stopped while it is captured (``Capture.stopped_ms``) and runs
        on afterwards on a new overlay above the sealed layer, or stays stopped with ``keep_running=False``.
        Sealed layers are hard links: the machine keeps using the same bytes. ``Capture.disk`` is every layer
        above the chain the machine was started with, lowest first; ``Capture.memory`` is what is new since it was
        started, and ``Capture.memory_below`` says which files of the image it was restored from belong to it too.
        If it fails, the machine runs on as if nothing had been asked, and the directory is gone.
        """

    async def wait(self) -> MachineExit:
        """Return when the machine is dead."""

    async def console(self) -> str:
        """The last console output, at most 64 KiB, control characters removed."""

    async def kill(self) -> None:
        """End it and all its processes now, and remove what it put outside its directory. Idempotent."""


class Driver(Protocol):
    """An engine. Stateless: everything of a machine is in its directory and its process."""

    @property
    def name(self) -> DriverName:
        """Which engine."""

    @property
    def caps(self) -> Caps:
        """What it can do on this machine."""

    async def probe(self) -> Probe:
        """Does it work here. Milliseconds; the verdict is cached until the host boots again."""

    async def facts(self, machine: MachineSpec) -> MemoryFacts:
        """What a memory image made here and now would be bound to."""

    async def check_restore(self, spec: RestoreSpec) -> None:
        """Raise ``RestoreIncompatible`` naming every fact that differs; nothing is started."""

    async def boot(self, spec: BootSpec) -> Machine:
        """Cold boot; returns when the daemon answers.

        ``BootFailed`` with the console's last lines, and no process left, if it does not.
        """

    async def restore(self, spec: RestoreSpec) -> Machine:
        """Resume from memory; returns when the virtual CPUs run. Checks first, as ``check_restore`` does.

        The memory files are only read, and are shared by every machine restored from them.
        """

    async def merge_memory(
        self, memory: Mapping[str, Path], target: Path, *, eager: bool
    ) -> dict[str, Path] | None:
        """The same memory image in fewer files, of which ``target`` is new and the others are of ``memory``.

        None, and no file, when it has few enough: less than a restore can take, or with ``eager`` as few as it
        likes best. Cancelled, it leaves no file. Takes about a millisecond per MB of the layers.
        """

    async def attach(self, directory: Path) -> Machine | None:
        """Take over a machine that an earlier process started in ``directory``; None when it cannot be had."""

    async def sweep(self, directory: Path) -> bool:
        """End whatever an earlier process left in ``directory``, known or not; whether a process was left.

        For what ``attach`` could not take over and for machines that are not wanted any more: it needs no record
        and talks to nobody. Idempotent.
        """
