"""Tags that are promoted and rolled back, and what is remembered of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from aenv_run.catalog import Catalog, Event, history, removed_key, tag_key, version_key
from aenv_run.catalog.records import PAGE_MOVES
from aenv_run.check import check
from aenv_run.cli.command import cli, run
from aenv_run.errors import Conflict, InvalidInput, NotFound
from aenv_run.repository import Repository
from aenv_run.snapshot import Snapshot
from aenv_run.store import StoreKey
from aenv_run.store.memory import MemoryStore
from aenv_run.store.posix import PosixStore
from aenv_run.types import Name, SnapshotId, Tag
from tests.bytes_half import commit

NAME, LATEST, STABLE = Name("swe-task"), Tag("latest"), Tag("stable")


@pytest.fixture(params=["posix", "memory"])
def catalog(request: pytest.FixtureRequest, tmp_path: Path) -> Catalog:
    store = PosixStore(tmp_path / "store") if request.param == "posix" else MemoryStore()
    return Catalog(Repository(store), by="ci@host")


@pytest.fixture
def make(catalog: Catalog, tmp_path: Path) -> Callable[[int], Snapshot]:
    return lambda number: commit(catalog.repository, tmp_path, b"%d" % number)


def publish(catalog: Catalog, make: Callable[[int], Snapshot], count: int) -> None:
    for number in range(count):
        catalog.publish(NAME, make(number).id)


def told(events: list[Event]) -> list[tuple[str, str | None, int | None, int | None]]:
    return [(event.act, event.tag, event.from_version, event.to_version) for event in events]


def at(catalog: Catalog, tag: Tag = STABLE) -> int | None:
    return catalog.resolve(f"{NAME}:{tag}").version


def test_promote_goes_forward_only(catalog: Catalog, make: Callable[[int], Snapshot]) -> None:
    publish(catalog, make, 3)
    assert catalog.promote(NAME, STABLE, 2)
    assert not catalog.promote(NAME, STABLE, 2), "it is there already"
    with pytest.raises(Conflict, match="at version 2, after 1") as caught:
        catalog.promote(NAME, STABLE, 1)
    assert "rollback swe-task stable --to 1" in caught.value.fix
    with pytest.raises(NotFound, match="versions 1, 2, 3"):
        catalog.promote(NAME, STABLE, 4)
    assert catalog.promote(NAME, STABLE, 3) and at(catalog) == 3
    events = history(catalog, f"{NAME}:stable")
    assert told(events) == [("promote", "stable", None, 2), ("promote", "stable", 2, 3)]
    assert {event.by for event in events} == {"ci@host"} and all(event.at.endswith("Z") for event in events)
    assert check(catalog.repository).ok


def test_a_tag_whose_version_was_removed_may_be_promoted_to_any(
    catalog: Catalog, make: Callable[[int], Snapshot]
) -> None:
    publish(catalog, make, 3)
    catalog.promote(NAME, STABLE, 3)
    catalog.remove(NAME, 3)
    assert catalog.promote(NAME, STABLE, 1) and at(catalog) == 1
    assert told(history(catalog, f"{NAME}:stable"))[1:] == [
        ("remove", "stable", 3, None),
        ("promote", "stable", None, 1),
    ]


def test_rollback_goes_back_step_by_step_and_past_what_was_removed(
    catalog: Catalog, make: Callable[[int], Snapshot]
) -> None:
    publish(catalog, make, 5)
    for version in (1, 2, 3, 5):
        catalog.promote(NAME, STABLE, version)
    catalog.remove(NAME, 2)
    assert catalog.rollback(NAME, STABLE).to_version == 3
    assert catalog.rollback(NAME, STABLE).to_version == 1, "2 is gone"
    with pytest.raises(Conflict, match="no other version"):
        catalog.rollback(NAME, STABLE)
    catalog.promote(NAME, STABLE, 4)
    assert catalog.rollback(NAME, STABLE).to_version == 1, "3 and 5 were taken back"
    move = catalog.rollback(NAME, STABLE, 3)
    assert (move.from_version, move.to_version, move.act) == (1, 3, "rollback")
    with pytest.raises(Conflict, match="at version 3 already"):
        catalog.rollback(NAME, STABLE, 3)
    with pytest.raises(NotFound, match="swe-task:2 does not exist"):
        catalog.rollback(NAME, STABLE, 2)
    with pytest.raises(NotFound, match="stable -> 3"):
        catalog.rollback(NAME, Tag("none"))
    assert check(catalog.repository).ok


def test_the_whole_history_of_a_name(catalog: Catalog, make: Callable[[int], Snapshot]) -> None:
    one, two = make(1).id, make(2).id
    catalog.publish(NAME, one, [LATEST])
    catalog.publish(NAME, two, [LATEST])
    catalog.tag(NAME, STABLE, 2)
    catalog.untag(NAME, STABLE)
    with pytest.raises(NotFound):
        catalog.untag(NAME, STABLE)
    catalog.remove(NAME)
    events = history(catalog, NAME)
    versions = [event for event in events if event.tag is None]
    assert [(event.act, event.snapshot_id) for event in versions] == [
        ("publish", one), ("publish", two), ("remove", one), ("remove", two),
    ]  # fmt: skip
    assert told(history(catalog, f"{NAME}:stable")) == [("tag", "stable", None, 2), ("untag", "stable", 2, None)]
    assert told(history(catalog, f"{NAME}:latest")) == [
        ("publish", "latest", None, 1), ("publish", "latest", 1, 2), ("remove", "latest", 2, None),
    ]  # fmt: skip
    assert told(history(catalog, f"{NAME}:1")) == [
        ("publish", None, None, 1),
        ("publish", "latest", None, 1),
        ("publish", "latest", 1, 2),
        ("remove", None, 1, None),
    ]
    assert len(history(catalog, NAME, limit=2)) == 2 and history(catalog, NAME, limit=2) == events[-2:]
    assert catalog.tags(NAME) == () and check(catalog.repository).counts["tags"] == 0
    with pytest.raises(NotFound):
        history(catalog, "never")
    with pytest.raises(InvalidInput):
        history(catalog, one)
    with pytest.raises(InvalidInput):
        history(catalog, NAME, limit=0)


def test_nothing_of_a_long_history_is_lost(tmp_path: Path) -> None:
    catalog = Catalog(Repository(MemoryStore()), by="x")
    publish(catalog, lambda number: commit(catalog.repository, tmp_path, b"%d" % number), 2)
    count = 3 * PAGE_MOVES + 5
    for number in range(count):
        catalog.tag(NAME, STABLE, 1 + number % 2)
    events = history(catalog, f"{NAME}:stable", limit=1000)
    assert [event.to_version for event in events] == [1 + number % 2 for number in range(count)]
    assert history(catalog, f"{NAME}:stable", limit=7) == events[-7:]
    pages = [info.key for info in catalog.repository.store.list("refs/moves/")]
    assert pages == [f"refs/moves/swe-task/stable/{first}" for first in (1, PAGE_MOVES + 1)]
    assert check(catalog.repository).ok


def test_movers_at_once_make_one_chain(catalog: Catalog, make: Callable[[int], Snapshot]) -> None:
    publish(catalog, make, 4)
    barrier = threading.Barrier(4)

    def mover(version: int) -> None:
        barrier.wait()
        for _ in range(10):
            catalog.tag(NAME, STABLE, version)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(mover, range(1, 5)))
    moves = list(catalog.tag_log.moves(NAME, STABLE))[::-1]
    assert [move.number for move in moves] == list(range(1, len(moves) + 1))
    assert [move.from_version for move in moves[1:]] == [move.to_version for move in moves[:-1]]
    assert moves[0].from_version is None and moves[-1].to_version == at(catalog)
    assert check(catalog.repository).ok


def test_promoters_at_once_leave_the_highest(catalog: Catalog, make: Callable[[int], Snapshot]) -> None:
    publish(catalog, make, 6)

    def promote(version: int) -> bool:
        try:
            return catalog.promote(NAME, STABLE, version)
        except Conflict:
            return False

    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(promote, range(1, 7)))
    assert done[5] and at(catalog) == 6
    arrived = [event.to_version for event in history(catalog, f"{NAME}:stable")]
    assert arrived == sorted(arrived, key=lambda version: version or 0)


OLD = {
    "version": b'{"created_at":"2025-01-31T12:00:00Z","format":"aenv.version/1","snapshot_id":"%s"}',
    "tag": b'{"format":"aenv.tag/1","version":1}',
    "removed": b'{"format":"aenv.removed/1","removed_at":"2025-01-31T13:00:00Z"}',
}


def test_records_of_before_there_was_a_history(catalog: Catalog, make: Callable[[int], Snapshot]) -> None:
    store, ids = catalog.repository.store, [make(1).id, make(2).id]
    for version, id in enumerate(ids, start=1):
        store.put_new(version_key(NAME, version), OLD["version"].replace(b"%s", id.encode()))
    store.put_new(tag_key(NAME, STABLE), OLD["tag"])
    store.put_new(version_key(Name("other"), 1), OLD["version"].replace(b"%s", ids[0].encode()))
    store.put_new(removed_key(Name("other"), 1), OLD["removed"])
    assert catalog.resolve(f"{NAME}:stable") == catalog.resolve(f"{NAME}:1")
    assert check(catalog.repository).ok
    assert told(history(catalog, NAME)) == [("publish", None, None, 1), ("publish", None, None, 2)]
    assert told(history(catalog, "other")) == [("remove", None, 1, None)]
    assert catalog.promote(NAME, STABLE, 2)
    assert catalog.rollback(NAME, STABLE).to_version == 1, "the old record says where it was"
    assert check(catalog.repository).ok


def test_a_damaged_tag_goes_on_after_its_pages(tmp_path: Path) -> None:
    store = MemoryStore()
    catalog = Catalog(Repository(store), by="x")
    for number in range(2):
        catalog.publish(NAME, commit(catalog.repository, tmp_path, b"%d" % number).id)
    for number in range(2 * PAGE_MOVES + 3):
        catalog.tag(NAME, STABLE, 1 + number % 2)
    store.damage(tag_key(NAME, STABLE), b"junk")
    assert [event.problem is not None for event in history(catalog, f"{NAME}:stable")] == [True]
    catalog.tag(NAME, STABLE, 2)
    moves = list(catalog.tag_log.moves(NAME, STABLE))
    assert [move.number for move in moves] == list(range(PAGE_MOVES + 1, 0, -1)) and at(catalog) == 2
    assert check(catalog.repository).ok


@pytest.mark.parametrize(
    "data",
    [
        b'{"format":"aenv.moves/1","moves":[]}',
        b'{"format":"aenv.moves/1","moves":[{"number":2,"act":"tag","at":"","by":"","from_version":null,"to_version":1}]}',
        b"junk",
    ],
)
def test_check_names_a_page_that_is_none(tmp_path: Path, data: bytes) -> None:
    repository = Repository(PosixStore(tmp_path / "store"))
    key = StoreKey("refs/moves/swe-task/stable/1")
    repository.store.put_new(key, data)
    (problem,) = check(repository).problems
    assert (problem.kind, problem.key) == ("unreadable_ref", key)


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("AENV_HOME", str(tmp_path))
    monkeypatch.setenv("AENV_ACTOR", "release\x1b[31m bot")
    catalog = Catalog(Repository(PosixStore(tmp_path / "repository")))
    ids = [commit(catalog.repository, tmp_path, b"%d" % number).id for number in range(2)]
    assert [catalog.publish(NAME, id, [LATEST]) for id in ids] == [1, 2]

    def said(*argv: str, code: int = 0) -> str:
        assert run(["catalog", *argv]) == code
        return capsys.readouterr().out

    assert said("promote", "swe-task:1", "--to", "stable") == "swe-task:stable -> swe-task:1\n"
    assert json.loads(said("promote", "swe-task:latest", "--to", "stable", "--json"))["version"] == 2
    said("promote", "swe-task:1", "--to", "stable", code=65)
    said("promote", SnapshotId(ids[0]), "--to", "stable", code=64)
    assert "was at 2" in said("rollback", "swe-task", "stable")
    assert json.loads(said("rollback", "swe-task", "stable", "--to", "2", "--json"))["act"] == "rollback"
    lines = said("history", "swe-task:stable").splitlines()
    assert len(lines) == 5 and "release?[31m bot" in lines[1] and "nowhere -> 1" in lines[1]
    assert [event["act"] for event in json.loads(said("history", "swe-task", "--json"))][-1] == "rollback"
    assert json.loads(said("tag", "swe-task:1", "old", "--json")) == {
        "name": "swe-task",
        "tag": "old",
        "version": 1,
    }
    assert json.loads(said("rm", "swe-task:1", "--json")) == {"removed": ["swe-task:1"]}
    assert check(catalog.repository).ok


def test_the_shell_completes_names_versions_and_tags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENV_HOME", str(tmp_path))
    catalog = Catalog(Repository(PosixStore(tmp_path / "repository")))
    catalog.publish(NAME, commit(catalog.repository, tmp_path, b"1").id, [LATEST, STABLE])
    catalog.publish(Name("other"), commit(catalog.repository, tmp_path, b"2").id)

    def completed(*words: str) -> list[str]:
        *before, last = words
        shell = ShellComplete(cli, {}, "aenv", "_AENV_COMPLETE")
        return [item.value for item in shell.get_completions(["catalog", *before], last)]

    assert completed("promote", "swe") == ["swe-task:1", "swe-task:latest", "swe-task:stable"]
    assert completed("rollback", "") == ["other", "swe-task"]
    assert completed("rollback", "swe-task", "s") == ["stable"]
    assert completed("retain", "o") == ["other"] and completed("diff", "other:1", "swe-task:s") == [
        "swe-task:stable"
    ]
    assert set(completed("")) >= {"promote", "rollback", "history", "label", "search", "diff", "export", "import"}
