"""What is said to the daemon and what it says, as values. Replies come from an untrusted guest."""

from __future__ import annotations

import secrets
import uuid
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


@dataclass(frozen=True)
class Identity:
    """Who a sandbox is. Given after every boot, restore and fork, before any user code is told to run."""

    access_token: str
    hostname: str
    machine_id: str
    boot_id: str
    entropy: bytes
    env: dict[str, str] = field(default_factory=dict)
    default_user: str = "root"
    default_workdir: str | None = None

    @classmethod
    def fresh(
        cls,
        hostname: str,
        *,
        env: dict[str, str] | None = None,
        default_user: str = "root",
        default_workdir: str | None = None,
    ) -> Self:
        """New token, machine id, boot id and 256 bytes of entropy from the host's own generator."""
        return cls(
            access_token=secrets.token_urlsafe(32),
            hostname=hostname,
            machine_id=uuid.uuid4().hex,
            boot_id=str(uuid.uuid4()),
            entropy=secrets.token_bytes(256),
            env=env or {},
            default_user=default_user,
            default_workdir=default_workdir,
        )


@dataclass(frozen=True)
class PtySize:
    """Columns and rows of a terminal."""

    cols: int
    rows: int


@dataclass(frozen=True)
class Command:
    """A program to run in the guest, without a shell unless ``argv`` names one.

    ``cwd`` None is the sandbox's default directory, ``user`` None its default user ("name", "uid" or
    "uid:gid"). ``stdin`` opens a pipe; without it the command reads end-of-file at once. ``pty`` gives it a
    terminal, and then output is one stream.
    """

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    user: str | None = None
    stdin: bool = False
    pty: PtySize | None = None
    tag: str | None = None

    @classmethod
    def shell(
        cls, script: str, *, env: dict[str, str] | None = None, cwd: str | None = None, user: str | None = None
    ) -> Self:
        """``/bin/sh -c script``."""
        return cls(("/bin/sh", "-c", script), env=env or {}, cwd=cwd, user=user)


@dataclass(frozen=True)
class CommandResult:
    """How a command ended. A code other than 0 is a result, not an error.

    ``exit_code`` is -1 and ``signal`` names the signal ("killed", …) when one ended it.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    pid: int
    signal: str | None = None


class _Reply(BaseModel):
    """A reply of the daemon: unknown fields are ignored, as its protocol asks."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True)


class EntryType(StrEnum):
    """Kind of a file-system entry."""

    FILE = "FILE_TYPE_FILE"
    DIRECTORY = "FILE_TYPE_DIRECTORY"
    SYMLINK = "FILE_TYPE_SYMLINK"
    OTHER = "FILE_TYPE_UNSPECIFIED"


class EntryInfo(_Reply):
    """One entry of the guest's file system; ``mode`` holds the permission bits."""

    name: str
    path: str
    type: EntryType = EntryType.OTHER
    size_bytes: int = Field(0, alias="size")
    mode: int = 0
    permissions: str = ""
    owner: str = ""
    group: str = ""
    modified_time: str = ""
    symlink_target: str | None = None


class GuestInfo(_Reply):
    """What the daemon tells about the machine it runs in."""

    version: str
    boot_id: str = ""
    hostname: str = ""
    machine_id: str = ""
    uptime_seconds: float = 0
    architecture: str = ""
    kernel: str = ""
    #: Whether user processes stand still from a detach to the next identity.
    freezes: bool = False


class GuestMetrics(_Reply):
    """What the machine uses now, as its own kernel counts it: a claim of the guest."""

    cpu_count: int = Field(0, ge=0)
    #: Of all its CPUs, since the last call: 100 is all of them.
    cpu_used_pct: float = Field(0, ge=0, allow_inf_nan=False)
    mem_used_bytes: int = Field(0, ge=0, alias="mem_used")
    mem_total_bytes: int = Field(0, ge=0, alias="mem_total")
    mem_cache_bytes: int = Field(0, ge=0, alias="mem_cache")
    disk_used_bytes: int = Field(0, ge=0, alias="disk_used")
    disk_total_bytes: int = Field(0, ge=0, alias="disk_total")


class ProcessConfig(_Reply):
    """The command line of a process that the daemon started."""

    cmd: str = ""
    args: tuple[str, ...] = ()
    cwd: str | None = None


class ProcessInfo(_Reply):
    """A running process that the daemon started."""

    pid: int
    tag: str | None = None
    config: ProcessConfig = ProcessConfig()
