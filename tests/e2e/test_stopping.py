"""A build that is stopped while a machine runs and its store does not answer: nothing is left of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from aenv_run.catalog import Catalog
from aenv_run.check import check
from aenv_run.config import open_repository
from aenv_run.paths import Home
from tests.e2e.test_build import make_base, users_of
from tests.e2e.test_build import pytestmark as pytestmark
from tests.s3.faulty import Fault, faulty
from tests.s3.server import Server

RECIPE = """
version: 1
name: hanging
base: {archive: root.tar}
machine: {memory: 256MiB, disk: 64MiB}
steps:
  - {id: long, run: 'echo here; sleep 600'}
  - {id: short, needs: [], run: 'echo short > /srv/short'}
"""


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="aenv-e2e-", dir=tmp_path_factory.getbasetemp()) as name:
        make_base(Path(name) / "root.tar")
        (Path(name) / "recipe.yaml").write_text(RECIPE)
        yield Path(name)


async def nobody_in(directory: Path) -> None:
    """What was killed takes a moment to be gone, with its mounts."""
    for _ in range(600):
        if not users_of(directory):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(users_of(directory))


@pytest.mark.parametrize(("numbers", "code"), [([signal.SIGINT], 130), ([signal.SIGTERM, signal.SIGTERM], 143)])
async def test_a_build_is_stopped_while_its_store_hangs(
    s3_server: Server, folder: Path, numbers: list[signal.Signals], code: int
) -> None:
    home, prefix = Home(folder / "h"), uuid4().hex
    with faulty(s3_server) as (proxy, seen):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "aenv_build.cli", str(folder / "recipe.yaml"), "--home", str(home.root)),
            *("--repository", seen.url(prefix), "--events", "json", "--jobs", "2"),
            stderr=asyncio.subprocess.PIPE,
            env=dict(os.environ),
        )
        assert process.stderr is not None
        said = b""
        async for line in process.stderr:
            said += line
            event = json.loads(line)
            if event["event"] == "stage_finished" and event["step"] == "base":
                proxy.arm(Fault("hang", method="PUT", times=1_000_000))  # what "short" made is never committed
            if event["event"] == "stage_output" and event["step"] == "long":
                break
        assert await asyncio.to_thread(proxy.hanging.wait, 60), said.decode()
        proxy.arm(Fault("hang", times=1_000_000))
        assert users_of(home.staging), "what a build leaves is looked for in the wrong places"
        for number in numbers:
            process.send_signal(number)
            assert b"stopping: giving up " in await process.stderr.readline() or len(numbers) > 1
        _, errors = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == code, errors
        assert b"Traceback" not in errors
        await nobody_in(home.staging)
        if len(numbers) == 1:
            assert errors.decode().splitlines()[-2].startswith("error: interrupted: every machine was ended")
            assert not list(home.staging.iterdir())
    repository = open_repository(s3_server.url(prefix), home)
    assert not check(repository).problems
    assert not Catalog(repository).entries()
