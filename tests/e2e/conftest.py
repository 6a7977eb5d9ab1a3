"""One home per session with a tiny snapshot in it; its node and sandboxes are ended with the session."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from aenv_run import Sandbox
from aenv_run.drivers.protocol import DriverName
from aenv_run.node_client import NodeClient
from aenv_run.paths import Home
from tests.e2e.tiny import make_tiny
from tests.e2e.warm_python import DRIVERS, Warm, need

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


@pytest.fixture(scope="session")
def warm_homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[DriverName], Warm]]:
    """By driver: a home with the snapshots ``warm-python:1`` and ``plain:1``, begun when first asked for."""
    made: dict[DriverName, Warm] = {}

    def of(driver: DriverName) -> Warm:
        if driver not in made:
            folder = Path(tempfile.mkdtemp(prefix="aenv-e2e-", dir=tmp_path_factory.getbasetemp()))
            without_slots(Home(folder / "h"))
            made[driver] = Warm(folder, Home(folder / "h"), driver)
        return made[driver]

    yield of
    for warm in made.values():
        warm.close()
        asyncio.run(NodeClient(warm.home).shutdown(kill=True))
        shutil.rmtree(warm.folder)


@pytest.fixture(scope="session", autouse=True)
def old_snapshots_begun(request: pytest.FixtureRequest) -> None:
    """Begin them before the first test if a later one wants them to be old."""
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    wanted = {DriverName(str(item.callspec.params["driver"])) for item in tests if _is_warm(item)}
    for driver in sorted(wanted):
        with suppress(pytest.skip.Exception, pytest.fail.Exception):  # the test itself says so
            need(driver)
            request.getfixturevalue("warm_homes")(driver)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What waits for a snapshot to be old runs last: by then most of that time is over."""
    items.sort(key=_is_warm)


def _is_warm(item: pytest.Item) -> bool:
    return "warm" in getattr(item, "fixturenames", ())


@pytest.fixture(params=[name for name in DRIVERS if os.environ.get("AENV_DRIVER", name) == name])
def driver(request: pytest.FixtureRequest) -> DriverName:
    """Each driver in turn, or the one that AENV_DRIVER names."""
    name: DriverName = request.param
    need(name)
    return name


@pytest.fixture
def warm(driver: DriverName, warm_homes: Callable[[DriverName], Warm], monkeypatch: pytest.MonkeyPatch) -> Home:
    """A home of that driver whose snapshots ``warm-python`` and ``plain`` are two minutes old."""
    monkeypatch.setenv("AENV_DRIVER", driver)  # a setting of the node, which calls from here compare
    found = warm_homes(driver)
    found.wait()
    return found.home


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
    home.network.mkdir(parents=True)
    (home.network / "config.json").write_text('{"mode": "none"}')


def environment(home: Home) -> dict[str, str]:
    """For a command of this home."""
    return {**os.environ, "AENV_HOME": str(home.root), "PYTHONPATH": str(ROOT)}
