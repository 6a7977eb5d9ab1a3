"""One home per session with a tiny snapshot in it; its node and sandboxes are ended with the session."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aenv_run import Sandbox
from aenv_run.node_client import NodeClient
from aenv_run.paths import Home
from tests.e2e.tiny import make_tiny

ROOT = Path(__file__).parents[2]
Aenv = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A home with the snapshot ``tiny:1``."""
    with tiny_home(tmp_path_factory.getbasetemp()) as found:
        yield found


@contextmanager
def tiny_home(directory: Path) -> Iterator[Home]:
    """A home below ``directory`` with the snapshot ``tiny:1``."""
    with node_home(directory) as found:
        scratch = found.root / "scratch"
        scratch.mkdir()
        asyncio.run(make_tiny(found, scratch))
        yield found


@contextmanager
def node_home(directory: Path) -> Iterator[Home]:
    """An empty home below ``directory``; its node and sandboxes end with it."""
    root = Path(tempfile.mkdtemp(prefix="aenv-e2e-", dir=directory))
    found = Home(root)
    before = os.environ.get("AENV_NODE_IDLE_S")
    os.environ["AENV_NODE_IDLE_S"] = "600"
    try:
        without_slots(found)
        yield found
    finally:
        os.environ.pop("AENV_NODE_IDLE_S")
        os.environ.update({} if before is None else {"AENV_NODE_IDLE_S": before})
        asyncio.run(NodeClient(found).shutdown(kill=True))
        shutil.rmtree(root)


@pytest.fixture
def sandbox(home: Home) -> Iterator[Sandbox]:
    """A sandbox of the tiny snapshot."""
    with Sandbox.create("tiny", home=home) as made:
        yield made


@pytest.fixture
def aenv(home: Home) -> Aenv:
    """Runs the command as a user would."""

    def run(*arguments: str, stdin: str = "", code: int | None = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "aenv_run.cli", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=ROOT,
            env=environment(home),
            check=False,
        )
        if code is not None:
            assert done.returncode == code, (arguments, done)
        return done

    return run


def without_slots(home: Home) -> None:
    """So that a node of root touches nothing of the real host; tests/e2e/test_network.py has hosts of its own."""
    home.network.mkdir()
    (home.network / "config.json").write_text('{"mode": "none"}')


def environment(home: Home) -> dict[str, str]:
    """For a command of this home."""
    return {**os.environ, "AENV_HOME": str(home.root), "PYTHONPATH": str(ROOT)}
