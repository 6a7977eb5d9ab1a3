"""A network of its own for every sandbox: slots, policy, DNS, forwarded ports. See docs/network.md."""

from aenv_run.network.addressing import SlotId, SlotKind
from aenv_run.network.answers import Answers
from aenv_run.network.forward import PortForward, StreamAddress, TcpAddress, UnixAddress
from aenv_run.network.namespace import open_tap
from aenv_run.network.policy import NetworkPolicy
from aenv_run.network.pool import Network, NetworkConfig, PoolStatus, Reconciled
from aenv_run.network.requirements import requirements
from aenv_run.network.slot import Lease

__all__ = [
    "Answers",
    "Lease",
    "Network",
    "NetworkConfig",
    "NetworkPolicy",
    "PoolStatus",
    "PortForward",
    "Reconciled",
    "SlotId",
    "SlotKind",
    "StreamAddress",
    "TcpAddress",
    "UnixAddress",
    "open_tap",
    "requirements",
]
