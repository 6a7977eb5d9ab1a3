"""What a sandbox's directory says about it: ``sandbox.json``, the truth that outlives the node process.

Files of the directory that the record does not name are garbage; a record is replaced as a whole, durably,
so a crash leaves either the old sandbox or the new one.
"""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from aenv_run import durable
from aenv_run.drivers.protocol import DriverName, Endpoint
from aenv_run.errors import AenvError, CorruptData, NotFound
from aenv_run.hooks import Hooks
from aenv_run.lifecycle import State
from aenv_run.network import Answers, NetworkPolicy, SlotId
from aenv_run.network.forward import PublishedPort
from aenv_run.snapshot import Blob, MemoryFacts
from aenv_run.types import Architecture, Context, MachineSpec, Model, SandboxId, SnapshotId

RECORD_NAME = "sandbox.json"
#: No record is larger: metadata and environment are bounded by the API.
MAX_RECORD_BYTES = 4 << 20
UNKNOWN = SnapshotId("0" * 64)


class Layer(Model):
    """One layer of the disk: a file of the sandbox's directory, and its blob once it is committed.

    Without a file it is found anew at each start of a machine: a file of the cache, or served while it is read.
    """

    file: str | None
    blob: Blob | None = None

    @model_validator(mode="after")
    def _is_somewhere(self) -> Self:
        if self.file is None and self.blob is None:
            raise ValueError("a layer is a file, a blob, or both")
        return self


class MemoryFiles(Model):
    """A memory image in the sandbox's directory: its files by role, their blobs once committed, what it needs."""

    files: dict[str, str]
    blobs: dict[str, Blob] = Field(default_factory=dict)
    facts: MemoryFacts


class Address(Model):
    """Where the guest daemon answers."""

    host: str
    port: int

    @property
    def endpoint(self) -> Endpoint:
        """The driver's word for it."""
        return Endpoint(self.host, self.port)


class Terms(Model):
    """What a caller of the HTTP API asked for that no machine is told. Forks inherit all but ``request``."""

    alias: str | None = Field(None, max_length=256, description="the name that it was started by")
    secure: bool = Field(True, description="callers of its daemon must have its token; else the proxy adds it")
    auto_resume: bool = Field(False, description="traffic resumes it")
    pause_memory: bool = Field(
        True, description="pause at the end of its time keeps the memory, not only the disk"
    )
    public_ports: bool = Field(True, description="its ports need no traffic token")
    mask_host: str | None = Field(None, max_length=300, description="the Host that its servers see")
    request: str = Field("", max_length=64, description="the call that it was made by")


class Record(Model):
    """One sandbox. ``disk`` is the chain that the present (or next) machine starts on, base first."""

    format: Literal["aenv.sandbox/1"] = "aenv.sandbox/1"
    id: SandboxId
    snapshot_id: SnapshotId
    base_id: SnapshotId = Field(description="the newest snapshot that its state descends from")
    reference: str = Field(description="what the caller asked for, such as swe-task:1")
    state: State
    reason: str = ""
    driver: DriverName
    mode: str = ""
    origin: Literal["restored", "booted"] = "booted"
    architecture: Architecture
    machine: MachineSpec
    context: Context
    env: dict[str, str] = Field(default_factory=dict)
    metadata: dict[str, str] = Field(default_factory=dict)
    policy: NetworkPolicy = NetworkPolicy(internet=False)
    answers: Answers = Field(default_factory=Answers, description="what the guest was told for which names")
    slot: SlotId | None = Field(None, description="the network slot of its machine")
    publish: tuple[PublishedPort, ...] = ()
    created_at_s: float
    expires_at_s: float | None = None
    on_timeout: Literal["kill", "pause"] = "kill"
    timeout_s: float | None = Field(None, description="the time to live that was asked for last")
    terms: Terms = Terms()
    max_seconds: float | None = Field(None, description="its wall clock: how long it may have a machine, in sum")
    seconds_left: float | None = Field(None, description="of max_seconds, when its machine started or was paused")
    time_over_at_s: float | None = Field(None, description="when they end, while it has a machine")
    ended_by: Literal["", "time_over"] = ""
    parent: SandboxId | None = None
    cold: bool = Field(False, description="asked for: boot from the disk, whatever memory there is")
    with_hooks: bool = Field(True, description="asked for: run the hooks at the start")
    access_token: str
    machine_id: str
    address: Address | None = None
    launches: int = Field(0, ge=0, description="how many machines it has had")
    disk: tuple[Layer, ...]
    memory: MemoryFiles | None = None
    hooks: Hooks | None = Field(None, description="for what was in the memory that it was started from")
    serial: int = Field(0, description="number of the next file name; never used twice")

    @classmethod
    def unreadable(cls, sandbox_id: SandboxId, reason: str, driver: DriverName, created_at_s: float) -> Record:
        """In place of one that cannot be read: dead, and never written. All that is known of it is its id."""
        return cls(
            id=sandbox_id, snapshot_id=UNKNOWN, base_id=UNKNOWN, reference="?", state=State.DEAD, reason=reason,
            driver=driver, architecture=Architecture("amd64"), machine=MachineSpec(), context=Context(),
            created_at_s=created_at_s, access_token="", machine_id="", disk=(),
        )  # fmt: skip

    @model_validator(mode="before")
    @classmethod
    def _with_a_policy(cls, data: object) -> object:
        """Records of before sandboxes had policies say ``internet``."""
        if isinstance(data, dict) and "internet" in data:
            rest = {name: value for name, value in data.items() if name != "internet"}
            return {"policy": {"internet": data["internet"]}, **rest}
        return data

    def expired(self, now_s: float | None = None) -> bool:
        """Whether its time is over (paused and dead sandboxes have none)."""
        return self.expires_at_s is not None and self.expires_at_s <= (now_s or time.time())

    def time_over(self, now_s: float) -> bool:
        """Whether it has used up its ``max_seconds``."""
        return self.state is State.RUNNING and self.time_over_at_s is not None and self.time_over_at_s <= now_s

    def clock_started(self) -> dict[str, object]:
        """What changes when it gets a machine: what is left of its wall clock runs."""
        return {} if self.seconds_left is None else {"time_over_at_s": time.time() + self.seconds_left}

    def clock_stopped(self) -> dict[str, object]:
        """What changes when it has no machine any more."""
        end_s = self.time_over_at_s
        return {} if end_s is None else {"seconds_left": max(0.0, end_s - time.time()), "time_over_at_s": None}

    def files(self) -> set[str]:
        """Every file name that the record needs."""
        return {layer.file for layer in self.disk if layer.file} | set(
            self.memory.files.values() if self.memory else ()
        )


