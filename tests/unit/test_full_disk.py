"""On a disk without one free byte, or without one free file, what frees still works."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aenv_run.catalog import Catalog
from aenv_run.check import check
from aenv_run.cli.command import run
from aenv_run.errors import NoSpace, NotFound
from aenv_run.garbage.collect import Rules, collect
from aenv_run.garbage.holder import Holder
from aenv_run.garbage.repair import repair
from aenv_run.garbage.state import Gate, Timing
from aenv_run.repository import Repository, manifest_key
from aenv_run.snapshot import Snapshot
from aenv_run.store import StoreKey
from aenv_run.store.posix import PosixStore
from aenv_run.store.reserve import PIECES, RESERVE, freeing
from aenv_run.types import Name
from tests.bytes_half import capture, commit, draft
from tests.small_file_system import fill, small_file_system

NAME = Name("env")
NOW = Timing(ttl_s=0.05, settle_s=0, poll_s=0.001)
BIG = 256 << 10


def take_all_files(place: Path) -> None:
    number = 0
    try:
        while True:
            (place / "files").mkdir(exist_ok=True)
            (place / "files" / str(number)).touch()
            number += 1
    except OSError:
        return


@pytest.fixture(params=["bytes", "files"])
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A small disk, and what leaves nothing of it free."""
    files = 200 if request.param == "files" else None
    with small_file_system(tmp_path / "small", 4 << 20, files=files) as place:
        yield place, (lambda: take_all_files(place)) if files else (lambda: fill(place) and None)


class Disk:
    """Two versions of a name and a snapshot without one, each of its own bytes."""

    def __init__(self, place: Path, scratch: Path) -> None:
        self.root = place / "repository"
        store = PosixStore(self.root)
        self.repository = Repository(store, Gate(store, NOW))
        self.catalog = Catalog(self.repository, by="x")
        self.scratch = scratch
        self.old, self.new, self.loose = (commit(self.repository, scratch, os.urandom(BIG)) for _ in range(3))
        for snapshot in (self.old, self.new):
            self.catalog.publish(NAME, snapshot.id)

    def collect(self) -> int:
        return collect(self.repository, Rules(grace_s=0), dict).freed_bytes

    def require_full(self) -> None:
        with pytest.raises(NoSpace):
            self.repository.store.put_new(StoreKey("refs/names/other/1"), b"x")

    def require_whole(self, *there: Snapshot) -> None:
        report = check(self.repository, deep=True)
        assert report.ok and not report.warnings, report
        for snapshot in there:
            self.repository.require_whole(snapshot)
        assert report.counts["temporaries"] == 0
        shutil.rmtree(self.root.parent / "files", ignore_errors=True)
        (self.root.parent / "filler").unlink(missing_ok=True)
        self.collect()  # whatever it gave up it makes again
        assert len(list((self.root / RESERVE).iterdir())) == PIECES


Full = tuple[Path, Callable[[], None]]


def test_a_collection_frees(full: Full, tmp_path: Path) -> None:
    place, use_up = full
    disk = Disk(place, tmp_path)
    use_up()
    disk.require_full()
    assert disk.collect() == BIG
    disk.require_whole(disk.old, disk.new)
    with pytest.raises(NotFound):
        disk.repository.snapshot(disk.loose.id)
    again = commit(disk.repository, tmp_path, b"there is room again")
    assert disk.catalog.publish(NAME, again.id) == 3


def test_a_version_is_removed_and_freed(full: Full, tmp_path: Path) -> None:
    place, use_up = full
    disk = Disk(place, tmp_path)
    disk.collect()
    use_up()
    disk.require_full()
    assert disk.catalog.remove(NAME, 1) == (1,)
    assert disk.catalog.versions(NAME) == (2,)
    assert disk.collect() == BIG
    disk.require_whole(disk.new)


