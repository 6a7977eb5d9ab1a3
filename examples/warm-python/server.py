"""A Python that runs when a snapshot is taken: each connection to its port is told what it sees now, as JSON.

Its generator is seeded, so every copy of the snapshot would draw the same numbers. SIGUSR1 seeds it anew.
"""

import json
import os
import random
import signal
import socket
import time
import uuid
from pathlib import Path

PORT = 8000
BORN = uuid.uuid4().hex


def reseed(number: int, frame: object) -> None:
    """From the kernel's entropy, which is each copy's own; the file tells the hook that it is done."""
    random.seed(os.getrandom(32))
    Path("/run/reseeded").touch()


def state() -> dict[str, object]:
    """The clock, what differs between copies, and what only the interpreter knows."""
    return {
        "time_s": time.time(),
        "getrandom": os.getrandom(16).hex(),
        "uuid4": str(uuid.uuid4()),
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "machine_id": Path("/etc/machine-id").read_text().strip(),
        "hostname": socket.gethostname(),
        "random": random.random(),
        "born": BORN,
    }


def serve() -> None:
    """For ever."""
    with socket.create_server(("127.0.0.1", PORT)) as server:
        Path("/run/server.pid").write_text(str(os.getpid()))
        while True:
            connection, _ = server.accept()
            with connection:
                connection.sendall(json.dumps(state()).encode())


if __name__ == "__main__":
    random.seed(7)
    signal.signal(signal.SIGUSR1, reseed)
    serve()
