"""What is interrupted: everything that changes a repository or a cache, each with what must hold afterwards."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from aenv_build.cache.ledger import Ledger
from aenv_run.blocks.chunk_file import ChunkFile
from aenv_run.cache import BlobCache
from aenv_run.cache_limit import trim
from aenv_run.capture import Capture
from aenv_run.catalog import Catalog, Move, TagRecord, tag_key
from aenv_run.catalog.export import export
from aenv_run.catalog.intake import take_in
from aenv_run.catalog.records import PAGE_MOVES
from aenv_run.check import check
from aenv_run.chunks import ChunkReader
from aenv_run.digest import canonical_json, digest_file
from aenv_run.errors import from_os
from aenv_run.garbage.collect import Rules, collect
from aenv_run.garbage.state import Gate, Timing
from aenv_run.minisign import SecretKey
from aenv_run.packing import Packer
from aenv_run.repository import Repository
from aenv_run.signatures import Trust, sign
from aenv_run.snapshot import Snapshot
from aenv_run.store import Store
from aenv_run.store.memory import MemoryStore
from aenv_run.types import Name, SnapshotId, StageKey, Tag
from tests.bytes_half import capture, commit, draft

NAME, LATEST, STABLE = Name("task"), Tag("latest"), Tag("stable")
SIGNER = SecretKey.new()
KEY = StageKey("5" * 64)
BIG = bytes(range(256)) * 6000  # more than one write


class Clock:
    """Goes on only while somebody sleeps, and then at once: a lock of a dead process is soon seen to be one."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def read(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


class World:
    """A repository with ``task:1``, tagged latest and stable, which every test looks after, and an empty cache."""

    def __init__(self, place: Path, store: Store) -> None:
        self.place, self.store = place, store
        self.scratch = place / "scratch"
        self.scratch.mkdir(exist_ok=True)
        self.reopen()
        self.base = commit(self.repository, self.scratch, b"base")
        self.catalog.publish(NAME, self.base.id, [LATEST, STABLE])
        self.other: Snapshot = self.base
        self.captured = capture(self.scratch, b"one", BIG, ram=b"ram")

    def reopen(self) -> None:
        """As another process sees it."""
        clock = Clock()
        self.repository = Repository(self.store, Gate(self.store, Timing(clock_s=clock.read, sleep=clock.sleep)))
        self.catalog = Catalog(self.repository, by="x")
        self.cache = BlobCache(self.place / "cache", self.repository)

    def whole(self) -> None:
        """Nothing is wrong, and what was there before is intact."""
        report = check(self.repository, deep=True)
        assert not report.problems, report.problems
        assert self.repository.snapshot(self.base.id) == self.base
        for version in self.catalog.versions(NAME):
            self.repository.snapshot(self.catalog.resolve(f"{NAME}:{version}").snapshot_id)
        for tag in self.catalog.tags(NAME):
            moves = list(self.catalog.tag_log.moves(NAME, tag))[::-1]
            assert [move.number for move in moves] == list(range(1, len(moves) + 1))
            assert [move.from_version for move in moves] == [None, *(move.to_version for move in moves)][:-1]

    def whole_capture(self) -> Capture:
        """What is to be committed: after an error it is still there, after a kill it may be gone."""
        if not all(path.exists() for path in (*self.captured.disk, *self.captured.memory.values())):
            self.captured = capture(self.scratch, b"one", BIG, ram=b"ram")
        return self.captured

    def version_of(self, tag: Tag) -> int | None:
        return self.catalog.tag_log.read(NAME, tag)


@dataclass(frozen=True)
class Act:
    """``run`` is stopped; then ``is_done`` says whether its effect is seen; ``repeat`` must work in either case.

    ``changes_store`` is false where all that changes is on the node's own disk.
    """

    name: str
    prepare: Callable[[World], object]
    run: Callable[[World], object]
    is_done: Callable[[World], bool]
    repeat: Callable[[World], object] | None = None
    changes_store: bool = True


def nothing(world: World) -> None:
    """It begins with what is there."""


def second(world: World) -> None:
    """A second snapshot, which no name has yet."""
    world.other = commit(world.repository, world.scratch, b"second")


