"""Commit, verified reading, records."""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aenv_run.capture import Capture
from aenv_run.check import check
from aenv_run.digest import canonical_json
from aenv_run.errors import Conflict, CorruptData, InvalidInput, NoSpace, NotFound, Unsupported
from aenv_run.repository import MAX_RECORD_BYTES, Repository, manifest_key, record_key
from aenv_run.snapshot import MAX_DISK_LAYERS, MAX_MANIFEST_BYTES, Blob, Snapshot
from aenv_run.store import StoreKey
from aenv_run.store.memory import Fault, MemoryStore
from aenv_run.store.posix import PosixStore
from aenv_run.types import Digest, MachineSpec, Model, SnapshotId, StageKey
from tests.bytes_half import ZERO_DIGEST, capture, commit, draft

KEY = StageKey("ab" * 32)


class Built(Model):
    """As a builder's record of a stage."""

    snapshot_id: SnapshotId
    seconds: int = 0


@pytest.fixture(params=["posix", "memory"])
def repository(request: pytest.FixtureRequest, tmp_path: Path) -> Repository:
    return Repository(PosixStore(tmp_path / "store") if request.param == "posix" else MemoryStore())


@pytest.fixture
def posix(tmp_path: Path) -> Repository:
    return Repository(PosixStore(tmp_path / "store"))


@pytest.fixture
def memory() -> tuple[Repository, MemoryStore]:
    store = MemoryStore()
    return Repository(store), store


def test_commit_gives_a_snapshot_that_can_be_read(repository: Repository, tmp_path: Path) -> None:
    captured = capture(tmp_path, b"base", b"layer", ram=b"r" * 1000)
    snapshot = repository.commit(captured, draft(kind="test"))
    assert repository.snapshot(snapshot.id) == snapshot
    assert [blob.size_bytes for blob in snapshot.disk] == [4, 5]
    assert snapshot.disk[0].digest.hex == hashlib.sha256(b"base").hexdigest()
    assert snapshot.memory is not None and set(snapshot.memory.files) == {"ram", "device_state"}
    assert not captured.directory.exists()
    for blob in snapshot.blobs():
        repository.verify_blob(blob)
    assert check(repository, deep=True).ok


def test_a_child_keeps_its_parents_layers_and_stores_only_its_own(repository: Repository, tmp_path: Path) -> None:
    base = commit(repository, tmp_path, b"base")
    child = commit(repository, tmp_path, b"delta", parent=base)
    same = commit(repository, tmp_path, parent=base)
    assert child.parent == base.id and child.disk[:1] == base.disk and len(child.disk) == 2
    assert same.disk == base.disk and same.id != base.id
    assert len(list(repository.store.list("blobs/"))) == 2
    assert sorted(repository.ids()) == sorted([base.id, child.id, same.id])


def test_equal_content_is_one_snapshot(repository: Repository, tmp_path: Path) -> None:
    assert commit(repository, tmp_path, b"x", b"x").id == commit(repository, tmp_path, b"x", b"x").id
    assert len(list(repository.store.list("blobs/"))) == 1
    assert len(list(repository.ids())) == 1


def test_other_files_of_the_capture_stay(repository: Repository, tmp_path: Path) -> None:
    captured = capture(tmp_path, b"x")
    (captured.directory / "note").write_bytes(b"kept")
    repository.commit(captured, draft())
    assert [path.name for path in captured.directory.iterdir()] == ["note"]


def test_a_file_that_the_machine_still_links_is_the_object(posix: Repository, tmp_path: Path) -> None:
    captured = capture(tmp_path, b"layer")
    os.link(captured.disk[0], tmp_path / "overlay")
    snapshot = posix.commit(captured, draft())
    local = posix.store.local_path(posix.blob_key(snapshot.disk[0].digest))
    assert local is not None and local.samefile(tmp_path / "overlay")


