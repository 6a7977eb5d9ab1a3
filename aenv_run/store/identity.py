"""Which bytes a file had when it was digested, told by what stat says of it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

#: mtime moves in ticks of up to 10 ms, so a file may be written twice under one mtime. Younger than this, no stat
#: of it proves anything about later.
SETTLED_NS = 30_000_000


@dataclass(frozen=True)
class FileIdentity:
    """Equal identities mean equal bytes, for a settled file; ``BlobCache`` says what that notices and what not."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileIdentity:
        """Of a file's stat."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    @property
    def settled(self) -> bool:
        """Its last write is long enough ago that another one would show. Ask before the file is read."""
        return time.time_ns() - self.mtime_ns >= SETTLED_NS

    def line(self) -> str:
        """As one line of text, for a mark on disk."""
        return f"aenv.verified/1 {self.device} {self.inode} {self.size_bytes} {self.mtime_ns}\n"
