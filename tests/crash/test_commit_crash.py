"""A commit that is killed, or meets a full disk, at any moment: the repository is whole, and a repeat works."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aenv_run.cache import BlobCache
from aenv_run.catalog import Catalog, Move, TagRecord, tag_key
from aenv_run.catalog.records import PAGE_MOVES
from aenv_run.check import check
from aenv_run.digest import canonical_json
from aenv_run.errors import NoSpace, NotFound, StoreUnavailable
from aenv_run.repository import Repository
from aenv_run.snapshot import Snapshot
from aenv_run.store.memory import Crash, Fault, MemoryStore
from aenv_run.store.posix import PosixStore
from aenv_run.types import Name, SnapshotId, Tag
from tests.bytes_half import capture, commit, draft
from tests.small_file_system import fill, small_file_system

NAME, LATEST, STABLE = Name("task"), Tag("latest"), Tag("stable")
WHENS = ("before", "half", "after")
ROUNDS = 20


class Before:
    """A store with one version, which every test looks after."""

    def __init__(self, scratch: Path) -> None:
        self.store = MemoryStore()
        self.repository = Repository(self.store)
        self.catalog = Catalog(self.repository)
        self.scratch = scratch
        self.base = commit(self.repository, scratch, b"base")
        self.catalog.publish(NAME, self.base.id, [LATEST, STABLE])

    def build(self) -> SnapshotId:
        """What is interrupted: a commit, its publication, and a tag that moves."""
        captured = capture(self.scratch, b"one", b"two", ram=b"ram")
        try:
            snapshot = self.repository.commit(captured, draft(self.base))
        finally:
            captured.discard()
        version = self.catalog.publish(NAME, snapshot.id, [LATEST])
        self.catalog.tag(NAME, STABLE, version)
        return snapshot.id

    def remove(self) -> None:
        """The other writer: a version is taken back."""
        self.catalog.remove(NAME, 1)

    def intact(self) -> None:
        """Nothing is wrong, and what was there before is."""
        report = check(self.repository, deep=True)
        assert not report.problems
        assert self.repository.snapshot(self.base.id) == self.base


def operations(scratch: Path, act: Callable[[Before], object]) -> int:
    """How many store operations it takes without faults."""
    before = Before(scratch)
    start = before.store.operations
    act(before)
    return before.store.operations - start


@pytest.mark.parametrize("when", WHENS)
def test_killed_at_every_operation_of_a_build(tmp_path: Path, when: str) -> None:
    count = operations(tmp_path, Before.build)
    assert count > 15
    for at in range(1, count + 1):
        before = Before(tmp_path)
        before.store.arm(Fault(at, when))  # type: ignore[arg-type]
        with pytest.raises(Crash):
            before.build()
        before.store.restart()
        before.intact()
        for version in before.catalog.versions(NAME):
            before.repository.snapshot(before.catalog.resolve(f"{NAME}:{version}").snapshot_id)
        id = before.build()
        before.intact()
        assert before.catalog.versions(NAME) == (1, 2)
        assert before.catalog.resolve(f"{NAME}:1").snapshot_id == before.base.id
        for reference in (f"{NAME}:2", f"{NAME}:latest", f"{NAME}:stable", f"{NAME}"):
            assert before.catalog.resolve(reference).snapshot_id == id


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("error", [NoSpace("no space: storing"), StoreUnavailable("timed out")])
def test_an_error_at_every_operation_of_a_build(tmp_path: Path, when: str, error: NoSpace) -> None:
    for at in range(1, operations(tmp_path, Before.build) + 1):
        before = Before(tmp_path)
        before.store.arm(Fault(at, when, error))  # type: ignore[arg-type]
        with pytest.raises(type(error)):
            before.build()
        before.intact()
        before.build()
        before.intact()
        assert before.catalog.versions(NAME) == (1, 2)


@pytest.mark.parametrize("when", WHENS)
def test_killed_at_every_operation_of_a_removal(tmp_path: Path, when: str) -> None:
    for at in range(1, operations(tmp_path, Before.remove) + 1):
        before = Before(tmp_path)
        before.store.arm(Fault(at, when))  # type: ignore[arg-type]
        with pytest.raises(Crash):
            before.remove()
        before.store.restart()
        before.intact()
        if before.catalog.versions(NAME):
            assert before.catalog.resolve(f"{NAME}:latest").snapshot_id == before.base.id
            before.remove()
        with pytest.raises(NotFound):
            before.catalog.resolve(f"{NAME}")
        before.intact()
        assert before.catalog.publish(NAME, before.base.id) == 2  # the number is never given out again


def long_history(scratch: Path) -> Before:
    """One more move of the tag makes a page of its oldest moves."""
    before = Before(scratch)
    before.catalog.publish(NAME, commit(before.repository, scratch, b"second").id)
    moves = [
        Move(
            number=number,
            act="tag",
            at="2025-01-31T12:00:00Z",
            from_version=1 + number % 2,
            to_version=2 - number % 2,
        )
        for number in range(1, 2 * PAGE_MOVES)
    ]
    before.store.damage(tag_key(NAME, STABLE), canonical_json(TagRecord(version=1, moves=tuple(moves))))
    return before


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("act", ["promote", "rollback"])
def test_killed_at_every_operation_of_a_move(tmp_path: Path, when: str, act: str) -> None:
    def move(before: Before) -> None:
        if act == "promote":
            before.catalog.promote(NAME, STABLE, 2)
        elif before.catalog.resolve(f"{NAME}:stable").version == 1:
            before.catalog.rollback(NAME, STABLE, 2)

    before = long_history(tmp_path)
    start = before.store.operations
    move(before)
    count = before.store.operations - start
    for at in range(1, count + 1):
        before = long_history(tmp_path)
        told = list(before.catalog.tag_log.moves(NAME, STABLE))
        before.store.arm(Fault(at, when))  # type: ignore[arg-type]
        with pytest.raises(Crash):
            move(before)
        before.store.restart()
        before.intact()
        now = list(before.catalog.tag_log.moves(NAME, STABLE))
        assert now[-len(told) :] == told and len(now) - len(told) in (0, 1)
        assert before.catalog.resolve(f"{NAME}:stable").version == (2 if len(now) > len(told) else 1)
        move(before)
        before.intact()
        last, *rest = before.catalog.tag_log.moves(NAME, STABLE)
        assert (rest, last.act, last.to_version) == (told, act, 2)
        assert before.catalog.resolve(f"{NAME}:stable").version == 2


@pytest.mark.timeout(240)
def test_processes_killed_at_random_moments(tmp_path: Path) -> None:
    root, scratch = tmp_path / "store", tmp_path / "scratch"
    seed = int(os.environ.get("AENV_TEST_SEED") or time.time_ns() % 10**9)
    print(f"AENV_TEST_SEED={seed}")
    source = random.Random(seed)
    repository = Repository(PosixStore(root))
    catalog = Catalog(repository)
    published: dict[int, SnapshotId] = {}
    for turn in range(ROUNDS):
        for line in killed_committer(root, scratch, seed + turn, source.uniform(0.0, 0.12)):
            note(line, repository, published)
        shutil.rmtree(scratch, ignore_errors=True)
        report = check(repository, deep=True)
        assert not report.problems, f"seed {seed}, turn {turn}"
        for version, id in published.items():
            assert catalog.resolve(f"loop:{version}").snapshot_id == id, f"seed {seed}, turn {turn}"
        for tag in (LATEST, STABLE):
            one_chain(catalog, tag)
    assert check(repository).counts["snapshots"] > 0
    last = commit(repository, scratch, b"afterwards")
    assert catalog.publish(Name("loop"), last.id) > max(published, default=0)


def one_chain(catalog: Catalog, tag: Tag) -> None:
    """Every move of the tag is there and begins where the one before ended; the last one led to where it is."""
    moves = list(catalog.tag_log.moves(Name("loop"), tag))[::-1]
    assert [move.number for move in moves] == list(range(1, len(moves) + 1))
    assert [move.from_version for move in moves] == [None, *(move.to_version for move in moves)][:-1]
    assert catalog.tag_log.read(Name("loop"), tag) == (moves[-1].to_version if moves else None)


def killed_committer(root: Path, scratch: Path, seed: int, seconds: float) -> list[str]:
    """What a committer had said to be durable when it was killed."""
    command = [sys.executable, "-m", "tests.crash.committer", str(root), str(scratch), str(seed)]
    checkout = Path(__file__).resolve().parent.parent.parent
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=checkout) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            time.sleep(seconds)
        finally:
            process.kill()
        return process.stdout.read().splitlines()


def note(line: str, repository: Repository, published: dict[int, SnapshotId]) -> None:
    """Every whole line is a promise."""
    match line.split():
        case ["committed", id] if len(id) == 64:
            repository.snapshot(SnapshotId(id))
        case ["published", version, id] if len(id) == 64:
            published[int(version)] = SnapshotId(id)
            # A removal that follows may have been done without being said.
            if int(version) % 7 == 3:
                del published[int(version)]


# A full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with small_file_system(tmp_path / "small", 2 << 20) as place:
        yield place


def base_on(place: Path, scratch: Path) -> tuple[Repository, Snapshot]:
    repository = Repository(PosixStore(place / "store"))
    base = commit(repository, scratch, b"base")
    Catalog(repository).publish(NAME, base.id, [LATEST])
    return repository, base


def test_a_capture_larger_than_the_disk(small_disk: Path, tmp_path: Path) -> None:
    repository, base = base_on(small_disk, tmp_path)
    captured = capture(tmp_path, b"small", random.Random(1).randbytes(4 << 20))
    with pytest.raises(NoSpace) as caught:
        repository.commit(captured, draft(base))
    assert str(small_disk) in caught.value.message and "blobs/sha256/" in caught.value.message and caught.value.fix
    report = check(repository, deep=True)
    assert report.ok and report.counts["temporaries"] == 0 and report.counts["snapshots"] == 1
    assert all(path.exists() for path in captured.disk)
    assert repository.snapshot(commit(repository, tmp_path, b"fits", parent=base).id)


def test_a_disk_without_one_free_byte(small_disk: Path, tmp_path: Path) -> None:
    repository, base = base_on(small_disk, tmp_path)
    catalog = Catalog(repository)
    ready = commit(repository, tmp_path, b"ready", parent=base)
    local = capture(small_disk, b"local")  # its blob is linked, so the manifest is what finds no room
    filler = fill(small_disk)
    with pytest.raises(NoSpace, match="snapshots/"):
        repository.commit(local, draft(base))
    with pytest.raises(NoSpace):
        repository.commit(capture(tmp_path, b"new"), draft(base))
    with pytest.raises(NoSpace, match="refs/"):
        catalog.publish(NAME, ready.id, [LATEST])
    report = check(repository, deep=True)
    assert report.ok and report.counts["temporaries"] == 0
    assert catalog.versions(NAME) == (1,) and catalog.resolve("task:latest").snapshot_id == base.id
    filler.unlink()
    assert catalog.publish(NAME, repository.commit(local, draft(base)).id, [LATEST]) == 2
    assert check(repository, deep=True).ok


def test_a_cache_without_room(small_disk: Path, tmp_path: Path) -> None:
    repository = Repository(PosixStore(tmp_path / "store"))
    blob = commit(repository, tmp_path, random.Random(2).randbytes(4 << 20)).disk[0]
    cache = BlobCache(small_disk / "cache", repository)
    with pytest.raises(NoSpace, match=blob.digest):
        cache.path(blob)
    with pytest.raises(NoSpace):
        BlobCache(tmp_path / "cache", repository).link(blob, small_disk / "layer")
    assert not (small_disk / "layer").exists()
    assert [path.name for path in (small_disk / "cache").rglob("*") if path.is_file()] in ([], ["use.lock"])
