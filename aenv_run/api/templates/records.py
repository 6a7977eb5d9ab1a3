"""What is kept of a build: its state, its log, and what it is made of; in a directory that its id names.

The state is one file that is replaced whole; the log is lines of JSON, bounded. After a kill both are found.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from aenv_run import durable
from aenv_run.errors import NotFound, from_os
from aenv_run.types import Model, Name, Tag

Status = Literal["waiting", "building", "ready", "error"]
Level = Literal["debug", "info", "warn", "error"]
LEVELS: tuple[Level, ...] = ("debug", "info", "warn", "error")
BUILD_ID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
MAX_LOG_BYTES = 4 << 20
MAX_LINE = 8000
#: The log's last words have room of their own.
LAST_BYTES = 64 << 10
#: Finished builds whose log and state are kept.
MAX_KEPT = 500


class Build(Model):
    """One build. ``pid`` is that of its process, which ``start_ticks`` tell from a later one of that number.

    ``owner_pid`` and ``owner_ticks`` are those of the server, or the command, that works on it.
    """

    build_id: str = Field(pattern=f"^{BUILD_ID}$")
    template: Name
    tags: tuple[Tag, ...]
    cpus: int
    memory_mib: int
    disk_mib: int
    status: Status = "waiting"
    started: bool = Field(False, description="its steps were given")
    created_at_s: float
    updated_at_s: float
    finished_at_s: float | None = None
    reason: str | None = None
    reason_step: str | None = None
    version: int | None = None
    snapshot_id: str | None = None
    pid: int | None = None
    start_ticks: int | None = None
    owner_pid: int | None = None
    owner_ticks: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has ended, well or not."""
        return self.status in {"ready", "error"}


class Line(Model):
    """One line of a build's log."""

    at_s: float
    message: str
    level: Level = "info"
    step: str | None = None


@dataclass(frozen=True)
class Records:
    """All builds of a home. Blocking."""

    directory: Path

    def folder(self, build_id: str) -> Path:
        """Where a build's files are; ``NotFound`` for what is no id."""
        if not re.fullmatch(BUILD_ID, build_id):
            raise NotFound(f"build {build_id[:80]!r} not found: it is no id of a build")
        return self.directory / build_id

    def new(self, template: Name, tags: tuple[Tag, ...], *, cpus: int, memory_mib: int, disk_mib: int) -> Build:
        """A build that waits for its steps."""
        now = time.time()
        build = Build(
            build_id=str(uuid.uuid4()), template=template, tags=tags, cpus=cpus, memory_mib=memory_mib,
            disk_mib=disk_mib, created_at_s=now, updated_at_s=now,
        )  # fmt: skip
        try:
            self.folder(build.build_id).mkdir(mode=0o700, parents=True)
        except OSError as error:
            raise from_os(error, "a build cannot be kept") from error
        self.write(build)
        self._forget_old()
        return build

    def write(self, build: Build) -> None:
        """Replace its state."""
        try:
            durable.replace(self.folder(build.build_id) / "state.json", build.model_dump_json().encode())
        except OSError as error:
            raise from_os(error, "the state of a build cannot be kept") from error

    def change(self, build_id: str, **changed: object) -> Build:
        """Read, change and write."""
        build = Build.model_validate({**self.read(build_id).model_dump(), **changed, "updated_at_s": time.time()})
        self.write(build)
        return build

    def read(self, build_id: str) -> Build:
        """One build; ``NotFound`` if there is none, or nothing that can be read."""
        try:
            return Build.model_validate_json((self.folder(build_id) / "state.json").read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValidationError):
            raise NotFound(f"build {build_id} not found") from None

    def all(self) -> list[Build]:
        """Newest first."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.directory):  # noqa: PTH208 - names alone
                with contextlib.suppress(NotFound):
                    found.append(self.read(name))
        return sorted(found, key=lambda build: (build.created_at_s, build.build_id), reverse=True)

    def remove_of(self, template: Name) -> None:
        """All that are over."""
        for build in self.all():
            if build.template == template and build.status != "building":
                shutil.rmtree(self.folder(build.build_id), ignore_errors=True)

    def _forget_old(self) -> None:
        over = [build for build in self.all() if build.is_over]
        unstarted = [b for b in self.all() if b.status == "waiting" and time.time() - b.created_at_s > 7 * 86400]
        for build in [*over[MAX_KEPT:], *unstarted]:
            shutil.rmtree(self.folder(build.build_id), ignore_errors=True)

    # -- the log -------------------------------------------------------------------------------------------

    def say(self, build_id: str, line: Line, *, last: bool = False) -> bool:
        """Append; False when the log is full, which ``last`` words may pass."""
        text = line.model_copy(update={"message": line.message[:MAX_LINE]}).model_dump_json(exclude_none=True)
        path = self.folder(build_id) / "log.jsonl"
        with path.open("ab+") as file:
            if file.tell() + len(text) > MAX_LOG_BYTES + (LAST_BYTES if last else 0):
                return False
            torn = file.tell() > 0 and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
            file.write(b"\n" * torn + text.encode() + b"\n")
        return True

    def lines(self, build_id: str, *, offset: int = 0, limit: int = 100, level: Level | None = None) -> list[Line]:
        """Whole lines from ``offset`` on, counted among those of that level or above."""
        wanted = LEVELS[LEVELS.index(level) if level else 0 :]
        found: list[Line] = []
        number = 0
        with contextlib.suppress(FileNotFoundError), (self.folder(build_id) / "log.jsonl").open("rb") as file:
            for raw in file:
                if not (raw.startswith(b"{") and raw.endswith(b"}\n")):
                    continue  # torn by a kill
                if level is None and number < offset:  # polled from where the last one ended: not read again
                    number += 1
                    continue
                try:
                    line = Line.model_validate(json.loads(raw))
                except (ValueError, ValidationError):
                    continue
                if line.level not in wanted:
                    continue
                if number >= offset:
                    found.append(line)
                    if len(found) >= limit:
                        break
                number += 1
        return found