def test_commit_refuses_what_it_cannot_make_whole(repository: Repository, tmp_path: Path) -> None:
    base = commit(repository, tmp_path, b"base")
    before = list(repository.store.list(""))
    missing = Blob(digest=ZERO_DIGEST, size_bytes=1)
    with pytest.raises(CorruptData, match=ZERO_DIGEST):
        repository.commit(capture(tmp_path, b"new"), draft(base, below=(*base.disk, missing)))
    wrong_size = Blob(digest=base.disk[0].digest, size_bytes=5)
    with pytest.raises(CorruptData, match="4 bytes instead of 5"):
        repository.commit(capture(tmp_path, b"new"), draft(base, below=(wrong_size,)))
    with pytest.raises(NotFound, match=r"0{64}"):
        repository.commit(capture(tmp_path, b"new"), draft().model_copy(update={"parent": SnapshotId("0" * 64)}))
    with pytest.raises(InvalidInput):
        repository.commit(capture(tmp_path), draft())  # no disk at all
    with pytest.raises(InvalidInput):
        repository.commit(capture(tmp_path, *[b"%d" % n for n in range(MAX_DISK_LAYERS + 1)]), draft())
    with pytest.raises(InvalidInput, match="larger"):
        repository.commit(capture(tmp_path, b"new"), draft(long="x" * MAX_MANIFEST_BYTES))
    with pytest.raises(InvalidInput, match=r"(?i)unicode"):
        repository.commit(capture(tmp_path, b"new"), draft(odd="\ud800"))
    with_memory = capture(tmp_path, b"new", ram=b"r")
    with pytest.raises(InvalidInput, match="facts"):
        repository.commit(Capture(with_memory.directory, with_memory.disk, with_memory.memory), draft())
    assert list(repository.store.list("")) == before


def test_memory_of_a_child_is_what_stays_below_and_its_own(repository: Repository, tmp_path: Path) -> None:
    base = repository.commit(capture(tmp_path, b"base", ram=b"r" * 1000), draft())
    assert base.memory is not None
    whole = capture(tmp_path, b"delta", ram=b"layer")
    captured = Capture(
        whole.directory,
        whole.disk,
        {"ram.1": whole.memory["ram"], "device_state": whole.memory["device_state"]},
        whole.facts,
        memory_below=("ram",),
    )
    below = draft(base, below=base.disk)
    with pytest.raises(InvalidInput, match="draft lacks: ram"):
        repository.commit(captured, below)
    lost = Blob(digest=ZERO_DIGEST, size_bytes=1000)
    with pytest.raises(CorruptData, match=ZERO_DIGEST):
        repository.commit(captured, below.model_copy(update={"memory_below": {"ram": lost}}))
    child = repository.commit(captured, below.model_copy(update={"memory_below": base.memory.files}))
    assert child.memory is not None
    assert set(child.memory.files) == {"ram", "ram.1", "device_state"}
    assert child.memory.files["ram"] == base.memory.files["ram"]
    assert child.memory.files["ram.1"].size_bytes == len(b"layer")
    # The same state under other words adds no bytes.
    blobs = len(list(repository.store.list("blobs/")))
    again = Capture(tmp_path / "none", facts=whole.facts, memory_below=tuple(child.memory.files))
    relabelled = draft(child, below=child.disk, other="label").model_copy(
        update={"memory_below": child.memory.files}
    )
    assert repository.commit(again, relabelled).memory == child.memory
    assert len(list(repository.store.list("blobs/"))) == blobs


def test_commit_does_not_follow_links_of_a_capture(repository: Repository, tmp_path: Path) -> None:
    captured = capture(tmp_path, b"x")
    captured.disk[0].unlink()
    captured.disk[0].symlink_to("/etc/hostname")
    with pytest.raises(InvalidInput, match="disk-0"):
        repository.commit(captured, draft())
    assert not list(repository.store.list(""))


