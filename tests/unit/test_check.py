"""check names every kind of damage, and nothing that is none."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from aenv_run.catalog import Catalog, version_key
from aenv_run.check import Report, check
from aenv_run.repository import Repository, manifest_key, record_key
from aenv_run.snapshot import Snapshot
from aenv_run.store import StoreKey
from aenv_run.store.posix import PosixStore
from aenv_run.types import Model, Name, SnapshotId, StageKey, Tag
from tests.bytes_half import capture, commit, draft


class Made:
    """A repository with a base, a child with memory, a version, a tag."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "store"
        self.repository = Repository(PosixStore(self.root))
        self.base = commit(self.repository, directory, b"base")
        self.child = self.repository.commit(capture(directory, b"delta", ram=b"ram"), draft(self.base))
        Catalog(self.repository).publish(Name("a"), self.child.id, [Tag("latest")])

    def blob(self, snapshot: Snapshot, index: int = -1) -> Path:
        return self.root / self.repository.blob_key(snapshot.disk[index].digest)

    def manifest(self, snapshot: Snapshot) -> Path:
        return self.root / manifest_key(snapshot.id)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def kinds(report: Report) -> list[str]:
    return [problem.kind for problem in report.problems]


def test_a_whole_repository(made: Made) -> None:
    report = check(made.repository, deep=True)
    assert report.ok
    assert report.counts["snapshots"] == 2 and report.counts["blobs"] == 4
    assert report.counts["versions"] == 1 and report.counts["tags"] == 1
    assert report.counts["blobs_digested"] == 4
    assert report.counts["orphan_blobs"] == 0 and report.counts["unreferenced_snapshots"] == 0


def test_an_empty_repository(tmp_path: Path) -> None:
    assert check(Repository(PosixStore(tmp_path / "none"))).ok
    assert not (tmp_path / "none").exists()


def test_garbage_is_information(made: Made, tmp_path: Path) -> None:
    lonely = commit(made.repository, tmp_path, b"lonely")
    made.manifest(lonely).unlink()
    commit(made.repository, tmp_path, b"unnamed")
    (made.root / ".tmp" / "1-aa").write_bytes(b"half")
    report = check(made.repository, deep=True)
    assert report.ok
    assert report.counts["orphan_blobs"] == 1 and report.counts["orphan_blob_bytes"] == len(b"lonely")
    assert report.counts["temporaries"] == 1
    assert report.counts["unreferenced_snapshots"] == 1


DAMAGE: dict[str, tuple[Callable[[Made], object], str, str]] = {
    "blob gone": (lambda made: made.blob(made.base).unlink(), "missing_blob", "blobs/"),
    "blob cut": (lambda made: os.truncate(made.blob(made.child), 2), "wrong_size", "blobs/"),
    "blob grown": (lambda made: os.truncate(made.blob(made.child), 200), "wrong_size", "blobs/"),
    "blob is a link": (lambda made: link_instead(made.blob(made.child)), "missing_blob", "blobs/"),
    "manifest cut": (lambda made: os.truncate(made.manifest(made.child), 20), "unreadable_manifest", "snapshots/"),
    "manifest gone": (lambda made: made.manifest(made.child).unlink(), "missing_manifest", "refs/names/a/1"),
    "parent gone": (lambda made: made.manifest(made.base).unlink(), "missing_manifest", "snapshots/"),
    "ref empty": (lambda made: os.truncate(made.root / version_key(Name("a"), 1), 0), "unreadable_ref", "refs/"),
    "tag empty": (lambda made: os.truncate(made.root / "refs/tags/a/latest", 0), "unreadable_ref", "refs/tags/"),
    "file in blobs": (lambda made: (made.root / "blobs/note.txt").write_bytes(b""), "unknown_file", "blobs/note"),
    "file in refs": (
        lambda made: (made.root / "refs/names/a/0").write_bytes(b""),
        "unknown_file",
        "refs/names/a/0",
    ),
    "file on top": (lambda made: (made.root / "note").write_bytes(b""), "unknown_file", "note"),
    "hidden file": (lambda made: (made.root / ".note").write_bytes(b""), "unknown_file", ".note"),
    "link": (lambda made: (made.root / "snapshots/x").symlink_to("/etc"), "unknown_file", "snapshots/x"),
    "fifo": (lambda made: os.mkfifo(made.root / "snapshots/x"), "unknown_file", "snapshots/x"),
}


def link_instead(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(made: Made, name: str) -> None:
    damage, kind, key = DAMAGE[name]
    damage(made)
    report = check(made.repository)
    assert kind in kinds(report)
    assert any(problem.kind == kind and problem.key.startswith(key) for problem in report.problems)
    assert set(kinds(report)) <= {kind, "unknown_file"}


def test_altered_bytes_are_found_only_deep(made: Made) -> None:
    made.blob(made.child).chmod(0o644)
    made.blob(made.child).write_bytes(b"DELTA")
    assert check(made.repository).ok
    (problem,) = check(made.repository, deep=True).problems
    assert problem.kind == "damaged_blob"
    assert made.child.id.short in problem.detail and made.child.disk[-1].digest in problem.detail


def test_problems_say_who_needs_the_blob(made: Made) -> None:
    made.blob(made.base).unlink()
    (problem,) = check(made.repository).problems
    assert made.base.id.short in problem.detail and made.child.id.short in problem.detail


def test_stage_records_are_followed(made: Made) -> None:
    class Built(Model):
        snapshot_id: SnapshotId

    made.repository.record("stages", StageKey("1" * 64), Built(snapshot_id=made.base.id))
    assert check(made.repository).counts["records"] == 1
    made.repository.record("outputs", StageKey("2" * 64), Built(snapshot_id=SnapshotId("3" * 64)))
    (problem,) = check(made.repository).problems
    assert (problem.kind, problem.key) == ("missing_manifest", f"refs/outputs/{'2' * 64}")


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"\xff", b"[" * 50_000, b'{"snapshot_id":"../x"}', b'{"snapshot_id":1}']
)
def test_hostile_records_are_problems_not_crashes(made: Made, data: bytes) -> None:
    made.repository.store.put_new(record_key("stages", StageKey("1" * 64)), data)
    assert kinds(check(made.repository)) == ["unreadable_ref"]


def test_one_manifest_of_ten_thousand_layers_is_a_problem_not_a_crash(made: Made) -> None:
    data = b'{"format":"aenv.snapshot/1","disk":[' + b",".join([b"1"] * 10_000) + b"]}"
    id = SnapshotId(hashlib.sha256(data).hexdigest())
    made.repository.store.put_new(StoreKey(f"snapshots/{id[:2]}/{id}"), data)
    assert kinds(check(made.repository)) == ["unreadable_manifest"]
