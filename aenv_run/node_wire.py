"""What is said to the node process and what it says. Local, private, versioned with the package.

The public HTTP API is another one; this is the control plane between the commands and the node of one home.
"""

from __future__ import annotations

import errno
from typing import Literal, Self

from pydantic import Field, model_validator

from aenv_run.errors import AenvError, NoSpace, from_wire
from aenv_run.hooks import Hook
from aenv_run.lifecycle import State
from aenv_run.network import NetworkPolicy
from aenv_run.network.forward import PublishedPort
from aenv_run.sandbox_log import LogEntry
from aenv_run.sandbox_record import Address, Record, Terms
from aenv_run.signatures import MAX_KEYS
from aenv_run.text import Labels
from aenv_run.types import MachineSpec, Model, Name, SandboxId, SnapshotId, Tag

#: A day. A sandbox that should live longer is paused, or asks again.
MAX_TIMEOUT_S = 24 * 3600
MAX_FORK = 64
#: A year of having a machine.
MAX_EPISODE_S = 366 * 24 * 3600
#: Machines that stand ready of one snapshot.
MAX_POOL = 64


class ErrorBody(Model):
    """An ``AenvError`` on the wire."""

    code: str
    message: str
    fix: str = ""

    @classmethod
    def of(cls, error: AenvError) -> ErrorBody:
        """Its three parts."""
        return cls(code=error.code, message=error.message, fix=error.fix)

    def error(self) -> AenvError:
        """The typed error again."""
        return from_wire(self.code, self.message, self.fix)


def known(error: Exception, where: str = "") -> AenvError:
    """``error`` as one of ours: a full disk is ``NoSpace``, the rest keeps its text."""
    if isinstance(error, AenvError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(f"no space left: {error}", fix="free some; snapshots and other sandboxes are intact")
    return AenvError(f"{type(error).__name__}: {error}", fix=f"see {where}" if where else "")


class CreateRequest(Model):
    """Launch ``snapshot`` (name, name:version, name:tag or id)."""

    snapshot: str = Field(min_length=1, max_length=256)
    timeout_s: float = Field(300, ge=0, le=MAX_TIMEOUT_S)
    on_timeout: Literal["kill", "pause"] = "kill"
    metadata: dict[str, str] = Field(default_factory=dict, max_length=256)
    env: dict[str, str] = Field(default_factory=dict, max_length=1024)
    cold: bool = Field(False, description="ignore the memory part: boot from the disk")
    hooks: bool = Field(True, description="run the snapshot's hooks in what is restored")
    internet: bool | None = Field(None, description="reach public addresses; None: as far as this node can")
    allow: tuple[str, ...] = Field((), description="CIDRs and domains: then nothing else")
    deny: tuple[str, ...] = Field((), description="CIDRs and domains, stronger than allow")
    publish: tuple[PublishedPort, ...] = Field((), max_length=64)
    max_seconds: float | None = Field(
        None, gt=0, le=MAX_EPISODE_S, allow_inf_nan=False, description="wall clock of the episode"
    )
    memory_mib: int | None = Field(None, description="another size than the snapshot's; cold starts only")
    cpus: int | None = Field(None, description="another number than the snapshot's; cold starts only")
    signed_by: tuple[str, ...] = Field((), max_length=MAX_KEYS, description="public keys: one must have signed it")
    terms: Terms = Terms()


class SandboxInfo(Model):
    """One sandbox. ``address`` of its daemon only for one that runs, its ``access_token`` not for a dead one.

    ``host_address`` is where the host reaches every TCP port of it; None when it has no network of its own.
    """

    sandbox_id: SandboxId
    snapshot_id: SnapshotId
    reference: str
    state: State
    reason: str = ""
    driver: str
    mode: str
    origin: Literal["restored", "booted"]
    machine: MachineSpec
    metadata: dict[str, str]
    created_at_s: float
    expires_at_s: float | None
    on_timeout: Literal["kill", "pause"]
    timeout_s: float | None = None
    terms: Terms = Terms()
    name: str | None = Field(None, description="the catalog's name that it was started by")
    has_memory: bool = Field(False, description="its files have a memory image, which a resume restores")
    parent: SandboxId | None
    network: NetworkPolicy
    published: tuple[PublishedPort, ...] = ()
    max_seconds: float | None = None
    time_over_at_s: float | None = None
    ended_by: Literal["", "time_over"] = ""
    warnings: tuple[ErrorBody, ...] = Field((), description="why its disk cannot be read now, or may go")
    host_address: str | None = None
    address: Address | None = None
    launches: int = Field(0, ge=0, description="how many machines it has had: each is another one")
    access_token: str | None = None

    @classmethod
    def of(cls, record: Record, state: State, warnings: tuple[ErrorBody, ...] = ()) -> SandboxInfo:
        """What callers may know of a record."""
        running = state in (State.RUNNING, State.FORKING, State.SNAPSHOTTING)
        return cls(
            sandbox_id=record.id,
            snapshot_id=record.snapshot_id,
            reference=record.reference,
            state=state,
            reason=record.reason,
            driver=record.driver.value,
            mode=record.mode,
            origin=record.origin,
            machine=record.machine,
            metadata=record.metadata,
            created_at_s=record.created_at_s,
            expires_at_s=record.expires_at_s,
            on_timeout=record.on_timeout,
            timeout_s=record.timeout_s,
            terms=record.terms,
            name=record.reference.rpartition(":")[0] or None,
            has_memory=record.memory is not None,
            parent=record.parent,
            network=record.policy,
            published=record.publish,
            max_seconds=record.max_seconds,
            time_over_at_s=record.time_over_at_s,
            ended_by=record.ended_by,
            warnings=warnings,
            host_address=record.address.host if running and record.slot and record.address else None,
            address=record.address if running else None,
            launches=record.launches,
            access_token=record.access_token if state is not State.DEAD else None,
        )


class PoolSettings(Model):
    """How many machines of a snapshot stand ready: filled to ``high`` whenever there are fewer than ``low``."""

    snapshot_id: SnapshotId
    reference: str = Field(max_length=256)
    low: int = Field(1, ge=1, le=MAX_POOL)
    high: int = Field(1, ge=1, le=MAX_POOL)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high})")
        return self


