"""For every test: nothing that the session started or made is left on the host when it ends."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator

import pytest

from tests.leftovers import MARKER, others_work_here, processes, resources

SETTLE_SECONDS = 5.0  # what is being torn down off the path may take this long


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails the last test if a process, namespace, mount, loop device or shared memory file is left.

    Processes are known by an environment variable that all children inherit. The rest is compared with the start
    of the session; where others work on the same host, only what names this session's temporary directory counts.
    """
    session = uuid.uuid4().hex
    before = resources()
    os.environ[MARKER] = session
    yield
    deadline = time.monotonic() + SETTLE_SECONDS
    while (left := processes(session)) or resources() - before:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    made = resources() - before
    if others_work_here(session):
        directory = str(tmp_path_factory.getbasetemp())
        made = {name for name in made if directory in name}
    for process in left:
        process.kill()
    names = [*map(str, sorted(left)), *sorted(made)]
    assert not names, "left behind by this session (processes were killed now):\n  " + "\n  ".join(names)
