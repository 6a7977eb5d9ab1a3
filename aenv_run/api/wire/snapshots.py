"""Bodies of snapshots that were made of sandboxes."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field

from aenv_run.api.wire.model import Asked, Flag, Text, Told

#: Of a version that was made of a sandbox, and is no template: which one.
SANDBOX_LABEL = "aenv.sandbox"


class SnapshotAsked(Asked):
    """POST …/snapshots."""

    name: Annotated[Text, Field(min_length=1, max_length=256)] | None = Field(
        None, description="publish it as the next version of this name; with a tag after a colon, move that to it"
    )
    memory: Flag | None = Field(None, description="false: the file system only")


class SnapshotTold(Told):
    """A snapshot: launch it by ``snapshotID`` or one of ``names`` as ``templateID``."""

    snapshot_id: str
    names: tuple[str, ...]
    cpu_count: int
    memory_mb: int
    disk_size_mb: int
    created_at: datetime
    updated_at: datetime