def test_a_full_disk_leaves_the_capture_whole(memory: tuple[Repository, MemoryStore], tmp_path: Path) -> None:
    repository, store = memory
    captured = capture(tmp_path, b"a", b"b", ram=b"r")
    for at in range(1, 12):
        store.arm(Fault(at, "half", NoSpace("no space: storing something")))
        with pytest.raises(NoSpace):
            repository.commit(captured, draft())
        assert all(path.exists() for path in (*captured.disk, *captured.memory.values()))
        assert not list(repository.ids())
    store.restart()
    assert repository.snapshot(repository.commit(captured, draft()).id)


class Meddling(MemoryStore):
    """While a file is stored somebody writes into it."""

    def put_file(self, key: StoreKey, source: Path, *, consume: bool = False) -> bool:
        done = super().put_file(key, source, consume=consume)
        with source.open("r+b") as file:
            file.write(b"b")
        return done


def test_a_file_that_is_written_between_its_digest_and_its_end_is_not_committed(tmp_path: Path) -> None:
    repository = Repository(Meddling())
    captured = capture(tmp_path, b"aaa")
    os.utime(captured.disk[0], (1, 1))  # long settled
    with pytest.raises(InvalidInput, match="sealed"):
        repository.commit(captured, draft())
    assert not list(repository.ids())


def test_a_blob_cut_in_the_repository_is_not_taken_for_whole(posix: Repository, tmp_path: Path) -> None:
    snapshot = commit(posix, tmp_path, b"x" * 100)
    key = posix.blob_key(snapshot.disk[0].digest)
    path = posix.store.local_path(key)
    assert path is not None
    os.truncate(path, 50)
    with pytest.raises(CorruptData) as caught:
        commit(posix, tmp_path, b"x" * 100)
    assert snapshot.disk[0].digest in caught.value.message and key in caught.value.message
    assert "50 bytes instead of 100" in caught.value.message and "restore" in caught.value.fix
    path.unlink()  # what the fix says
    assert commit(posix, tmp_path, b"x" * 100).id == snapshot.id
    assert check(posix, deep=True).ok


def test_what_is_there_is_not_sent_again(memory: tuple[Repository, MemoryStore], tmp_path: Path) -> None:
    """It is looked up by size; what it is worth says a deep check."""
    repository, store = memory
    snapshot = commit(repository, tmp_path, b"x" * 100)
    store.damage(repository.blob_key(snapshot.disk[0].digest), b"y" * 100)
    assert commit(repository, tmp_path, b"x" * 100).id == snapshot.id
    assert [problem.kind for problem in check(repository, deep=True).problems] == ["damaged_blob"]


def test_a_damaged_blob_is_noticed_at_its_end(memory: tuple[Repository, MemoryStore], tmp_path: Path) -> None:
    repository, store = memory
    blob = commit(repository, tmp_path, b"x" * 100).disk[0]
    for damaged in (b"y" * 100, b"x" * 99, b"x" * 101, b""):
        store.damage(repository.blob_key(blob.digest), damaged)
        for size in (10, -1):
            with pytest.raises(CorruptData) as caught, repository.open_blob(blob.digest) as reader:
                while reader.read(size):
                    pass
            assert blob.digest in caught.value.message and f"{len(damaged)} bytes" in caught.value.message


@pytest.mark.parametrize("change", [b"", b"{}", b"x" * (MAX_MANIFEST_BYTES + 1), b"null", b"[" * 100_000])
def test_a_damaged_manifest_is_refused(
    memory: tuple[Repository, MemoryStore], tmp_path: Path, change: bytes
) -> None:
    repository, store = memory
    id = commit(repository, tmp_path, b"x").id
    store.damage(manifest_key(id), change)
    with pytest.raises(CorruptData, match=f"{id}"):
        repository.snapshot(id)


def put_as_manifest(repository: Repository, data: bytes) -> SnapshotId:
    """What a hostile or newer writer could store: the id is right for the bytes."""
    id = SnapshotId(hashlib.sha256(data).hexdigest())
    repository.store.put_new(manifest_key(id), data)
    return id


