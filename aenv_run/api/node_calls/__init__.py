"""``/aenv/v1``: what the command line and the SDK need of a server beyond what E2B's clients do."""

from __future__ import annotations

from aenv_run.api.node_calls import host, node, store

ROUTERS = (store.router, host.router, node.router)
