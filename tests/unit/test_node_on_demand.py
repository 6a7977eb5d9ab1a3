"""Sandboxes whose disk is not here: served while they run, found anew at each start, or told why not."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from aenv_run import nbd_client
from aenv_run.blocks.layers import Layers
from aenv_run.cache import BlobCache
from aenv_run.catalog import Catalog
from aenv_run.chunk_table import CHUNK_BYTES
from aenv_run.errors import CorruptData, StoreUnavailable
from aenv_run.lifecycle import State
from aenv_run.nbd import ServedLayer
from aenv_run.node_wire import SnapshotRequest
from aenv_run.repository import Draft, Repository
from aenv_run.sandbox import HostedSandbox
from aenv_run.snapshot import Blob
from aenv_run.store.posix import PosixStore
from aenv_run.store.protocol import StoreKey
from aenv_run.types import Architecture, Context, MachineSpec, Name
from tests.bytes_half import capture
from tests.unit.node_site import Site, fork, launch, make_site

DATA = random.Random(11).randbytes(20 * CHUNK_BYTES)


class FarStore(PosixStore):
    """A store whose files are no files of this machine."""

    def local_path(self, key: StoreKey) -> Path | None:
        return None


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Site]:
    """A home whose repository is far away; it has ``large:1``, without memory."""
    site = make_site(tmp_path / "home", tmp_path / "seed")
    repository = Repository(FarStore(tmp_path / "far"))
    draft = Draft(architecture=Architecture("amd64"), machine=MachineSpec(), context=Context())
    snapshot = repository.commit(capture(tmp_path / "captures", DATA), draft)
    catalog = Catalog(repository)
    catalog.publish(Name("large"), snapshot.id, [])
    cache = BlobCache(site.home.cache, repository)
    layers = Layers.of(site.home, cache, str(tmp_path / "far"), on_demand=True)
    tools = replace(site.tools, repository=repository, catalog=catalog, cache=cache, layers=layers)
    yield Site(site.home, site.engine, tools)
    for machine in list(site.engine.machines.values()):
        machine.end("the test is over")
    layers.server.stop()


def blob(site: Site) -> Blob:
    return site.tools.repository.snapshot(site.tools.catalog.resolve("large").snapshot_id).disk[0]


def served(site: Site) -> ServedLayer:
    """The base of the machine that was started last."""
    layer = site.engine.disks[-1][0]
    assert isinstance(layer, ServedLayer)
    return layer


def held(sandbox: HostedSandbox) -> list[str]:
    return sorted(path.name for path in sandbox.directory.below.glob("*"))


def spoil(site: Site) -> Path:
    """All chunks in the store are wrong."""
    assert site.tools.layers is not None
    paths = list(Path(site.tools.layers.repository).rglob(blob(site).digest.hex))
    assert paths
    for path in paths:
        path.chmod(0o600)
        path.write_bytes(bytes(path.stat().st_size))
    return paths[0]


async def test_a_launch_reads_what_it_touches(far: Site) -> None:
    node = far.node()
    sandbox = await launch(node, snapshot="large")
    assert sandbox.record.disk[0].file is None and held(sandbox) == ["00.served"]
    assert far.engine.read[served(far).export] == DATA[-1:]
    assert node.info(sandbox).warnings == ()
    await node.pause(sandbox)
    await sandbox.freed()
    assert held(sandbox) == []
    await node.resume(sandbox, timeout_s=60, cold=False)
    assert held(sandbox) == ["00.served"]
    (child,) = await fork(node, sandbox, 1)
    assert child.sandbox is not None
    assert held(node.find(child.sandbox.sandbox_id)) == ["00.served"]
    reply = await node.snapshot(sandbox, SnapshotRequest(memory=False))
    assert far.tools.repository.snapshot(reply.snapshot_id).disk[0] == blob(far)
    await node.kill_live()
    assert far.clean()
    await node.close()


async def test_the_server_is_there_again_for_a_machine_that_is_taken_over(far: Site) -> None:
    first = far.node()
    sandbox = await launch(first, snapshot="large")
    layer = served(far)
    await first.close()
    server = far.tools.layers.server if far.tools.layers else None
    assert server is not None
    pid = server.pid()
    server.stop()
    assert server.pid() == 0
    second = far.node()
    await second.reconcile()
    await second.settled()
    assert server.pid() not in (0, pid)
    os.kill(server.pid(), signal.SIGKILL)  # and from now on it is looked after
    server.ensure()
    assert nbd_client.read(layer, CHUNK_BYTES, 4) == DATA[CHUNK_BYTES : CHUNK_BYTES + 4]
    assert second.find(sandbox.id).state is State.RUNNING
    await second.kill_live()
    await second.close()


async def test_what_is_whole_here_is_opened_as_a_file(far: Site) -> None:
    node = far.node()
    sandbox = await launch(node, snapshot="large")
    far.tools.cache.path(blob(far))
    await node.pause(sandbox)
    await node.resume(sandbox, timeout_s=60, cold=False)
    (layer, *_) = far.engine.disks[-1]
    assert isinstance(layer, Path) and held(sandbox) == ["00.qcow2"]
    other = await launch(node, snapshot="large")
    assert other.record.disk[0].file is not None
    await node.kill_live()
    await node.close()


async def test_a_driver_that_needs_files_gets_them(far: Site) -> None:
    far.engine.caps = replace(far.engine.caps, served_layers=False)
    node = far.node()
    await launch(node, snapshot="large")
    (layer, *_) = far.engine.disks[-1]
    assert isinstance(layer, Path) and layer.read_bytes() == DATA
    await node.kill_live()
    await node.close()


async def test_a_launch_whose_disk_cannot_be_read_says_which_chunk(far: Site) -> None:
    spoil(far)
    node = far.node()
    with pytest.raises(CorruptData, match=r"the disk cannot be read: chunk \d+ of blob sha256:"):
        await launch(node, snapshot="large")
    assert far.clean()
    await node.close()


async def test_a_damaged_chunk_is_a_warning_of_a_sandbox_that_lives(far: Site) -> None:
    node = far.node()
    sandbox = await launch(node, snapshot="large")
    spoil(far)
    with pytest.raises(StoreUnavailable):
        nbd_client.read(served(far), 10 * CHUNK_BYTES, 4)
    (warning,) = node.info(sandbox).warnings
    assert warning.code == CorruptData.code and str(blob(far).digest) in warning.message
    assert sandbox.state is State.RUNNING
    await node.kill_live()
    await node.close()