def test_a_manifest_with_the_right_id_and_a_wrong_form_is_refused(repository: Repository, tmp_path: Path) -> None:
    good = canonical_json(commit(repository, tmp_path, b"x"))
    for data in (b"", b"{}", b"[]", b"\xff", b"[" * 100_000, good + b" ", good.replace(b'"cpus":1', b'"cpus":0')):
        with pytest.raises(CorruptData):
            repository.snapshot(put_as_manifest(repository, data))


def test_a_newer_manifest_is_unsupported_not_damaged(repository: Repository, tmp_path: Path) -> None:
    good = canonical_json(commit(repository, tmp_path, b"x"))
    id = put_as_manifest(repository, good.replace(b"aenv.snapshot/1", b"aenv.snapshot/9"))
    with pytest.raises(Unsupported, match=r"aenv\.snapshot/9"):
        repository.snapshot(id)


def test_find(repository: Repository, tmp_path: Path) -> None:
    first = "abcd" + "0" * 60
    second = "abcd" + "1" + "0" * 59
    for id in (first, second):
        repository.store.put_new(manifest_key(SnapshotId(id)), b"{}")
    assert repository.find(first) == first
    assert repository.find("abcd1") == second
    with pytest.raises(Conflict, match=first):
        repository.find("abcd")
    with pytest.raises(NotFound, match="abce"):
        repository.find("abce")
    for bad in ("abc", "ABCD", "abcg", "", "../../", "a" * 65, "abcd\n"):
        with pytest.raises(InvalidInput):
            repository.find(bad)


def test_records_have_one_winner(repository: Repository) -> None:
    assert repository.recall("stages", KEY, Built) is None
    barrier = threading.Barrier(8)

    def one(index: int) -> Built:
        barrier.wait()
        return repository.record("stages", KEY, Built(snapshot_id=SnapshotId("a" * 64), seconds=index))

    with ThreadPoolExecutor(8) as pool:
        kept = set(pool.map(one, range(8)))
    assert len(kept) == 1
    assert repository.recall("stages", KEY, Built) == kept.pop()
    assert repository.recall("outputs", KEY, Built) is None
    repository.forget("stages", KEY)
    assert repository.recall("stages", KEY, Built) is None


def test_records_are_bounded_and_validated(memory: tuple[Repository, MemoryStore]) -> None:
    repository, store = memory

    class Long(Model):
        text: str

    with pytest.raises(InvalidInput):
        repository.record("stages", KEY, Long(text="x" * MAX_RECORD_BYTES))
    with pytest.raises(InvalidInput, match="names"):
        repository.record("names", KEY, Long(text=""))
    for data in (b"", b"{}", b"x" * (MAX_RECORD_BYTES + 1), b'{"snapshot_id":"../../etc"}', b"\0" * 10):
        store.damage(record_key("stages", KEY), data)
        with pytest.raises(CorruptData, match=KEY):
            repository.recall("stages", KEY, Built)


def test_concurrent_commits_of_one_content(repository: Repository, tmp_path: Path) -> None:
    captures = [capture(tmp_path, b"same" * 1000, ram=b"ram") for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        ids = {snapshot.id for snapshot in pool.map(lambda one: repository.commit(one, draft()), captures)}
    assert len(ids) == 1
    report = check(repository, deep=True)
    assert report.ok and report.counts["blobs"] == 3


def test_keys_are_as_documented() -> None:
    digest = Digest("sha256:ab" + "c" * 62)
    assert Repository(MemoryStore()).blob_key(digest) == StoreKey("blobs/sha256/ab/ab" + "c" * 62)
    assert manifest_key(SnapshotId("ab" + "c" * 62)) == "snapshots/ab/ab" + "c" * 62
    assert record_key("stages", KEY) == f"refs/stages/{KEY}"


def test_the_machine_is_part_of_the_id(repository: Repository, tmp_path: Path) -> None:
    plain = repository.commit(capture(tmp_path, b"x"), draft())
    bigger = draft().model_copy(update={"machine": MachineSpec(cpus=2)})
    assert repository.commit(capture(tmp_path, b"x"), bigger).id != plain.id
    assert isinstance(repository.snapshot(plain.id), Snapshot)
