"""What Prometheus is told: ``GET /metrics``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

from aenv_run.node_client import NodeClient

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Of one server; each has its own registry."""

    def __init__(self, node: NodeClient) -> None:
        self._node = node
        self.registry = CollectorRegistry()
        self.requests = Histogram(
            "aenv_http_request_duration_seconds",
            "Requests, by route; source: control_plane, or how a sandbox was addressed",
            ("method", "route", "route_source", "status"),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.running = Gauge("aenv_http_requests_in_flight", "Requests being answered", registry=self.registry)
        self._operations = Histogram(
            "aenv_sandbox_operation_duration_seconds",
            "create, pause, resume, fork, snapshot, kill",
            ("operation", "status"),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._sandboxes = Gauge(
            "aenv_sandboxes", "Sandboxes of the node, by state", ("state",), registry=self.registry
        )
        self._up = Gauge("aenv_node_up", "Whether a node process serves", registry=self.registry)

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """Measure one operation on a sandbox."""
        began_s, status = time.monotonic(), "error"
        try:
            yield
            status = "ok"
        finally:
            self._operations.labels(name, status).observe(time.monotonic() - began_s)

    async def text(self) -> bytes:
        """All of it. Starts no node."""
        health = await self._node.health()
        self._up.set(health is not None and health.ready)
        counts = {} if health is None else {"live": health.live, "paused": health.paused, "dead": health.dead}
        self._sandboxes.clear()
        for state, count in counts.items():
            self._sandboxes.labels(state).set(count)
        return generate_latest(self.registry)