def two_versions(world: World) -> None:
    second(world)
    world.catalog.publish(NAME, world.other.id)


def long_history(world: World) -> None:
    """One more move of the tag makes a page of its oldest moves."""
    two_versions(world)
    moves = [
        Move(number=number, act="tag", at="2025-01-31T12:00:00Z", from_version=one, to_version=other)
        for number in range(1, 2 * PAGE_MOVES)
        for one, other in [(None if number == 1 else 1 + number % 2, 2 - number % 2)]
    ]
    data = canonical_json(TagRecord(version=1, moves=tuple(moves)))
    key = tag_key(NAME, STABLE)
    assert world.store.swap(key, data, expected=world.store.read(key, limit_bytes=1 << 16))


def build(world: World) -> None:
    """A commit, its publication, and a tag that moves."""
    snapshot = world.repository.commit(world.whole_capture(), draft(world.base))
    version = world.catalog.publish(NAME, snapshot.id, [LATEST])
    world.catalog.tag(NAME, STABLE, version)


def built(world: World) -> bool:
    versions = world.catalog.versions(NAME)
    assert versions in ((1,), (1, 2))
    return versions == (1, 2) and world.version_of(STABLE) == 2


def publish(world: World) -> None:
    world.catalog.publish(NAME, world.other.id, [LATEST, STABLE])


def is_at(version: int) -> Callable[[World], bool]:
    def is_done(world: World) -> bool:
        assert world.version_of(STABLE) in (1, 2)
        return world.version_of(STABLE) == version

    return is_done


def roll_back(world: World) -> None:
    if world.version_of(STABLE) == 1:
        world.catalog.rollback(NAME, STABLE, 2)


def remove(world: World) -> None:
    if 1 in world.catalog.versions(NAME):
        world.catalog.remove(NAME, 1)


def labels(world: World) -> dict[str, str]:
    (entry,) = world.catalog.entries(NAME)
    return entry.labels


def layout(world: World) -> None:
    """An export of another repository, of a snapshot with its parent."""
    theirs = Catalog(Repository(MemoryStore()), by="y")
    base = commit(theirs.repository, world.scratch, b"their base")
    world.other = theirs.repository.commit(capture(world.scratch, BIG, ram=b"ram"), draft(base))
    theirs.publish(Name("theirs"), world.other.id)
    export(theirs, "theirs:1", world.place / "layout")
    (world.place / "import").mkdir()


def import_it(world: World) -> None:
    scratch = world.place / "import"
    for left in scratch.iterdir():
        left.unlink()
    assert take_in(world.catalog, world.place / "layout", scratch).snapshot_id == world.other.id


def export_it(world: World) -> None:
    if not (world.place / "out").exists():
        export(world.catalog, "task:1", world.place / "out")


def exported(world: World) -> bool:
    if not (world.place / "out").exists():
        return False
    scratch = world.place / "back"
    scratch.mkdir()
    assert take_in(Catalog(Repository(MemoryStore())), world.place / "out", scratch).snapshot_id == world.base.id
    shutil.rmtree(scratch)
    return True


def layers(world: World) -> None:
    world.other = commit(world.repository, world.scratch, b"layer", BIG)


def fill(world: World) -> None:
    """A cache that was used long ago."""
    layers(world)
    fetch(world)
    for path in (world.place / "cache").rglob("*"):
        if path.is_file():
            os.utime(path, (1_000_000_000, 1_000_000_000))


def fetch(world: World) -> None:
    for blob in world.other.disk:
        assert digest_file(world.cache.path(blob)) == blob.digest


def cached(world: World) -> bool:
    """What has a blob's name in the cache is that blob."""
    paths = list((world.place / "cache" / "blobs").glob("*/*"))
    assert all(digest_file(path).hex == path.name for path in paths)
    return len(paths) == len(world.other.disk)


def evict(world: World) -> None:
    trim(world.place / "cache", 0, grace_s=0.0)


def pack(world: World) -> None:
    """What is long unused becomes packed, where the store has files."""
    if world.store.has_files:
        Packer(world.repository, world.place / "cache", world.place / "staging", older_than_s=0).pack()


