"""Times and sizes as people read them."""

from __future__ import annotations

import time
from datetime import datetime


def duration(seconds: float) -> str:
    """``12s``, ``5m``, ``3h``, ``2d``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size or (unit == "d" and seconds >= size):
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def age(since_s: float) -> str:
    """Time since then."""
    return duration(time.time() - since_s)


def moment_age(moment: str) -> str:
    """Time since a moment of a record (RFC 3339); ``-`` for what is none."""
    try:
        then = datetime.fromisoformat(moment.replace("Z", "+00:00"))
    except ValueError:
        return "-"
    return age(then.timestamp())


def size(count: int) -> str:
    """``512 MiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
