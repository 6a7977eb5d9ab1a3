"""check --repair: what is damaged is put away, nothing is deleted, what is left is whole."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest

from aenv_build.cache.ledger import Ledger
from aenv_run.catalog import Catalog, version_key
from aenv_run.check import check
from aenv_run.cli.command import run
from aenv_run.errors import AenvError, NotFound, StoreUnavailable
from aenv_run.garbage.collect import Rules, collect
from aenv_run.garbage.leases import holder_key
from aenv_run.garbage.repair import repair
from aenv_run.garbage.state import Gate, Timing
from aenv_run.repository import Repository, manifest_key
from aenv_run.store import StoreKey
from aenv_run.store.memory import Crash, Fault, MemoryStore
from aenv_run.store.posix import PosixStore
from aenv_run.types import Name, StageKey, Tag
from tests.bytes_half import capture, commit, draft
from tests.unit.test_check import DAMAGE, Made

WHENS = ["before", "half", "after"]
NOW = Timing(ttl_s=0.05, settle_s=0, poll_s=0.001)


def content(root: Path) -> set[bytes]:
    return {path.read_bytes() for path in root.rglob("*") if path.is_file() and not path.is_symlink()}


@pytest.mark.parametrize("name", DAMAGE)
def test_every_damage_is_put_away(tmp_path: Path, name: str) -> None:
    made = Made(tmp_path)
    other = commit(made.repository, tmp_path, b"other")
    Catalog(made.repository).publish(Name("b"), other.id)
    DAMAGE[name][0](made)
    before = content(made.root)
    repository = Repository(made.repository.store, Gate(made.repository.store, NOW))
    done = repair(repository)
    assert done.report.ok, done.report.problems
    assert done.moved and check(repository, deep=True).ok
    assert before <= content(made.root)
    assert Catalog(repository).resolve("b:1").snapshot_id == other.id
    repository.require_whole(other)
    assert not repair(repository).moved


def test_a_whole_repository_is_not_touched(tmp_path: Path) -> None:
    made = Made(tmp_path)
    before = {info.key: info for info in made.repository.store.list("")}
    assert repair(made.repository, deep=True).moved == ()
    assert {info.key: info for info in made.repository.store.list("")} == before


def test_altered_bytes_go_with_all_that_needs_them(tmp_path: Path) -> None:
    made = Made(tmp_path)
    Ledger(made.repository).keep("stages", StageKey("1" * 64), made.child)
    made.blob(made.child).chmod(0o644)
    made.blob(made.child).write_bytes(b"DELTA")
    repository = Repository(made.repository.store, Gate(made.repository.store, NOW))
    done = repair(repository, deep=True)
    assert done.report.ok and done.lost == ("a:1",)
    moved = {one.key.split("/")[0] + "/" + one.key.split("/")[1] for one in done.moved}
    assert moved == {"blobs/sha256", f"snapshots/{made.child.id[:2]}", "refs/names", "refs/stages"}
    assert "a:1" in done.next_steps[0] and len(done.next_steps) == 3
    assert repository.snapshot(made.base.id) == made.base
    again = repository.commit(capture(tmp_path, b"delta", ram=b"ram"), draft(made.base))
    assert again.id == made.child.id
    assert Catalog(repository).publish(Name("a"), again.id, [Tag("latest")]) == 2  # the number is not given again
    assert check(repository, deep=True).ok
    collected = collect(repository, Rules(quarantine_older_s=0), dict)
    assert collected.quarantined == 4
    assert check(repository, deep=True).ok


def test_children_of_a_lost_parent_stay(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.manifest(made.base).unlink()
    done = repair(Repository(made.repository.store, Gate(made.repository.store, NOW)))
    assert done.report.ok and done.lost == ()
    assert Catalog(made.repository).resolve("a:1").snapshot_id == made.child.id


def test_a_manifest_that_lies_about_a_blob_goes_and_the_blob_stays(tmp_path: Path) -> None:
    made = Made(tmp_path)
    lie = made.base.model_copy(
        update={"disk": (made.base.disk[0].model_copy(update={"size_bytes": 5}),), "labels": {"x": "lie"}}
    )
    from aenv_run.digest import canonical_json

    made.repository.store.put_new(manifest_key(lie.id), canonical_json(lie))
    assert not check(made.repository).ok
    done = repair(Repository(made.repository.store, Gate(made.repository.store, NOW)))
    assert done.report.ok
    assert [one.key for one in done.moved] == [manifest_key(lie.id)]
    made.repository.verify_blob(made.base.disk[0])


def test_a_removal_that_cannot_be_read_stays_a_removal(tmp_path: Path) -> None:
    made = Made(tmp_path)
    catalog = Catalog(made.repository, by="x")
    catalog.remove(Name("a"))
    (made.root / "refs/removed/a/1").chmod(0o644)
    (made.root / "refs/removed/a/1").write_bytes(b"{")
    assert repair(Repository(made.repository.store, Gate(made.repository.store, NOW))).report.ok
    with pytest.raises(NotFound):
        catalog.resolve("a:1")
    assert catalog.publish(Name("a"), made.base.id) == 2


def test_a_lease_that_cannot_be_read(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.repository.store.put_new(holder_key("ab" * 16), b"{")
    made.repository.store.put_new(StoreKey("leases/gc"), b"{")
    assert [problem.kind for problem in check(made.repository).problems] == ["unreadable_lease"] * 2
    assert repair(Repository(made.repository.store, Gate(made.repository.store, NOW))).report.ok


class Damaged:
    """In memory: a blob that is gone, a manifest and a ref that cannot be read, and what is none of it."""

    def __init__(self, place: Path) -> None:
        self.store = MemoryStore()
        repository = self.open()
        catalog = Catalog(repository, by="x")
        self.good = repository.commit(capture(place, b"good"), draft())
        catalog.publish(Name("good"), self.good.id)
        cut = repository.commit(capture(place, b"cut"), draft())
        gone = repository.commit(capture(place, b"gone"), draft())
        broken = repository.commit(capture(place, b"broken"), draft())
        for number, snapshot in enumerate((cut, gone, broken, self.good)):
            catalog.publish(Name(f"n{number}"), snapshot.id)
        self.store.damage(repository.blob_key(cut.disk[0].digest), b"c")
        self.store.delete(repository.blob_key(gone.disk[0].digest))
        self.store.damage(manifest_key(broken.id), b"{}")
        self.store.damage(version_key(Name("n3"), 1), b"{}")
        self.store.put_new(StoreKey("what/is/this"), b"?")

    def open(self) -> Repository:
        return Repository(self.store, Gate(self.store, Timing(ttl_s=0.001, settle_s=0, poll_s=0.001)))

    def clean(self) -> None:
        repository = self.open()
        assert check(repository, deep=True).ok
        repository.require_whole(self.good)
        assert Catalog(repository).names() == (Name("good"),)


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("error", [None, StoreUnavailable("timed out")], ids=["killed", "refused"])
def test_a_repair_that_is_stopped_anywhere_is_finished_by_the_next(
    tmp_path: Path, when: str, error: AenvError | None
) -> None:
    alone = Damaged(tmp_path)
    start = alone.store.operations
    assert repair(alone.open()).report.ok
    count = alone.store.operations - start
    alone.clean()
    step = 1 if "AENV_GC_SCHEDULES" in os.environ else 6  # the cases together reach each
    for at in range(1 + WHENS.index(when) * 2 + (error is None), count + 1, step):
        damaged = Damaged(tmp_path)
        damaged.store.arm(Fault(at, when, error))  # type: ignore[arg-type]
        with suppress(Crash, StoreUnavailable):
            repair(damaged.open())
        damaged.store.restart()
        assert repair(damaged.open()).report.ok
        damaged.clean()


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("AENV_HOME", str(tmp_path))
    repository = Repository(PosixStore(tmp_path / "repository"))
    snapshot = commit(repository, tmp_path, b"base")
    Catalog(repository).publish(Name("a"), snapshot.id)
    (tmp_path / "repository" / repository.blob_key(snapshot.disk[0].digest)).unlink()
    assert run(["check"]) == 74
    assert "--repair" in capsys.readouterr().err
    assert run(["check", "--repair", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["lost"] == ["a:1"] and said["report"]["problems"] == []
    assert run(["check"]) == 0
    assert run(["check", "--repair"]) == 0
    assert "whole" in capsys.readouterr().out