def packed(world: World) -> bool:
    blob = world.other.disk[1]
    with world.repository.open_blob(blob.digest) as reader:
        assert reader.read() == BIG
    return not world.store.has_files or [one.packed for one in world.repository.blobs.forms(blob.digest)] == [True]


def keep(world: World) -> None:
    Ledger(world.repository, clock=lambda: datetime(2025, 1, 31, tzinfo=UTC)).keep(
        "stages", KEY, world.other, replace=True
    )


def kept(world: World) -> bool:
    found = Ledger(world.repository).recall("stages", KEY)
    assert found is None or found.snapshot.id in (world.base.id, world.other.id)
    return found is not None and found.snapshot.id == world.other.id


def kept_before(world: World) -> None:
    second(world)
    Ledger(world.repository).keep("stages", KEY, world.base)


def committed(world: World) -> bool:
    return len(list(world.repository.ids())) == 2


def commit_it(world: World) -> SnapshotId:
    return world.repository.commit(world.whole_capture(), draft(world.base)).id


def gc(world: World) -> None:
    """What has no name, and what was removed."""
    collect(world.repository, Rules(grace_s=0.0), dict)


def removed(world: World) -> None:
    two_versions(world)
    world.catalog.remove(NAME, 2)
    commit(world.repository, world.scratch, BIG, parent=world.base)


def collected(world: World) -> bool:
    left = [info.key for place in ("snapshots/", "blobs/", "packed/") for info in world.store.list(place)]
    assert len(left) >= 2, "the base and its layer"
    return len(left) == 2


def fill_chunks(world: World) -> None:
    """As the server of layers does when a guest has read all of one."""
    blob, reader = world.other.disk[1], ChunkReader(world.repository)
    table = reader.table(blob)
    assert table is not None and table.count > 3
    try:
        file = ChunkFile(world.place / "chunks", table)
    except OSError as error:
        raise from_os(error, "opening the chunks") from error
    for index in range(table.count):
        if not file.has(index):
            file.put(index, reader.read(blob, table, index, 1)[0])
    file.close()


def chunks_filled(world: World) -> bool:
    """What it says to have is right; the rest it fetches again."""
    table = ChunkReader(world.repository).table(world.other.disk[1])
    assert table is not None
    file = ChunkFile(world.place / "chunks", table)
    here = [index for index in range(table.count) if file.has(index)]
    assert all(table.matches(index, file.read(index, 0, table.length(index))) for index in here)
    file.close()
    return len(here) == table.count


def sign_it(world: World) -> None:
    sign(world.store, world.base.id, canonical_json(world.base), SIGNER)


def signed(world: World) -> bool:
    return Trust((SIGNER.public,)).signer(world.store, world.base.id, canonical_json(world.base)) is not None


ACTS = (
    Act("commit", nothing, commit_it, committed),
    Act("publish", second, publish, is_at(2)),
    Act("build", nothing, build, built),
    Act("tag move", two_versions, lambda world: world.catalog.tag(NAME, STABLE, 2), is_at(2)),
    Act("promote", long_history, lambda world: world.catalog.promote(NAME, STABLE, 2), is_at(2)),
    Act("roll back", long_history, roll_back, is_at(2)),
    Act("version removal", nothing, remove, lambda world: world.catalog.versions(NAME) == ()),
    Act(
        "label", nothing, lambda world: world.catalog.label(NAME, 1, {"suite": "nightly"}),
        lambda world: labels(world) == {"suite": "nightly"},
    ),
    Act("build record", kept_before, keep, kept),
    Act("sign", nothing, sign_it, signed),
    Act("import", layout, import_it, lambda world: Name("theirs") in world.catalog.names()),
    Act("pack", layers, pack, packed),
    Act("gc", removed, gc, collected),
    Act("chunk cache fill", layers, fill_chunks, chunks_filled, changes_store=False),
    Act("export", nothing, export_it, exported, changes_store=False),
    Act("cache fill", layers, fetch, cached, changes_store=False),
    Act("cache eviction", fill, evict, lambda world: not cached(world), changes_store=False),
)  # fmt: skip
