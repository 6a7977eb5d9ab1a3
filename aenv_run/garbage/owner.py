"""Who wrote a lease: enough to tell people, and to know on the same machine that it is dead."""

from __future__ import annotations

import os
import socket
from functools import lru_cache
from pathlib import Path

from pydantic import Field

from aenv_run.process import is_alive, read_start_ticks
from aenv_run.text import Line, ShortLine
from aenv_run.types import Model


class Owner(Model):
    """A process. ``place`` is the boot of the machine and the namespace in which ``pid`` means something."""

    host: ShortLine
    pid: int = Field(ge=0, le=1 << 30)
    start_ticks: int = Field(ge=0, le=1 << 60)
    place: Line = Field(max_length=128)

    @classmethod
    def this(cls) -> Owner:
        """This process."""
        pid = os.getpid()
        return cls(
            host=socket.gethostname()[:256], pid=pid, start_ticks=read_start_ticks(pid) or 0, place=_place()
        )

    @property
    def is_here(self) -> bool:
        """Whether it is or was a process of this machine, seen from where we are."""
        return self.place == _place()

    @property
    def is_dead(self) -> bool:
        """Whether it surely runs no more; False also where nobody can know. One that is stopped is not dead."""
        return self.is_here and not is_alive(self.pid, self.start_ticks)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@lru_cache(maxsize=1)
def _place() -> str:
    """Containers of one machine share its boot id, so the pid namespace is part of it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"unknown {os.urandom(16).hex()}"  # then nobody is known to be dead
