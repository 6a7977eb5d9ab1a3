"""Packing in the background: what is due, that nothing is ever without a form, and that readers do not notice."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from aenv_run.blobs import packed_file
from aenv_run.cache import BlobCache
from aenv_run.check import check
from aenv_run.chunks import CHUNK_BYTES, ChunkReader
from aenv_run.cli.command import cli
from aenv_run.config import pack_after_s
from aenv_run.errors import InvalidInput, NotFound, Unsupported
from aenv_run.node_packing import NodePacking
from aenv_run.packing import Packer, Packing
from aenv_run.paths import Home
from aenv_run.repository import Repository, manifest_key
from aenv_run.snapshot import Blob, Snapshot
from aenv_run.store import StoreKey
from aenv_run.store.memory import Crash, MemoryStore
from aenv_run.store.posix import PosixStore
from tests.bytes_half import capture, commit, draft
from tests.unit.test_cache import settle

TEXT = b"".join(b"%d lines of text\n" % number for number in range(60_000))
assert len(TEXT) > 3 * CHUNK_BYTES


class StopsAt(PosixStore):
    """Is killed before or after its n-th write."""

    def __init__(self, root: Path, at: int, when: str) -> None:
        super().__init__(root)
        self._left, self._when = at, when
        self.writes = 0

    def put_file(self, key: StoreKey, source: Path, *, consume: bool = False) -> bool:
        self._count("before")
        created = super().put_file(key, source, consume=consume)
        self._count("after")
        return created

    def delete(self, key: StoreKey) -> None:
        self._count("before")
        super().delete(key)
        self._count("after")

    def _count(self, when: str) -> None:
        self.writes += when == "before"
        if when == self._when and self.writes == self._left:
            raise Crash(f"killed {when} write {self._left}")


class World:
    """A home with a repository of one snapshot, and its cache."""

    def __init__(self, root: Path) -> None:
        self.home = Home(root / "home")
        self.repository = Repository(PosixStore(self.home.repository))
        self.cache = BlobCache(self.home.cache, self.repository)
        self.snapshot = commit(self.repository, root, TEXT)
        self.root = root

    @property
    def blob(self) -> Blob:
        return self.snapshot.disk[0]

    def pack(self, older_than_s: float = 0, **settings: bool) -> Packing:
        packer = Packer(self.repository, self.home.cache, self.home.staging, older_than_s=older_than_s)
        return packer.pack(**settings)

    def forms(self, blob: Blob | None = None) -> list[bool]:
        return [one.packed for one in self.repository.blobs.forms((blob or self.blob).digest)]

    def whole(self) -> None:
        report = check(self.repository, deep=True)
        assert report.ok and report.counts["temporaries"] == 0, report.problems
        assert self.read(self.blob) == TEXT

    def read(self, blob: Blob) -> bytes:
        with self.repository.open_blob(blob.digest) as reader:
            return reader.read()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_what_was_not_used_is_packed_and_is_used_again(world: World) -> None:
    assert world.pack(older_than_s=3600) == Packing(dry_run=False, used=1)
    planned = world.pack(dry_run=True)
    assert planned.packed == 1 and planned.packed_bytes == 0 and world.forms() == [False]
    done = world.pack()
    assert done.packed == 1 and done.raw_bytes >= len(TEXT) > 3 * done.packed_bytes > 0
    assert world.forms() == [True]
    world.whole()
    assert world.cache.path(world.blob).read_bytes() == TEXT
    assert not list(world.home.staging.iterdir())
    assert world.pack() == Packing(dry_run=False)
    again = world.repository.commit(capture(world.root, TEXT), draft(other="label"))
    assert world.forms() == [True] and again.disk == world.snapshot.disk


def test_what_a_sandbox_or_another_cache_has_stays(world: World) -> None:
    other = BlobCache(world.root / "other", world.repository)
    other.path(world.blob)
    assert world.pack() == Packing(dry_run=False, used=1)
    world.cache.path(world.blob)
    assert world.pack() == Packing(dry_run=False, used=1) and world.forms() == [False]


def test_what_the_cache_of_this_home_has_goes_when_it_is_idle(world: World) -> None:
    raw = world.repository.store.local_path(world.repository.blob_key(world.blob.digest))
    assert raw is not None
    settle(raw)
    cached = world.cache.path(world.blob)
    assert cached.samefile(raw)
    mark = world.home.cache / "verified" / world.blob.digest.hex[:2] / world.blob.digest.hex
    assert mark.exists() and world.pack(older_than_s=3600).used == 1
    assert world.pack().packed == 1
    assert not cached.exists() and not mark.exists() and world.forms() == [True]
    target = world.root / "sandbox"
    world.cache.link(world.blob, target)
    assert target.read_bytes() == TEXT
    world.whole()


def test_what_does_not_shrink_is_tried_once(world: World, tmp_path: Path) -> None:
    noise = os.urandom(2 * CHUNK_BYTES)
    noisy = commit(world.repository, tmp_path, noise)
    blob = noisy.disk[0]
    done = world.pack()
    assert (done.packed, done.unpackable) == (1, 1) and world.forms(blob) == [False]
    before = world.home.staging.stat().st_mtime_ns
    assert world.pack().unpackable == 1 and world.home.staging.stat().st_mtime_ns == before
    marks = world.home.cache / "unpackable"
    assert [mark.name for mark in marks.glob("*/*")] == [blob.digest.hex]
    world.repository.store.delete(manifest_key(noisy.id))  # collected
    assert world.pack() == Packing(dry_run=False) and not list(marks.glob("*/*"))


def test_blobs_of_old_snapshots_are_packed_by_their_digest(world: World) -> None:
    old = Snapshot.model_validate(
        {"architecture": "amd64", "machine": {}, "disk": [{**world.blob.model_dump(exclude={"chunks"})}]}
    )
    assert old.format == "aenv.snapshot/1"
    repository = Repository(PosixStore(world.root / "old"))
    path = world.root / "file"
    path.write_bytes(TEXT)
    repository.adopt(old, {world.blob.digest: path})
    packer = Packer(repository, world.root / "cache", world.root / "staging", older_than_s=0)
    assert packer.pack().packed == 1
    assert check(repository, deep=True).ok
    with repository.open_blob(world.blob.digest) as reader:
        assert reader.read() == TEXT


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", [1, 2])
def test_killed_at_any_write_a_form_is_left(world: World, at: int, when: str) -> None:
    stops = Repository(StopsAt(world.home.repository, at, when))
    with pytest.raises(Crash):
        Packer(stops, world.home.cache, world.home.staging, older_than_s=0).pack()
    world.whole()
    assert world.forms() == {(1, "before"): [False], (2, "after"): [True]}.get((at, when), [False, True])
    if world.forms() != [True]:
        assert world.pack().packed == 1
    world.whole()
    assert world.forms() == [True] and not list(world.home.staging.iterdir())


def test_a_damaged_raw_blob_is_told_and_kept(world: World) -> None:
    path = world.repository.store.local_path(world.repository.blob_key(world.blob.digest))
    assert path is not None
    path.chmod(0o600)
    path.write_bytes(TEXT[:-1] + b"?")
    assert world.pack().damaged == (world.blob.digest,)
    assert world.forms() == [False]


def test_a_damaged_packed_form_beside_a_good_raw_one_is_made_anew(world: World) -> None:
    key = world.repository.blobs.packed_key(world.blob.digest)
    world.repository.store.put_new(key, b"nonsense")
    assert world.pack().packed == 1
    world.whole()


def test_readers_do_not_notice(world: World) -> None:
    """Each of them reads while the blob is packed, and again."""
    reader = ChunkReader(world.repository)
    table = reader.table(world.blob)
    assert table is not None
    wrong: list[object] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            if b"".join(reader.read(world.blob, table, 0, table.count)) != TEXT or world.read(world.blob) != TEXT:
                wrong.append("other bytes")
            world.repository.require_blob(world.blob)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert world.pack().packed == 1
        assert b"".join(reader.read(world.blob, table, 0, table.count)) == TEXT
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong


def test_two_packers_at_once(world: World) -> None:
    for number in range(3):
        commit(world.repository, world.root, TEXT + bytes([number]))
    barrier = threading.Barrier(2)

    def pack(_: int) -> Packing:
        barrier.wait()
        return world.pack()

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(pack, range(2)))
    assert sum(one.packed for one in done) >= 4 and not any(one.damaged for one in done)
    world.whole()
    assert len(list(world.repository.store.list("packed/"))) == 4
    assert not [info for info in world.repository.store.list("blobs/") if info.size_bytes > CHUNK_BYTES]


def test_what_is_collected_meanwhile_is_no_error(world: World) -> None:
    packer = Packer(world.repository, world.home.cache, world.home.staging, older_than_s=0)

    def collect(done: int, total: int) -> None:
        world.repository.store.delete(world.repository.blob_key(world.blob.digest))

    packer.pack(told=collect)
    assert world.forms() == [True]  # an orphan, or what a commit that came meanwhile wants


def test_a_repository_over_a_wire_has_nothing_to_pack(tmp_path: Path) -> None:
    with pytest.raises(Unsupported):
        Packer(Repository(MemoryStore()), tmp_path, tmp_path, older_than_s=0)


async def test_the_node_packs_in_a_process_of_its_own(world: World) -> None:
    done = await NodePacking(world.home, None, 0.0).once(0.0)
    assert done.packed == 1 and world.forms() == [True]


async def test_the_node_packs_now_and_then(world: World) -> None:
    packing = asyncio.create_task(NodePacking(world.home, None, 0.0, first_s=0.0, every_s=0.01).run())
    while world.forms() != [True]:  # noqa: ASYNC110 - another process does it
        await asyncio.sleep(0.01)
    again = commit(world.repository, world.root, TEXT + TEXT)
    while world.forms(again.disk[0]) != [True]:  # noqa: ASYNC110 - another process does it
        await asyncio.sleep(0.01)
    packing.cancel()
    await asyncio.wait([packing])
    assert check(world.repository, deep=True).ok  # what a cancelled one was about to write may lie there
    await NodePacking(world.home, None, None).run()  # off: at once


def test_command(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENV_HOME", str(world.home.root))
    monkeypatch.delenv("AENV_REPOSITORY", raising=False)
    run = CliRunner().invoke
    assert "packed 0 blobs" in run(cli, ["pack"]).output and world.forms() == [False]
    assert "would pack 1 blobs" in run(cli, ["pack", "--older-than", "0s", "--dry-run"]).output
    assert Packing.model_validate_json(run(cli, ["pack", "--older-than", "0s", "--json"]).output).packed == 1
    assert world.forms() == [True]
    for text, seconds in (("12", 43200.0), ("off", None), ("", 172800.0)):
        monkeypatch.setenv("AENV_PACK_AFTER_H", text)
        assert pack_after_s() == seconds
    monkeypatch.setenv("AENV_PACK_AFTER_H", "soon")
    with pytest.raises(InvalidInput, match="AENV_PACK_AFTER_H"):
        pack_after_s()


def test_scratch_of_a_file_that_is_gone(world: World, tmp_path: Path) -> None:
    with pytest.raises(NotFound), packed_file(tmp_path / "none", tmp_path, world.blob, None):
        pass
    with (
        pytest.raises(NotFound),
        world.repository.open_blob(Blob(digest="sha256:" + "0" * 64, size_bytes=1).digest),
    ):
        pass
