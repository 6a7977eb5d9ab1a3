"""Machines for the contract tests: one captured machine per driver and session, restored by each test."""

from __future__ import annotations

import pytest
import pytest_asyncio

from aenv_run.paths import Home
from tests.contracts.machines import DRIVERS, Bench, make_bench, make_driver, need_runsc


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A home of this session's own; kernel and daemon are the checkout's (or $AENV_GUEST_DIR's)."""
    return Home(tmp_path_factory.mktemp("home"))


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=DRIVERS)
async def bench(request: pytest.FixtureRequest, home: Home, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The driver under test with a captured machine."""
    name: str = request.param
    if name != "qemu":
        need_runsc()
    return await make_bench(make_driver(name, home), home, tmp_path_factory.mktemp(f"machines-{name}"), name)
