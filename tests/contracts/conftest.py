"""What the contract tests run on: a captured machine per driver and session, restored by each test; the daemon."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from aenv_run.paths import Home
from tests.contracts.envd_daemon import Client, build, daemon
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


@pytest.fixture(scope="session")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("envd"))


@pytest.fixture
def base(binary: Path) -> Iterator[str]:
    with daemon(binary) as url:
        # The account that runs the tests is the user that E2B calls the default one.
        httpx.post(f"{url}/init", json={"defaultUser": str(os.getuid())}).raise_for_status()
        yield url


@pytest.fixture
async def envd(base: str) -> AsyncIterator[Client]:
    client = Client(base)
    async with client.http:
        yield client


@pytest.fixture(params=["json", "proto"])
async def rpc(base: str, request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    """The same cases in both codecs."""
    client = Client(base, request.param)
    async with client.http:
        yield client
