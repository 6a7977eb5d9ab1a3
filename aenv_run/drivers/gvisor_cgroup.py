"""Control groups of a sandbox: where runsc makes them, and their removal. Version 1, hybrid and version 2."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
REMOVE_S = 1.0


def is_unified() -> bool:
    """Whether this host has version 2 alone."""
    return (ROOT / "cgroup.controllers").exists()


def name_of(directory: Path) -> str:
    """The groups' name: one per machine directory, so that a later process finds those of a killed one."""
    return f"aenv-{hashlib.sha256(str(directory).encode()).hexdigest()[:20]}"


def spec_path(name: str) -> str:
    """As the container's configuration says it.

    In version 1 below the groups of this process, whose limits then still count. In version 2 a group that has
    processes cannot hand controllers to a child, so it is one of the top.
    """
    return f"/{name}" if is_unified() else name


def directories(name: str) -> tuple[Path, ...]:
    """Where the groups are, or would be."""
    if is_unified():
        return (ROOT / name,)
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        controller = controllers.removeprefix("name=")
        if controller:
            found.append(ROOT / controller / path.lstrip("/") / name)
    return tuple(found)


def set_memory_limit(groups: tuple[Path, ...], limit_bytes: int) -> None:
    """Replace the limit that the container's configuration gave the group."""
    name = "memory.max" if is_unified() else "memory.limit_in_bytes"
    for group in groups:
        if is_unified() or ROOT / "memory" in group.parents:
            (group / name).write_text(str(limit_bytes))


def out_of_memory_file(groups: tuple[Path, ...]) -> Path | None:
    """A file with a line ``oom_kill N``."""
    if is_unified():
        return next((group / "memory.events" for group in groups), None)
    return next((group / "memory.oom_control" for group in groups if ROOT / "memory" in group.parents), None)


def process_limit_file(groups: tuple[Path, ...]) -> Path | None:
    """A file with a line ``max N``: how often the limit of processes was met."""
    found = groups if is_unified() else tuple(group for group in groups if ROOT / "pids" in group.parents)
    return next((group / "pids.events" for group in found), None)


def remove(groups: tuple[Path, ...]) -> None:
    """Remove them, once their last process is gone. Idempotent."""
    deadline = time.monotonic() + REMOVE_S
    for group in groups:
        while True:
            try:
                group.rmdir()
            except OSError as error:
                if error.errno == errno.EBUSY and time.monotonic() < deadline:
                    for child in _children(group):
                        with contextlib.suppress(OSError):
                            child.rmdir()
                    time.sleep(0.002)
                    continue
            break


def _children(group: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [path for path in group.iterdir() if path.is_dir()]
    return []
