"""What a build works with, and what it leaves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from aenv_build.cache.cache_mounts import DEFAULT_LIMIT_BYTES as MOUNT_LIMIT_BYTES
from aenv_build.planning.lent import Lent
from aenv_build.reports import events
from aenv_build.running.secret_values import Secrets
from aenv_build.running.staging import GuestFactory
from aenv_run.blocks.layers import Layers
from aenv_run.cache_limit import DEFAULT_LIMIT_BYTES
from aenv_run.drivers.protocol import Driver
from aenv_run.guest import Guest
from aenv_run.paths import Home
from aenv_run.repository import Repository
from aenv_run.snapshot import Snapshot
from aenv_run.types import Architecture, SnapshotId, StageKey


@dataclass(frozen=True)
class Workshop:
    """What a build works with. ``machines``: as many at once as builds that share it may have together.

    ``retries``: of steps that do not say it themselves, with a pause that grows from ``retry_wait_s``. ``since``:
    results that were made before do not count. ``cache_from``: other repositories to copy results from.
    ``made``: keys of what was made with it; cells of one recipe share it. ``hold``: keeps what is
    used from garbage collection.
    """

    home: Home
    repository: Repository
    driver: Driver
    architecture: Architecture
    sink: events.Sink
    why_driver: str = ""
    fresh: bool = False
    keep: bool = False
    parallel: int = field(default_factory=lambda: os.cpu_count() or 1)
    cache_limit_bytes: int = DEFAULT_LIMIT_BYTES
    machines: asyncio.Semaphore | None = None
    retries: int = 0
    retry_wait_s: float = 1.0
    since: datetime | None = None
    cache_from: tuple[str, ...] = ()
    made: set[StageKey] = field(default_factory=set)
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    guests: GuestFactory = Guest
    mount_limit_bytes: int = MOUNT_LIMIT_BYTES
    lent: Lent = field(default_factory=Lent)
    secrets: Secrets = field(default_factory=Secrets)
    layers: Layers | None = None
    hold: Callable[[Mapping[SnapshotId, Iterable[str]]], None] = lambda snapshots: None


@dataclass(frozen=True)
class Published:
    """One named output."""

    name: str
    version: str
    tags: tuple[str, ...]
    snapshot: Snapshot
    fresh: bool


@dataclass(frozen=True)
class BuildResult:
    """What a build left."""

    outputs: tuple[Published, ...]
    hits: int
    misses: int
    seconds: float
