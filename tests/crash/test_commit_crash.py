"""A commit that is killed, or meets a full disk, at any moment: the repository is whole, and a repeat works."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aenv_run.cache import BlobCache
from aenv_run.catalog import Catalog
from aenv_run.catalog.export import export
from aenv_run.check import check
from aenv_run.digest import digest_file
from aenv_run.errors import NoSpace, NotFound
from aenv_run.repository import Repository
from aenv_run.snapshot import Snapshot
from aenv_run.store.memory import Crash, Fault, MemoryStore
from aenv_run.store.posix import PosixStore
from aenv_run.types import Name, SnapshotId, Tag
from tests.bytes_half import capture, commit, draft
from tests.crash.calls import in_process
from tests.crash.committer import work
from tests.small_file_system import fill, small_file_system

NAME, LATEST, STABLE = Name("task"), Tag("latest"), Tag("stable")
WHENS = ("before", "half", "after")
#: `make soak` sets 200.
ROUNDS, GROUP = int(os.environ.get("AENV_CRASH_ROUNDS") or 20), 20


class Before:
    """A store with one version, which every test looks after."""

    def __init__(self, scratch: Path) -> None:
        self.store = MemoryStore()
        self.repository = Repository(self.store)
        self.catalog = Catalog(self.repository)
        self.scratch = scratch
        self.base = commit(self.repository, scratch, b"base")
        self.catalog.publish(NAME, self.base.id, [LATEST, STABLE])

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


@pytest.mark.timeout(900)
@pytest.mark.parametrize("group", range(max(1, ROUNDS // GROUP)))  # what grows is looked at whole in each round
def test_processes_killed_at_random_moments(tmp_path: Path, memory_place: Path, group: int) -> None:
    root, own = tmp_path / "store", memory_place
    seed = int(os.environ.get("AENV_TEST_SEED") or time.time_ns() % 10**9)
    print(f"AENV_TEST_SEED={seed}")
    source = random.Random(seed)
    repository = Repository(PosixStore(root))
    catalog = Catalog(repository)
    published: dict[int, SnapshotId] = {}
    layout = exported(tmp_path, source)
    for turn in range(GROUP):
        said = killed_committer(root, own, layout, seed + turn, source)
        for line in said:
            if "collecting" not in said or not line.startswith("committed"):  # gc takes what has no name
                note(line, repository, published)
        shutil.rmtree(own / "scratch", ignore_errors=True)
        report = check(repository, deep=True)
        assert not report.problems, f"seed {seed}, turn {turn}: {report.problems}"
        for version, id in published.items():
            assert catalog.resolve(f"loop:{version}").snapshot_id == id, f"seed {seed}, turn {turn}"
        for tag in (LATEST, STABLE):
            one_chain(catalog, tag)
        # What has a blob's name in the cache is that blob, also where a fetch or a trim was killed.
        assert all(digest_file(path).hex == path.name for path in (own / "cache" / "blobs").glob("*/*"))
    assert check(repository).counts["snapshots"] > 0
    last = commit(repository, tmp_path / "scratch", b"afterwards")
    assert catalog.publish(Name("loop"), last.id) > max(published, default=0)
    print(f"{GROUP} rounds, {len(published)} versions published, {check(repository).counts}")


def exported(scratch: Path, source: random.Random) -> Path:
    """A snapshot of another repository."""
    theirs = Catalog(Repository(MemoryStore()))
    base = commit(theirs.repository, scratch, source.randbytes(200_000))
    theirs.publish(Name("theirs"), base.id)
    export(theirs, "theirs", scratch / "layout")
    return scratch / "layout"


def one_chain(catalog: Catalog, tag: Tag) -> None:
    """Every move of the tag is there and begins where the one before ended; the last one led to where it is."""
    moves = list(catalog.tag_log.moves(Name("loop"), tag))[::-1]
    assert [move.number for move in moves] == list(range(1, len(moves) + 1))
    assert [move.from_version for move in moves] == [None, *(move.to_version for move in moves)][:-1]
    assert catalog.tag_log.read(Name("loop"), tag) == (moves[-1].to_version if moves else None)


def killed_committer(root: Path, own: Path, layout: Path, seed: int, chance: random.Random) -> list[str]:
    """What a committer had said to be durable when it was killed: somewhere after some of it."""
    for left in own.glob("import-*"):
        shutil.rmtree(left)
    reading, writing = os.pipe()
    with in_process(lambda: work(PosixStore(root), own, layout, seed, os.fdopen(writing, "w"))) as pid:
        os.close(writing)
        with os.fdopen(reading) as said:
            assert said.readline() == "ready\n"
            lines = [said.readline() for _ in range(chance.randrange(12))]
            time.sleep(chance.uniform(0.0, 0.03))
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            assert os.WIFSIGNALED(status), "it failed by itself, see standard error"
            return "".join([*lines, said.read()]).splitlines()


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
    with pytest.raises(NoSpace, match="no space"):
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