class PoolsFile(Model):
    """``pools.json`` of a home."""

    format: Literal["aenv.pools/1"] = "aenv.pools/1"
    pools: tuple[PoolSettings, ...] = ()


class PoolInfo(PoolSettings):
    """A pool now: ``taken`` launches found a machine ready, ``missed`` did not. ``problem``: why none is had."""

    ready: int
    taken: int
    missed: int
    problem: str = ""


class PoolList(Model):
    """All pools of the node."""

    pools: tuple[PoolInfo, ...]


class PoolRequest(Model):
    """Keep machines of ``snapshot`` ready."""

    snapshot: str = Field(min_length=1, max_length=256)
    low: int = Field(1, ge=1, le=MAX_POOL)
    high: int = Field(1, ge=1, le=MAX_POOL)
    signed_by: tuple[str, ...] = Field((), max_length=MAX_KEYS, description="public keys: one must have signed it")


class ResetRequest(Model):
    """Back to the snapshot that it was started from, for ``timeout_s``."""

    timeout_s: float = Field(300, gt=0, le=MAX_TIMEOUT_S)


class SandboxList(Model):
    """All sandboxes of the node, oldest first."""

    sandboxes: tuple[SandboxInfo, ...]


class PauseRequest(Model):
    """Pause; without ``hooks`` the sandbox's on_pause does not run this time.

    Without ``memory`` only its disk is kept, flushed while nothing of the guest runs; its resume is a cold boot.
    """

    hooks: bool = True
    memory: bool = True


class SandboxLogReply(Model):
    """What happened to a sandbox, oldest first."""

    entries: tuple[LogEntry, ...]


class ResumeRequest(Model):
    """Resume for another ``timeout_s``; ``cold`` boots from the disk when the memory cannot be used.

    Without ``hooks`` those of the sandbox do not run this time.
    """

    timeout_s: float = Field(300, ge=0, le=MAX_TIMEOUT_S)
    cold: bool = False
    hooks: bool = True


class TimeoutRequest(Model):
    """Let it live this long from now on: it may shorten its time, unless ``only_later``. 0: its time is over."""

    timeout_s: float = Field(ge=0, le=MAX_TIMEOUT_S)
    only_later: bool = False


class NetworkRequest(Model):
    """Change what a sandbox may reach; None leaves a part as it is, or with ``replace`` makes it the default."""

    internet: bool | None = None
    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] | None = None
    replace: bool = False


class ForkRequest(Model):
    """Fork into ``count`` children; ``timeout_s`` None: what was asked for the parent last."""

    count: int = Field(1, ge=1, le=MAX_FORK)
    timeout_s: float | None = Field(300, gt=0, le=MAX_TIMEOUT_S)
    request: str = Field("", max_length=60, description="the call; see calls_of for what its children carry")


def calls_of(request: str, count: int) -> tuple[str, ...]:
    """What each of ``count`` sandboxes that one call makes carries as ``Terms.request``."""
    return tuple(f"{request}-{number}" if request and number else request for number in range(count))


class ForkStart(Model):
    """The first line of a fork's answer: the parent stood still for ``stopped_ms`` and runs again."""

    stopped_ms: float


class ForkEntry(Model):
    """One child, or why it could not be had: one line of the answer each, in the order in which they are ready."""

    index: int = Field(ge=0, lt=MAX_FORK)
    sandbox: SandboxInfo | None = None
    error: ErrorBody | None = None


class ForkReply(Model):
    """The whole answer: one entry per child asked for, by index."""

    children: tuple[ForkEntry, ...]
    stopped_ms: float


class SnapshotRequest(Model):
    """Commit the present state; with ``name`` also publish it as that name's next version."""

    name: Name | None = None
    tags: tuple[Tag, ...] = ()
    memory: bool = True
    labels: Labels = Field(default_factory=dict, max_length=256)
    on_restore: tuple[Hook, ...] | None = Field(None, description="None: those that the sandbox has")
    on_fork: tuple[Hook, ...] | None = Field(None, description="None: those that the sandbox has")
    on_pause: tuple[Hook, ...] | None = Field(None, description="None: those that the sandbox has")
    hooks: bool = Field(True, description="run the sandbox's own on_pause first")


class SnapshotReply(Model):
    """The snapshot, and under which version it is published."""

    snapshot_id: SnapshotId
    name: str | None = None
    version: int | None = None
    stopped_ms: float


class ShutdownRequest(Model):
    """End the node; with ``kill`` also its live sandboxes. Paused ones stay either way."""

    kill: bool = False


class Health(Model):
    """Whether the node serves, and how far it is."""

    version: str
    pid: int
    home: str
    repository: str
    guest: str
    driver: str
    ready: bool
    live: int
    paused: int
    dead: int


class DriverReply(Model):
    """The driver that this node uses and why."""

    name: str
    mode: str
    why: str