@dataclass(frozen=True)
class SandboxDirectory:
    """``<home>/sandboxes/<id>/``. Blocking: call from a thread."""

    root: Path

    @property
    def machine(self) -> Path:
        """The driver's own directory."""
        return self.root / "machine"

    @property
    def below(self) -> Path:
        """What the present machine has open of layers that are no files of the sandbox."""
        return self.root / "below"

    @property
    def capturing(self) -> Path:
        """Where a capture is made before its files are linked to where they stay."""
        return self.root / "capturing"

    @property
    def merging(self) -> Path:
        """A memory layer that is being made of several."""
        return self.root / "merging"

    def create(self) -> None:
        """Make the directory; nobody but its owner may look inside."""
        self.root.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.root.mkdir(mode=0o700)
        for name in ("disk", "memory"):
            (self.root / name).mkdir(mode=0o700)

    def fresh_machine(self) -> Path:
        """An empty directory for the next machine."""
        shutil.rmtree(self.machine, ignore_errors=True)
        self.machine.mkdir(mode=0o700)
        return self.machine

    def fresh_below(self) -> Path:
        """An empty directory for the layers of the next machine."""
        shutil.rmtree(self.below, ignore_errors=True)
        self.below.mkdir(mode=0o700)
        return self.below

    def drop_below(self) -> None:
        """No machine has them open any more: the cache may let them go."""
        shutil.rmtree(self.below, ignore_errors=True)

    def memory_paths(self, record: Record) -> dict[str, Path]:
        """The memory files by role."""
        return {role: self.root / file for role, file in record.memory.files.items()} if record.memory else {}

    def write(self, record: Record) -> None:
        """Replace the record durably (temp, fsync, rename, fsync of the directory). Mode 0600: it has a token."""
        durable.replace(self.root / RECORD_NAME, record.model_dump_json(indent=1).encode())

    def read(self) -> Record:
        """The record; ``NotFound`` without one, ``CorruptData`` if it is not one."""
        path = self.root / RECORD_NAME
        try:
            with path.open("rb") as file:
                data = file.read(MAX_RECORD_BYTES + 1)
            record = Record.model_validate_json(data)
            if record.id != self.root.name:
                raise ValueError(f"it is that of another sandbox, {record.id}")
            return record
        except FileNotFoundError:
            raise NotFound(f"no sandbox in {self.root}") from None
        except (ValidationError, ValueError, OSError) as error:
            raise CorruptData(
                f"the record of a sandbox cannot be read: {path}: {str(error).splitlines()[0]}",
                fix=f"`aenv rm {self.root.name}` removes it (not snapshots, nor other sandboxes)",
            ) from error

    def keep(self, record: Record) -> None:
        """After a write that failed or was not wanted after all: the record is again the one of before."""
        with suppress(AenvError):
            if self.read() == record:
                return
        self.write(record)

    def tidy(self, record: Record) -> None:
        """Delete disk and memory files that the record does not name, and a left-over capture or merge."""
        needed = record.files()
        for name in ("disk", "memory"):
            for path in (self.root / name).glob("*"):
                if f"{name}/{path.name}" not in needed:
                    path.unlink(missing_ok=True)
        self.merging.unlink(missing_ok=True)
        shutil.rmtree(self.capturing, ignore_errors=True)

    def remove(self) -> None:
        """Delete it all: the record last, so that a crash half-way leaves something that can be removed again."""
        for path in list(self.root.glob("*")) if self.root.exists() else []:
            if path.name == RECORD_NAME:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        shutil.rmtree(self.root, ignore_errors=True)
