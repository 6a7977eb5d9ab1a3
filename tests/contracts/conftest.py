"""Machines for the contract tests: one captured machine per driver and session, restored by each test."""

from __future__ import annotations

import pytest
import pytest_asyncio

from aenv_run.drivers.protocol import DriverName
from aenv_run.drivers.select import select
from aenv_run.paths import Home
from tests.contracts.machines import Bench, make_bench, need_runsc

DRIVERS = (DriverName.QEMU, DriverName.GVISOR)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A home of this session's own; kernel and daemon are the checkout's (or $AENV_GUEST_DIR's)."""
    return Home(tmp_path_factory.mktemp("home"))


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=DRIVERS)
async def bench(request: pytest.FixtureRequest, home: Home, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The driver under test with a captured machine."""
    name: DriverName = request.param
    if name is DriverName.GVISOR:
        need_runsc()
    selected = await select(name, home)
    return await make_bench(selected.driver, home, tmp_path_factory.mktemp(f"machines-{name}"))
