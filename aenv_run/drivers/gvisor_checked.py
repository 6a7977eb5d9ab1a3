"""Which chains of disk layers this host's kernel may mount: looked at by e2fsck once, or written by this host."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from pathlib import Path

from aenv_run.nbd import DiskLayer
from aenv_run.paths import Home


def chain_key(layers: Iterable[DiskLayer]) -> str:
    """A name for the chain: a layer is known by inode, size and time, which its hard links keep, or by digests."""
    facts = []
    for layer in layers:
        if not isinstance(layer, Path):
            facts.append(layer.content)
            continue
        found = layer.stat()
        facts.append(f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _mark(home: Home, layers: Iterable[DiskLayer]) -> Path:
    digest = chain_key(layers)
    return home.cache / "checked-disks" / digest[:2] / digest[2:]


def is_checked(home: Home, layers: Iterable[DiskLayer]) -> bool:
    """Whether the file system in this chain was found sound here, or was written by this host's own kernel."""
    return _mark(home, layers).exists()


def remember(home: Home, layers: Iterable[DiskLayer]) -> None:
    """From now on it is. A mark that cannot be written costs a check, nothing else."""
    with contextlib.suppress(OSError):
        mark = _mark(home, layers)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
