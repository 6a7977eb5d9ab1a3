"""The points at which acts were stopped, and what was there afterwards: ``python -m tests.crash.table``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable

import pytest

PROPERTY = "crash point"


class Points:
    """Those of one test. They travel with its report, so that they arrive from other test processes too."""

    def __init__(self, node: pytest.Item) -> None:
        self._node = node

    def add(self, act: str, way: str, outcome: str) -> None:
        """One point was tried, and all held."""
        self._node.user_properties.append((PROPERTY, f"{act}|{way}|{outcome}"))


def rows(properties: Iterable[tuple[str, object]]) -> list[str]:
    """The table, a line a row; empty when there were none."""
    counts = Counter(str(value) for name, value in properties if name == PROPERTY)
    if not counts:
        return []
    cells = sorted({tuple(key.split("|")[:2]) for key in counts}, key=lambda cell: cell)
    lines = [f"{'act':<18}{'how it was stopped':<40}{'points':>7}{'as before':>11}{'done':>7}"]
    for act, way in cells:
        before, done = (counts[f"{act}|{way}|{outcome}"] for outcome in ("as before", "done"))
        lines.append(f"{act:<18}{way:<40}{before + done:>7}{before:>11}{done:>7}")
    lines.append(f"{'all':<58}{sum(counts.values()):>7}")
    return lines


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "tests/crash/test_every_point.py"]))
