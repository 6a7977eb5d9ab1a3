"""Memory images of disk-only snapshots, made on this node after their first boot: the second launch restores one.

``cache/warm/<snapshot>-<facts>/`` holds the sealed disk layers and memory files of a machine that had booted and
that nobody had used, and ``image.json``, written last. Bound to the facts of this host: one that does not fit is
never found. All of it may be deleted at any time (``cache_limit.py`` does) and is made again.

An image is synced before it gets its name. To verify it instead, each launch would have to read all of it, and
launches are what it makes short; to sync costs once, in the background, where nobody waits.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from aenv_run import durable
from aenv_run.cache_limit import WARM, alone, in_use
from aenv_run.capture import Capture
from aenv_run.digest import canonical_json
from aenv_run.snapshot import MemoryFacts
from aenv_run.store.posix_files import make_durable_directory
from aenv_run.types import Model, SnapshotId

RECORD = "image.json"


class ImageFile(Model):
    """``image.json``: names of files beside it."""

    format: Literal["aenv.warm-image/1"] = "aenv.warm-image/1"
    disk: tuple[str, ...]
    memory: dict[str, str]
    facts: MemoryFacts


@dataclass(frozen=True)
class WarmImage:
    """What a launch links: disk layers above the snapshot's own, and the memory by role."""

    disk: tuple[Path, ...]
    memory: dict[str, Path]
    facts: MemoryFacts


class WarmImages:
    """Those of one home. Blocking; processes may share it."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache

    def _place(self, snapshot_id: SnapshotId, facts: MemoryFacts) -> Path:
        key = hashlib.sha256(canonical_json(facts)).hexdigest()[:32]
        return self._cache / WARM / f"{snapshot_id}-{key}"

    @contextmanager
    def find(self, snapshot_id: SnapshotId, facts: MemoryFacts) -> Iterator[WarmImage | None]:
        """The image, which stays inside the context: link its files there. None when there is none."""
        place = self._place(snapshot_id, facts)
        with in_use(self._cache):
            try:
                found = ImageFile.model_validate_json((place / RECORD).read_bytes())
                os.utime(place)
            except (OSError, ValidationError):
                yield None
                return
            names = [*found.disk, *found.memory.values()]
            if any(Path(name).name != name or not (place / name).is_file() for name in names):
                yield None
                return
            memory = {role: place / name for role, name in found.memory.items()}
            yield WarmImage(tuple(place / name for name in found.disk), memory, found.facts)

    def has(self, snapshot_id: SnapshotId, facts: MemoryFacts) -> bool:
        """Whether there is one."""
        with self.find(snapshot_id, facts) as image:
            return image is not None

    def keep(self, snapshot_id: SnapshotId, capture: Capture) -> None:
        """Make a capture with memory the image of a snapshot; the capture is consumed. One that is there stays.

        Durable: one that is found after a power loss is whole. It may also be gone, and is then made again.
        """
        assert capture.facts is not None
        place = self._place(snapshot_id, capture.facts)
        record = ImageFile(
            disk=tuple(path.name for path in capture.disk),
            memory={role: path.name for role, path in capture.memory.items()},
            facts=capture.facts,
        )
        make_durable_directory(place.parent)
        written = capture.directory / RECORD
        written.write_text(record.model_dump_json(indent=1))
        for path in (*capture.disk, *capture.memory.values(), written, capture.directory):
            durable.sync(path)
        try:
            capture.directory.rename(place)
        except OSError:  # another was faster
            capture.discard()
            return
        durable.sync(place.parent)

    def drop(self, snapshot_id: SnapshotId, facts: MemoryFacts) -> None:
        """Remove one that is of no use, or what is left of one."""
        with alone(self._cache):
            shutil.rmtree(self._place(snapshot_id, facts), ignore_errors=True)
