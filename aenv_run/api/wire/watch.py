"""Bodies of what is seen of a sandbox: its use of the machine, and its log."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from aenv_run.api.wire.model import Told, at
from aenv_run.guest import GuestMetrics
from aenv_run.sandbox_log import LogEntry


class SandboxMetric(Told):
    """What its machine used at one moment, in bytes and percent of all its CPUs; as its own kernel counts."""

    timestamp: datetime
    timestamp_unix: int
    cpu_count: int
    cpu_used_pct: float
    mem_used: int
    mem_total: int
    mem_cache: int
    disk_used: int
    disk_total: int

    @classmethod
    def of(cls, found: GuestMetrics, cpus: int, time_s: float) -> SandboxMetric:
        """As the daemon told it. A guest of gVisor sees all CPUs of its host, and may use ``cpus`` of them."""
        used = found.cpu_used_pct * max(found.cpu_count, cpus) / cpus
        return cls(
            timestamp=at(time_s),
            timestamp_unix=int(time_s),
            cpu_count=cpus,
            cpu_used_pct=min(used, 100.0),
            mem_used=found.mem_used_bytes,
            mem_total=found.mem_total_bytes,
            mem_cache=found.mem_cache_bytes,
            disk_used=found.disk_used_bytes,
            disk_total=found.disk_total_bytes,
        )


class MetricsBySandbox(Told):
    """The answer for several."""

    sandboxes: dict[str, SandboxMetric]


class LogLine(Told):
    """A line without more."""

    timestamp: datetime
    line: str


class LogEntryTold(Told):
    """A line with its level; ``fields.source`` is node or console."""

    timestamp: datetime
    message: str
    level: Literal["debug", "info", "warn", "error"]
    fields: dict[str, str]

    @classmethod
    def of(cls, entry: LogEntry) -> LogEntryTold:
        """One."""
        fields = {"source": entry.source, **entry.fields}
        return cls(timestamp=at(entry.at_s), message=entry.message, level=entry.level, fields=fields)


class LogsV1(Told):
    """The first generation's answer."""

    logs: tuple[LogLine, ...]
    log_entries: tuple[LogEntryTold, ...]


class LogsV2(Told):
    """The second's."""

    logs: tuple[LogEntryTold, ...]
