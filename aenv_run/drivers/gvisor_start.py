"""The first lines of a sandbox's supervisor: its storage daemon opens the disk while Python loads the rest.

Both take tens of milliseconds. So this module imports nothing that takes time.
"""

from __future__ import annotations

import os
from _socket import socketpair

IMAGE, STORAGE_LOG = "disk.raw", "storage.log"


class Storage:
    """A storage daemon that was started: its process, and a descriptor of its monitor."""

    def __init__(self, argv: list[str]) -> None:
        ours, theirs = socketpair()
        log = os.open(STORAGE_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        empty = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # The empty file that the export covers.
            os.close(os.open(IMAGE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
            os.set_inheritable(theirs.fileno(), True)
            monitor = ["--chardev", f"socket,id=qmp,fd={theirs.fileno()}", "--monitor", "chardev=qmp"]
            actions = [
                (os.POSIX_SPAWN_DUP2, descriptor, number) for number, descriptor in enumerate((empty, log, log))
            ]
            self.pid = os.posix_spawnp(argv[0], [*argv, *monitor], os.environ, file_actions=actions, setsid=True)
            self.monitor = ours.detach()
        finally:
            ours.close()
            theirs.close()
            os.close(log)
            os.close(empty)


def main(directory: str, answer_to: int, argv: list[str]) -> None:
    """Start the storage daemon ``argv``, if any, in ``directory``, then the machine of its ``plan.json``."""
    os.chdir(directory)
    os.set_inheritable(answer_to, False)
    try:
        storage = Storage(argv) if argv else None
    except OSError as error:
        os.write(answer_to, f'{{"error": "{argv[0]} could not be started: {error.strerror}"}}\n'.encode())
        return
    from aenv_run.drivers import gvisor_supervisor

    gvisor_supervisor.run(answer_to, storage)
