"""What a machine holds of the host's memory, and whether anything of it is left."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
#: How runsc names the file that holds its guest's pages.
GUEST_MEMORY = "/memfd:runsc-memory"


@dataclass(frozen=True)
class Memory:
    """Of one machine, in bytes.

    ``pss``: of all its processes, each page divided by how many processes map it. ``held``: as that, but with
    every page of the guest's own memory file, mapped now or not. ``group``: what its control group is charged.
    """

    pss: int
    held: int
    group: int


def tree(roots: Iterable[int]) -> list[int]:
    """These processes and all below them."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
                children[parent].append(int(entry.name))
    found: dict[int, None] = {}
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found[pid] = None
            waiting += children[pid]
    return list(found)


def engines_in(directory: Path) -> list[int]:
    """The processes that work in a machine's directory, whatever their own mounts call it."""
    place = directory.stat()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                facts = (entry / "cwd").stat()
                if (facts.st_dev, facts.st_ino) == (place.st_dev, place.st_ino):
                    found.append(int(entry.name))
    return found


def memory_of(roots: Iterable[int], groups: Iterable[Path] = ()) -> Memory:
    """What the processes ``roots`` and all below them hold."""
    pss = shared = 0
    files: dict[int, int] = {}
    for pid in tree(roots):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                name, _, value = line.partition(":")
                if name == "Pss":
                    pss += int(value.split()[0]) << 10
                elif name == "Pss_Shmem":
                    shared += int(value.split()[0]) << 10
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(descriptor.readlink()).startswith(GUEST_MEMORY):
                        facts = descriptor.stat()
                        files[facts.st_ino] = facts.st_blocks * 512
    held = pss + max(0, sum(files.values()) - shared) if files else pss
    return Memory(pss, held, sum(map(_charged, groups)))


def _charged(group: Path) -> int:
    for name in ("memory.current", "memory.usage_in_bytes"):
        with contextlib.suppress(OSError):
            return int((group / name).read_text())
    return 0


def is_there(pid: int) -> bool:
    """Whether it runs: a zombie holds nothing any more."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state not in (b"Z", b"X")


def busy_share(seconds_of: tuple[float, float]) -> float:
    """The share of all processors' time that was used between two readings of ``processor_s``."""
    used, whole = seconds_of
    return used / whole if whole else 0.0


def processor_s() -> tuple[float, float]:
    """Seconds that the host's processors have been busy, and seconds that they have had, since it booted."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    per_second = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - ticks[3] - ticks[4]) / per_second, sum(ticks) / per_second
