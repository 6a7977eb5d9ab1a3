"""A machine whose disk is no file here: right bytes, through a death of the server; and I/O errors, not a hang."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from aenv_run import disk
from aenv_run.blocks.budget import read_counters
from aenv_run.blocks.exports import Export, Exports
from aenv_run.blocks.starting import BlockServerProcess
from aenv_run.chunk_table import CHUNK_BYTES
from aenv_run.drivers.protocol import MachineState
from aenv_run.errors import CorruptData
from aenv_run.nbd import ServedLayer
from aenv_run.repository import Repository
from aenv_run.store.posix import PosixStore
from tests.bytes_half import commit
from tests.contracts.machines import MACHINE, Bench, make_tree, sh

MIB = 1 << 20


async def make_base(directory: Path) -> Path:
    """Busybox, three files to read, and a large one that nobody reads."""
    tree = make_tree(directory / "tree")
    random_bytes = random.Random(5)
    for name, size in (("a", 2 * MIB), ("b", 2 * MIB), ("c", 2 * MIB), ("unread", 24 * MIB)):
        (tree / name).write_bytes(random_bytes.randbytes(size))
    await disk.make_image(tree, MACHINE.disk_mib, directory / "base.qcow2")
    shutil.rmtree(tree)
    return directory / "base.qcow2"


def damage(path: Path, needle: bytes) -> None:
    """Spoil the chunk in which ``needle`` begins and the one after it, as a store that lies does."""
    data = bytearray(path.read_bytes())
    at = data.index(needle)
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(at + 4096)
        file.write(bytes(CHUNK_BYTES))
    path.chmod(0o400)


async def test_a_disk_that_is_served(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not bench.driver.caps.served_layers:
        pytest.skip("this level reads the disk by itself: it gets files")
    base = await make_base(tmp_path)
    contents = random.Random(5)
    files = {name: contents.randbytes(2 * MIB) for name in "abc"}
    repository = Repository(PosixStore(tmp_path / "store"))
    blob = commit(repository, tmp_path / "captures", base.read_bytes()).disk[0]
    stored = repository.store.local_path(repository.blob_key(blob.digest))
    assert stored is not None
    damage(stored, files["c"][MIB : MIB + 4096])
    export = Export(blob=blob, repository=str(tmp_path / "store"))
    exports = Exports(bench.home.cache)
    exports.add(export, tmp_path / "holder")
    before = read_counters(bench.home.cache).fetched_bytes
    monkeypatch.setenv("AENV_STORE_PATIENCE_S", "5")
    server = BlockServerProcess(bench.home)
    server.hold()
    try:
        layer = ServedLayer(socket=bench.home.block_socket, export=export.name, size_bytes=blob.size_bytes)
        async with bench.running(replace(bench.cold(), disk=(layer,))) as machine:
            assert await sh(machine, "busybox sha256sum /a") == sum_of(files["a"], "/a")
            os.kill(server.pid(), signal.SIGKILL)
            assert await sh(machine, "busybox sha256sum /b") == sum_of(files["b"], "/b")
            said = await sh(machine, "busybox sha256sum /c 2>&1 || echo it lives")
            assert "rror" in said and "it lives" in said
            assert await machine.state() is MachineState.RUNNING
            assert await sh(machine, "echo more >/more; sync; cat /more") == "more"
            trouble = exports.trouble(layer.export)
            assert trouble is not None and isinstance(trouble.error(), CorruptData)
            fetched_bytes = read_counters(bench.home.cache).fetched_bytes - before
            assert fetched_bytes < blob.size_bytes - 16 * MIB
            (tmp_path / "store").rename(tmp_path / "away")
            failed = "busybox sha256sum /unread >/dev/null 2>&1 || echo failed; cat /more"
            assert await sh(machine, failed) == "failed\nmore"
            assert exports.trouble(layer.export) is not None
            (tmp_path / "away").rename(tmp_path / "store")
            again = "until busybox cat /unread >/dev/null 2>&1; do sleep 0.3; done; busybox sha256sum /unread"
            assert await sh(machine, again) == sum_of(contents.randbytes(24 * MIB), "/unread")
            assert exports.trouble(layer.export) is not None  # of the chunk that lies
            capture = await machine.capture(bench.capture_directory(), memory=False)
            assert len(capture.disk) == 1
    finally:
        server.stop()


def sum_of(data: bytes, name: str) -> str:
    """As sha256sum says it."""
    return f"{hashlib.sha256(data).hexdigest()}  {name}"
