"""A network of its own for every sandbox: slots, policy, DNS, forwarded ports. See docs/network.md.

What only a node needs is loaded when it is asked for, so that commands start fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from aenv_run.network.addressing import SlotId, SlotKind
from aenv_run.network.answers import Answers
from aenv_run.network.forward import PortForward, PublishedPort, StreamAddress, TcpAddress, UnixAddress
from aenv_run.network.policy import NetworkPolicy

if TYPE_CHECKING:
    from aenv_run.network.namespace import open_tap
    from aenv_run.network.pool import Network, NetworkConfig, PoolStatus, Reconciled
    from aenv_run.network.slot import Lease

__all__ = [
    "Answers",
    "Lease",
    "Network",
    "NetworkConfig",
    "NetworkPolicy",
    "PoolStatus",
    "PortForward",
    "PublishedPort",
    "Reconciled",
    "SlotId",
    "SlotKind",
    "StreamAddress",
    "TcpAddress",
    "UnixAddress",
    "open_tap",
]

_LATER = {
    "Lease": "slot",
    "Network": "pool",
    "NetworkConfig": "pool",
    "PoolStatus": "pool",
    "Reconciled": "pool",
    "open_tap": "namespace",
}


def __getattr__(name: str) -> object:
    if name in _LATER:
        found: object = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
