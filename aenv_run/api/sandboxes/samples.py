"""What sandboxes used before, for an hour, in the server's memory."""

from __future__ import annotations

from collections import deque

from aenv_run.api.wire.watch import SandboxMetric

KEPT_S = 3600.0


class Samples:
    """Past values by sandbox, oldest first."""

    def __init__(self) -> None:
        self._kept: dict[str, deque[SandboxMetric]] = {}

    def between(self, sandbox_id: str, start_s: float | None, end_s: float | None) -> list[SandboxMetric]:
        """Those from ``start_s`` to ``end_s``, both included."""
        first, last = start_s or 0.0, float("inf") if end_s is None else end_s
        return [one for one in self._kept.get(sandbox_id, ()) if first <= one.timestamp_unix <= last]

    def add(self, sandbox_id: str, value: SandboxMetric) -> None:
        """One more; those that are too old go."""
        kept = self._kept.setdefault(sandbox_id, deque())
        kept.append(value)
        while kept[0].timestamp_unix < value.timestamp_unix - KEPT_S:
            kept.popleft()

    def keep_only(self, sandbox_ids: set[str]) -> None:
        """What is gone has no past."""
        for gone in self._kept.keys() - sandbox_ids:
            del self._kept[gone]
