"""A repository in S3 and an empty cache: a launch fetches what it touches, whatever engine runs it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aenv_run import disk
from aenv_run.capture import Capture
from aenv_run.catalog import Catalog
from aenv_run.config import open_repository
from aenv_run.drivers.protocol import DriverName
from aenv_run.paths import Home
from aenv_run.repository import Draft
from aenv_run.types import Architecture, Context, MachineSpec, Name
from tests.contracts.machines import make_tree
from tests.e2e.conftest import node_home
from tests.e2e.warm_python import need
from tests.s3.server import Server

MIB = 1 << 20
MACHINE = MachineSpec(cpus=1, memory_mib=192, disk_mib=160)
WANTED = random.Random(7).randbytes(3 * MIB)
UNREAD_BYTES = 24 * MIB
#: Less than the image has, more than nothing.
CACHE_MIB = 8


async def publish(home: Home, scratch: Path) -> int:
    """``large:1`` in the repository of $AENV_REPOSITORY: a file that is read, and much that is not; its size."""
    scratch.mkdir()
    tree = make_tree(scratch / "tree")
    (tree / "wanted").write_bytes(WANTED)
    (tree / "unread").write_bytes(random.Random(8).randbytes(UNREAD_BYTES))
    await disk.make_image(tree, MACHINE.disk_mib, scratch / "base.qcow2")
    size_bytes = (scratch / "base.qcow2").stat().st_size
    repository = open_repository(None, home)
    draft = Draft(architecture=Architecture("amd64"), machine=MACHINE, context=Context())
    snapshot = await asyncio.to_thread(
        repository.commit, Capture(scratch, (scratch / "base.qcow2",), {}, None), draft
    )
    await asyncio.to_thread(Catalog(repository).publish, Name("large"), snapshot.id, [])
    return size_bytes


@pytest.mark.parametrize("driver", [DriverName.GVISOR, DriverName.QEMU])
@pytest.mark.long("qemu")
def test_a_launch_fetches_what_it_touches(
    driver: DriverName, s3_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(driver)
    for name, value in {
        "AENV_DRIVER": driver.value,
        "AENV_REPOSITORY": s3_server.url(f"on-demand-{driver.value}"),
        "AENV_CACHE_MIB": str(CACHE_MIB),
        "AENV_FIRST_BOOT_WARMS": "off",
    }.items():
        monkeypatch.setenv(name, value)
    with node_home(tmp_path) as home:
        size_bytes = asyncio.run(publish(home, tmp_path / "scratch"))
        aenv = command(home)
        sandbox = aenv("start", "large:1")
        assert aenv("exec", sandbox, "--", "busybox", "sha256sum", "/wanted").split()[0] == sha256(WANTED)
        # what is dropped meanwhile is fetched again
        checked = "dd if=/unread bs=1M count=12 of=/dev/null 2>/dev/null; busybox sha256sum /wanted"
        assert sha256(WANTED) in aenv("exec", sandbox, "--", "sh", "-c", checked)
        record = json.loads((home.sandboxes / sandbox / "sandbox.json").read_bytes())
        assert [layer["file"] for layer in record["disk"]] == [None]
        found = json.loads(aenv("cache", "show", "--json"))
        assert found["partial_blobs"] == 1 and found["own_bytes"] <= (CACHE_MIB + 8) * MIB
        assert json.loads(aenv("ls", "--json"))[0]["warnings"] == []
        aenv("rm", sandbox)
        aenv("cache", "prefetch", "large:1")
        second = aenv("start", "large:1")
        record = json.loads((home.sandboxes / second / "sandbox.json").read_bytes())
        assert record["disk"][0]["file"] is not None
        assert aenv("exec", second, "--", "busybox", "sha256sum", "/wanted").split()[0] == sha256(WANTED)
        aenv("rm", second)
    assert size_bytes > UNREAD_BYTES


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def command(home: Home) -> Callable[..., str]:
    """``aenv`` with that home; what it prints."""

    def run(*arguments: str) -> str:
        environment = {**os.environ, "AENV_HOME": str(home.root)}
        done = subprocess.run(
            [sys.executable, "-m", "aenv_run.cli", *arguments],
            capture_output=True, text=True, env=environment, timeout=180, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout.strip()

    return run