def test_an_ancestor_is_remembered_and_its_own_bytes_go(full: Full, tmp_path: Path) -> None:
    place, use_up = full
    disk = Disk(place, tmp_path)
    parent = disk.repository.commit(capture(tmp_path, b"parent", ram=os.urandom(BIG)), draft())
    child = commit(disk.repository, tmp_path, b"child", parent=parent)
    disk.catalog.publish(Name("child"), child.id)
    use_up()
    disk.require_full()
    assert disk.collect() >= 2 * BIG
    disk.require_whole(disk.old, disk.new, child)
    assert [one.id for one in disk.catalog.lineage(child.id)] == [child.id, parent.id]


def test_what_is_damaged_is_put_away(full: Full, tmp_path: Path) -> None:
    place, use_up = full
    disk = Disk(place, tmp_path)
    use_up()
    disk.require_full()
    path = disk.root / manifest_key(disk.old.id)
    path.chmod(0o644)
    with path.open("r+b") as file:  # in its place: there is no room
        file.write(b"#")
    assert not check(disk.repository).ok
    done = repair(disk.repository)
    assert done.report.ok and done.lost == ("env:1",)
    disk.collect()
    disk.require_whole(disk.new)


def test_less_is_held_and_a_holder_is_dropped(full: Full, tmp_path: Path) -> None:
    place, use_up = full
    disk = Disk(place, tmp_path)
    node = Holder.of_node(disk.repository, "/h", "ab" * 16)
    node.hold({disk.loose.id: ["s1"], disk.old.id: ["s2"]})
    use_up()
    disk.require_full()
    node.keep({disk.old.id: ["s2"]})
    with pytest.raises(NoSpace):
        node.keep({disk.old.id: ["s2"], disk.new.id: ["s3"]})
    assert disk.collect() == BIG
    use_up()
    node.drop()
    disk.require_whole(disk.old, disk.new)


def test_nobody_else_uses_the_room(full: Full, tmp_path: Path) -> None:
    place, use_up = full
    disk = Disk(place, tmp_path)
    use_up()
    with pytest.raises(NoSpace):
        commit(disk.repository, tmp_path, b"more")
    with pytest.raises(NoSpace):
        disk.catalog.publish(NAME, disk.loose.id)
    assert len(list((disk.root / RESERVE).iterdir())) == PIECES
    key = StoreKey("refs/names/other/1")
    with freeing(disk.repository.store):
        disk.repository.store.put_new(key, b"x" * 100)
        assert len(list((disk.root / RESERVE).iterdir())) < PIECES
    disk.repository.store.delete(key)
    assert check(disk.repository, deep=True).ok


def test_the_commands(full: Full, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, use_up = full
    disk = Disk(place, tmp_path)
    monkeypatch.setenv("AENV_HOME", str(place))
    use_up()
    disk.require_full()
    assert run(["catalog", "rm", "env:1"]) == 0
    assert run(["catalog", "retain", "env", "--keep", "1"]) == 0
    assert run(["check", "--repair"]) == 0
    assert run(["gc", "--grace", "0s"]) == 0
    disk.require_whole(disk.new)


def test_a_repository_from_before_gets_its_room_at_the_first_write(tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    store = PosixStore(tmp_path / "repository")
    assert store.stat(StoreKey("refs/x")) is None and not (store.root / RESERVE).exists()
    store.put_new(StoreKey("refs/names/x/1"), b"x")
    pieces = list((store.root / RESERVE).iterdir())
    assert len(pieces) == PIECES and all(path.stat().st_blocks for path in pieces)
    assert not list(store.strays()) and [info.key for info in store.list("")] == ["refs/names/x/1"]


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "repository" / RESERVE).symlink_to(tmp_path / "elsewhere")
    store = PosixStore(tmp_path / "repository")
    with freeing(store):
        store.put_new(StoreKey("refs/names/x/1"), b"x")
    assert not list((tmp_path / "elsewhere").iterdir())
    assert json.dumps([stray.path for stray in store.strays()]) == '[".reserve"]'
