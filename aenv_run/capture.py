"""A Capture: uncommitted files by role, owned by one directory. All that crosses from machines to bytes."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from aenv_run.snapshot import MemoryFacts


@dataclass(frozen=True)
class Capture:
    """Files that a machine left in ``directory``, sealed: nobody writes them any more.

    ``disk`` are the layers to add on top of the parent's chain, lowest first (a base image is one layer,
    an unchanged disk none). ``memory`` maps a role ("ram", "device_state") to its file; empty without memory.
    The owner either commits a capture, which moves its files into the repository, or discards it.
    """

    directory: Path
    disk: tuple[Path, ...] = ()
    memory: dict[str, Path] = field(default_factory=dict)
    facts: MemoryFacts | None = None
    stopped_ms: float = 0.0

    def discard(self) -> None:
        """Delete the directory and all in it. Idempotent."""
        shutil.rmtree(self.directory, ignore_errors=True)
