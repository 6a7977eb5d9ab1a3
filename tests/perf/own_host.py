"""Where the bench lives: a network of its own, so that nothing of the host's changes; and the end of its node."""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path

from aenv_run.disk_mount import mount
from aenv_run.errors import AenvError
from aenv_run.node_client import NodeClient
from aenv_run.paths import Home

CLONE_NEWNS, CLONE_NEWNET = 0x20000, 0x40000000
MS_SLAVE_ALL = 1 << 19 | 1 << 14
NETNS = Path("/run/netns")
END_S = 10.0


def move_there() -> None:
    """Before there are threads: this process, and every one that it starts, lives there from now on.

    The namespaces, with the slots that a node makes in them, end with their last process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS | CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare of the network")
    mount("none", "/", "none", MS_SLAVE_ALL)
    NETNS.mkdir(exist_ok=True)
    mount("tmpfs", str(NETNS), "tmpfs")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def run_there(work: Coroutine[object, object, None]) -> None:
    """Move there if that may be, and do ``work``; Ctrl-C and SIGTERM cancel it, and it leaves nothing."""

    async def until_signalled() -> None:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        await work

    if os.geteuid() == 0:
        move_there()
    try:
        asyncio.run(until_signalled())
    except asyncio.CancelledError:
        sys.exit("ended before it was through; nothing is left")


async def end_node(home: Home) -> None:
    """End the node of ``home`` with all that runs, also one that is being started and does not answer yet."""
    try:
        await NodeClient(home).shutdown(kill=True)
    except AenvError as error:  # one that cannot begin has said why already
        sys.stderr.write(f"the node did not end as it should: {error.message}\n")
    for pid in _told(str(home.root)):
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            select.select([descriptor], [], [], END_S)
            os.close(descriptor)


def _told(argument: str) -> list[int]:
    """Processes of which this is one of the arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and argument.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
