"""The client of envd, the daemon inside every sandbox."""

from aenv_run.guest.client import Guest
from aenv_run.guest.process import Ended, Output, Process
from aenv_run.guest.tunnel import open_port
from aenv_run.guest.values import (
    Command,
    CommandResult,
    EntryInfo,
    EntryType,
    GuestInfo,
    GuestMetrics,
    Identity,
    ProcessInfo,
    PtySize,
)

__all__ = [
    "Command",
    "CommandResult",
    "Ended",
    "EntryInfo",
    "EntryType",
    "Guest",
    "GuestInfo",
    "GuestMetrics",
    "Identity",
    "Output",
    "Process",
    "ProcessInfo",
    "PtySize",
    "open_port",
]
