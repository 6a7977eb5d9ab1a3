"""A Capture: uncommitted files by role, owned by one directory. All that crosses from machines to bytes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from aenv_run.snapshot import MemoryFacts

T = TypeVar("T")


@dataclass(frozen=True)
class Capture:
    """Files that a machine left in ``directory``, sealed: nobody writes them any more.

    ``disk`` are the layers to add on top of the parent's chain, lowest first (a base image is one layer,
    an unchanged disk none). ``memory`` maps a role ("ram.1", "device_state") to its file; empty without memory.
    ``memory_below`` are the roles of the image the machine was restored from that belong to this image too,
    unchanged: ``memory`` adds to them, and alone is not enough. None for a machine that was booted cold.
    The owner either commits a capture, which moves its files into the repository, or discards it.
    """

    directory: Path
    disk: tuple[Path, ...] = ()
    memory: dict[str, Path] = field(default_factory=dict)
    facts: MemoryFacts | None = None
    stopped_ms: float = 0.0
    memory_below: tuple[str, ...] = ()

    def whole_memory(self, below: Mapping[str, T], own: Mapping[str, T]) -> dict[str, T]:
        """Of each role of this image, what ``below`` (of the machine's own image) or ``own`` (new) has for it."""
        return {**{role: below[role] for role in self.memory_below}, **own}

    def discard(self) -> None:
        """Delete the directory and all in it. Idempotent."""
        shutil.rmtree(self.directory, ignore_errors=True)
