"""What the bench measures beside us: the same engine by hand, blocking, without a node.

A twin makes machines of the same shape from the same disk, and asks each for the same first command,
``/bin/true``, through the same guest daemon over plain HTTP.
"""

from __future__ import annotations

import http.client
import json
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

T = TypeVar("T")
TRUE = ("/bin/true",)
STREAM = {"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"}
ANSWER_S = 60.0
RETRY_S = 0.002


class Stopped(Exception):
    """The bench is being ended: nothing new is started."""


class BareMachine(Protocol):
    """One machine that was started by hand."""

    groups: tuple[Path, ...]  # its control groups

    def run(self, argv: Sequence[str] = TRUE) -> None:
        """Run a command through its daemon, again and again until the daemon has answered."""

    def engines(self) -> list[int]:
        """The processes that it consists of, without their children."""

    def end(self) -> None:
        """Kill it: return when its processes are gone. Idempotent."""

    def tidy(self) -> None:
        """Remove what is left of it outside its directory. Idempotent."""


class Twin(Protocol):
    """One engine by hand. ``notes``: what it does at a step, where that is not the same as ours."""

    notes: dict[str, str]
    pool: ThreadPoolExecutor

    def prepare(self) -> None:
        """Make what machines are restored from."""

    def boot(self) -> BareMachine:
        """Cold boot."""

    def restore(self) -> BareMachine:
        """Restore from memory."""

    def make_ready(self, count: int) -> None:
        """Have ready for ``count`` machines what our node has ready, too."""

    def save(self, machine: BareMachine) -> float:
        """Memory to a file; the machine runs on. Milliseconds that it stood still."""

    def pause(self, machine: BareMachine) -> float:
        """Memory to a file, and end it. Milliseconds."""

    def close(self) -> None:
        """End whatever runs, also what is being started."""


@dataclass
class Machines:
    """All machines of a twin that live, and whether it is being closed."""

    live: set[BareMachine] = field(default_factory=set)
    closing: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Raise ``Stopped`` once the bench is being ended: every loop that waits asks."""
        if self.closing.is_set():
            raise Stopped

    def add(self, machine: BareMachine) -> None:
        """It must end with the bench."""
        self.live.add(machine)
        self.check()

    def remove(self, machine: BareMachine) -> None:
        """It has ended."""
        self.live.discard(machine)

    def close(self, pool: ThreadPoolExecutor) -> None:
        """Let every call come to its end, then end what lives."""
        self.closing.set()

        def end_all() -> None:
            for machine in list(self.live):
                machine.end()
                machine.tidy()

        pool.submit(end_all).result()
        pool.shutdown(wait=True, cancel_futures=True)
        # A call that was under way may have made another one just before it was told.
        for machine in list(self.live):
            machine.end()
            machine.tidy()


def milliseconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1000


def ask(
    machines: Machines,
    address: tuple[str, int],
    path: str,
    body: bytes,
    headers: dict[str, str],
    patience_s: float,
) -> bytes:
    """POST until there is an answer. ``patience_s``: how long one attempt to connect may take."""
    deadline_s = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline_s:
        machines.check()
        connection = http.client.HTTPConnection(*address, timeout=patience_s)
        try:
            connection.connect()
            connection.sock.settimeout(ANSWER_S)
            connection.request("POST", path, body, headers)
            return connection.getresponse().read()
        except OSError:
            time.sleep(RETRY_S)
        finally:
            connection.close()
    raise RuntimeError(f"{address} did not answer in {ANSWER_S:g} s")


def run(machines: Machines, address: tuple[str, int], argv: Sequence[str], patience_s: float = ANSWER_S) -> None:
    """A command through the daemon, from the connection to the end of its stream."""
    start = {"process": {"cmd": argv[0], "args": list(argv[1:])}, "stdin": False}
    message = json.dumps(start).encode()
    payload = struct.pack(">BI", 0, len(message)) + message
    body = ask(machines, address, "/process.Process/Start", payload, STREAM, patience_s)
    if b'"end"' not in body:
        raise RuntimeError(f"the command did not run: {body[:300]!r}")
