"""du: what is unique and what is shared, by name, version and snapshot."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from aenv_run.catalog import Catalog
from aenv_run.catalog.usage import BUILD_CACHE, UNNAMED, Usage, Used, usage
from aenv_run.chunk_table import CHUNK_BYTES, table_bytes
from aenv_run.cli.command import cli
from aenv_run.errors import NotFound
from aenv_run.packing import Packer
from aenv_run.repository import Repository, manifest_key
from aenv_run.store.memory import MemoryStore
from aenv_run.store.posix import PosixStore
from aenv_run.types import Model, Name, SnapshotId, StageKey
from tests.bytes_half import capture, commit, draft

TASK, OTHER = Name("task"), Name("other")


class Kept(Model):
    snapshot_id: SnapshotId
    note: str = ""


def noise(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    """task:1 and :2 on one base, other:1 on it too, a step of a build, and one that nothing names."""
    repository = Repository(MemoryStore())
    catalog = Catalog(repository, by="x")
    base = commit(repository, tmp_path, noise(1000, 0))
    one, two, three = (commit(repository, tmp_path, noise(size, size), parent=base) for size in (100, 200, 300))
    catalog.publish(TASK, one.id)
    catalog.publish(TASK, two.id)
    catalog.publish(OTHER, three.id)
    step = commit(repository, tmp_path, noise(40, 40), parent=base)
    repository.record("stages", StageKey("a" * 64), Kept(snapshot_id=step.id))
    commit(repository, tmp_path, noise(7, 7), parent=one)
    return catalog


def test_by_name(catalog: Catalog) -> None:
    found = usage(catalog)
    rows = {row.of: row for row in found.rows}
    assert rows[TASK] == Used(
        of="task", snapshots=2, logical_bytes=1300, stored_bytes=1300, unique_bytes=200, shared_bytes=1100
    )
    assert (rows[OTHER].unique_bytes, rows[OTHER].shared_bytes) == (300, 1000)
    assert (rows[BUILD_CACHE].snapshots, rows[BUILD_CACHE].unique_bytes) == (1, 40)
    assert (rows[UNNAMED].snapshots, rows[UNNAMED].unique_bytes, rows[UNNAMED].shared_bytes) == (2, 7, 1100)
    assert found.total.stored_bytes == found.total.unique_bytes == 1647 and found.total.snapshots == 6
    assert found.orphan_bytes == 0 and found.blobs == 6 and found.packed_blobs == 0


def test_by_version_and_id(catalog: Catalog) -> None:
    id = catalog.resolve("task:2").snapshot_id
    rows = usage(catalog, ("task", "task:2", id)).rows
    assert [row.of for row in rows] == ["task:1", "task:2", "task", "task:2", id]
    assert [row.unique_bytes for row in rows] == [0, 200, 200, 200, 200]
    assert [row.stored_bytes for row in rows] == [1100, 1200, 1300, 1200, 1200]
    for wrong in ("none", "task:9", "f" * 64):
        with pytest.raises(NotFound):
            usage(catalog, (wrong,))


def test_what_is_removed_frees_what_was_unique(catalog: Catalog) -> None:
    (row,) = usage(catalog, ("other:1",)).rows
    id = catalog.resolve("other:1").snapshot_id
    before = usage(catalog).total.stored_bytes
    catalog.repository.store.delete(manifest_key(id))
    found = usage(catalog)
    assert found.total.stored_bytes == before - row.unique_bytes
    assert found.orphan_bytes == row.unique_bytes and "other" not in {one.of for one in found.rows}


def test_stored_is_what_it_takes(tmp_path: Path) -> None:
    """Holes count nothing, a packed blob as packed, and a table belongs to its blob."""
    repository = Repository(PosixStore(tmp_path / "store"))
    catalog = Catalog(repository, by="x")
    text = b"".join(b"%d lines of text\n" % number for number in range(40_000))
    captured = capture(tmp_path, text, ram=b"")
    with captured.memory["ram"].open("wb") as file:
        file.truncate(1 << 26)
    catalog.publish(TASK, repository.commit(captured, draft()).id)
    raw = usage(catalog)
    files = len(text) + (1 << 26) + len(b"device state")
    assert raw.total.logical_bytes == files and raw.total.stored_bytes < len(text) + table_bytes(1 << 26) + 40_000
    Packer(repository, tmp_path / "cache", tmp_path / "staging", older_than_s=0).pack()
    packed = usage(catalog)
    assert packed.packed_blobs >= 1 and packed.blobs == raw.blobs
    assert packed.total.logical_bytes == files and packed.total.stored_bytes < raw.total.stored_bytes - CHUNK_BYTES


def test_what_cannot_be_read_is_said(catalog: Catalog) -> None:
    id = catalog.resolve("task:1").snapshot_id
    store = catalog.repository.store
    assert isinstance(store, MemoryStore)
    store.damage(manifest_key(id), b"{}")
    found = usage(catalog)
    assert found.unreadable == (id,) and {row.of: row.snapshots for row in found.rows}["task"] == 1


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENV_HOME", str(tmp_path))
    monkeypatch.delenv("AENV_REPOSITORY", raising=False)
    repository = Repository(PosixStore(tmp_path / "repository"))
    Catalog(repository, by="x").publish(TASK, commit(repository, tmp_path, noise(5000, 1)).id)
    run = CliRunner().invoke
    lines = run(cli, ["du"]).output.splitlines()
    assert lines[0].split() == ["OF", "SNAPSHOTS", "LOGICAL", "STORED", "UNIQUE", "SHARED"]
    assert lines[1].split()[:4] == ["task", "1", "4.9", "KiB"] and lines[2].startswith("total")
    assert Usage.model_validate_json(run(cli, ["du", "task:1", "--json"]).output).rows[0].of == "task:1"
