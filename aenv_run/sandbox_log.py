"""What happened to a sandbox, as lines in its directory: bounded, and gone with it."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from aenv_run.lifecycle import State
from aenv_run.sandbox_record import Record
from aenv_run.types import Model

log = logging.getLogger(__name__)

Level = Literal["debug", "info", "warn", "error"]
LOG_NAME = "log.jsonl"
#: The file becomes the old one at this size; one old one is kept.
MAX_LOG_BYTES = 128 << 10
MAX_MESSAGE = 2000


class LogEntry(Model):
    """One line. ``source``: the node, or the guest's console, whose lines have the time of the machine's start."""

    at_s: float
    level: Level = "info"
    message: str
    source: Literal["node", "console"] = "node"
    fields: dict[str, str] = Field(default_factory=dict)


class SandboxLog:
    """Of one sandbox. It tells, and decides nothing: what cannot be written is left out. Blocking."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOG_NAME
        self._old = directory / f"{LOG_NAME}.1"

    def add(self, message: str, level: Level = "info", **fields: str) -> None:
        """One line more."""
        entry = LogEntry(at_s=time.time(), level=level, message=message[:MAX_MESSAGE], fields=fields)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self._path, flags, 0o600)
            try:
                os.write(descriptor, entry.model_dump_json().encode() + b"\n")
                size_bytes = os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
            if size_bytes > MAX_LOG_BYTES:
                self._path.replace(self._old)
        except OSError as error:
            log.warning("%s: %s", self._path, error)

    def changed(self, before: Record, after: Record) -> None:
        """The record is another one now: what that means."""
        if before.state is not after.state:
            how = f" ({after.origin})" if after.state is State.RUNNING else ""
            kept = " with its memory" if after.memory is not None else ", its file system only"
            message = {
                State.RUNNING: f"{'resumed' if before.state is State.PAUSED else 'started'}{how}",
                State.PAUSED: f"paused{kept}",
                State.DEAD: f"ended: {after.reason}",
            }.get(after.state)
            if message is not None:
                self.add(message, "error" if after.state is State.DEAD else "info")
        elif before.base_id != after.base_id:
            self.add("snapshot taken", snapshot=after.base_id)
        if before.policy != after.policy:
            self.add("network changed", policy=after.policy.model_dump_json())

    def read(self, console: str = "") -> list[LogEntry]:
        """All that is kept, oldest first; ``console`` after the last start."""
        entries: list[LogEntry] = []
        for path in (self._old, self._path):
            try:
                lines = path.read_bytes().splitlines()
            except OSError:
                continue
            entries += [entry for entry in map(_parsed, lines) if entry is not None]
        starts = [n for n, entry in enumerate(entries) if entry.message.startswith(("started", "resumed"))]
        place = starts[-1] + 1 if starts else 0
        at_s = entries[starts[-1]].at_s if starts else 0.0
        said = [
            LogEntry(at_s=at_s, message=line[:MAX_MESSAGE], source="console")
            for line in console.splitlines()
            if line.strip()
        ]
        return [*entries[:place], *said, *entries[place:]]


def _parsed(line: bytes) -> LogEntry | None:
    """None for half a line, which a power cut leaves."""
    try:
        return LogEntry.model_validate(json.loads(line))
    except (ValidationError, ValueError):
        return None
