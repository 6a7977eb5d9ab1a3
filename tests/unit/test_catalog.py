"""Names, versions, tags, lineage."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv_run.catalog import Catalog, Reference, VersionRecord, tag_key, version_key
from aenv_run.check import check
from aenv_run.digest import canonical_json
from aenv_run.errors import AenvError, CorruptData, InvalidInput, NotFound
from aenv_run.repository import Repository, manifest_key
from aenv_run.snapshot import Snapshot
from aenv_run.store import StoreKey
from aenv_run.store.memory import MemoryStore
from aenv_run.store.posix import PosixStore
from aenv_run.types import Name, SnapshotId, Tag
from tests.bytes_half import capture, commit, draft

NAME, LATEST = Name("swe-task"), Tag("latest")


@pytest.fixture(params=["posix", "memory"])
def catalog(request: pytest.FixtureRequest, tmp_path: Path) -> Catalog:
    return Catalog(Repository(PosixStore(tmp_path / "store") if request.param == "posix" else MemoryStore()))


@pytest.fixture
def make(catalog: Catalog, tmp_path: Path) -> Callable[[int], Snapshot]:
    return lambda number: commit(catalog.repository, tmp_path, b"%d" % number)


def test_versions_count_up_and_a_repeat_is_the_same_version(
    catalog: Catalog, make: Callable[[int], Snapshot]
) -> None:
    one, two = make(1).id, make(2).id
    assert catalog.publish(NAME, one) == 1
    assert catalog.publish(NAME, one) == 1
    assert catalog.publish(NAME, two) == 2
    assert catalog.publish(NAME, one) == 3
    assert catalog.versions(NAME) == (1, 2, 3)
    assert catalog.resolve("swe-task:1").snapshot_id == one
    assert catalog.names() == (NAME,)


def test_publish_needs_a_snapshot(catalog: Catalog) -> None:
    with pytest.raises(NotFound):
        catalog.publish(NAME, SnapshotId("0" * 64))
    assert catalog.names() == ()


def test_concurrent_publishers_get_distinct_versions(catalog: Catalog, make: Callable[[int], Snapshot]) -> None:
    ids = [make(number).id for number in range(12)]
    barrier = threading.Barrier(12)

    def one(id: SnapshotId) -> int:
        barrier.wait()
        return catalog.publish(NAME, id, [LATEST])

    with ThreadPoolExecutor(12) as pool:
        versions = list(pool.map(one, ids))
    assert sorted(versions) == list(range(1, 13))
    assert catalog.resolve(f"{NAME}:latest").version == 12
    assert all(catalog.resolve(f"{NAME}:{v}").snapshot_id == id for v, id in zip(versions, ids, strict=True))
    assert check(catalog.repository).ok


def test_concurrent_publishers_of_one_snapshot_get_one_version(
    catalog: Catalog, make: Callable[[int], Snapshot]
) -> None:
    id = make(1).id
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: catalog.publish(NAME, id), range(8))) == {1}


def test_resolve(catalog: Catalog, make: Callable[[int], Snapshot]) -> None:
    one, two = make(1).id, make(2).id
    catalog.publish(NAME, one)
    catalog.publish(NAME, two)
    assert catalog.resolve("swe-task").version == 2
    catalog.tag(NAME, LATEST, 1)
    assert catalog.resolve("swe-task").version == 1
    assert catalog.resolve("swe-task:latest").snapshot_id == one
    assert catalog.resolve("swe-task:2").snapshot_id == two
    by_id = catalog.resolve(one)
    assert (by_id.snapshot_id, by_id.name, by_id.version) == (one, None, None)
    assert catalog.resolve(one[:12]).snapshot_id == one


def test_resolve_says_what_exists(catalog: Catalog, make: Callable[[int], Snapshot]) -> None:
    with pytest.raises(NotFound, match="catalog is empty"):
        catalog.resolve("swe-task")
    for name in ("swe-task", "python-dev", "other"):
        catalog.publish(Name(name), make(1).id, [LATEST])
    with pytest.raises(NotFound, match="swe-task") as caught:
        catalog.resolve("swe-tsak")
    assert "swe-task" in caught.value.fix
    for unknown in ("swe-task:9", "swe-task:stable", "swe-task:999999999"):
        with pytest.raises(NotFound, match="versions 1 and the tags latest -> 1"):
            catalog.resolve(unknown)
    with pytest.raises(NotFound):
        catalog.resolve("0" * 12)


@pytest.mark.parametrize(
    "text",
    ["", ":", "swe-task:", ":1", "a:0", "a:-1", "a:01x", "a:b:c", "A", "a/b", "../x", "a:../x", "a@b", "a\n"],
)
def test_malformed_references_say_how_to_write_one(catalog: Catalog, text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        catalog.resolve(text)
    assert "NAME:VERSION" in caught.value.fix


@given(st.text(max_size=80))
def test_parsing_any_text_gives_a_reference_or_a_typed_error(text: str) -> None:
    try:
        reference = Reference.parse(text)
    except AenvError:
        return
    assert (reference.id_prefix is None) != (reference.name is None)


def test_a_name_never_reads_like_an_id(catalog: Catalog, make: Callable[[int], Snapshot]) -> None:
    for name in ("deadbeefcafe", "0" * 64):
        with pytest.raises(InvalidInput, match="reads like"):
            catalog.publish(Name(name), make(1).id)
    assert catalog.publish(Name("deadbeef"), make(1).id) == 1
    assert catalog.resolve("deadbeef").version == 1


def test_tags_move_and_need_their_version(catalog: Catalog, make: Callable[[int], Snapshot]) -> None:
    catalog.publish(NAME, make(1).id, [LATEST, Tag("stable")])
    catalog.publish(NAME, make(2).id, [LATEST])
    assert [entry.tags for entry in catalog.entries(NAME)] == [("stable",), ("latest",)]
    with pytest.raises(NotFound, match="versions 1, 2"):
        catalog.tag(NAME, LATEST, 3)
    with pytest.raises(NotFound):
        catalog.tag(Name("other"), LATEST, 1)
    catalog.untag(NAME, Tag("stable"))
    with pytest.raises(NotFound):
        catalog.untag(NAME, Tag("stable"))
    assert catalog.tags(NAME) == ("latest",)


def test_movers_of_one_tag_all_succeed(catalog: Catalog, make: Callable[[int], Snapshot]) -> None:
    for number in range(6):
        catalog.publish(NAME, make(number).id)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda version: catalog.tag(NAME, LATEST, version), range(1, 7)))
    assert catalog.resolve("swe-task:latest").version in range(1, 7)


def test_a_removed_version_is_gone_for_ever(catalog: Catalog, make: Callable[[int], Snapshot]) -> None:
    one, two = make(1).id, make(2).id
    catalog.publish(NAME, one, [Tag("old")])
    catalog.publish(NAME, two, [LATEST])
    assert catalog.remove(NAME, 2) == (2,)
    assert catalog.tags(NAME) == ("old",)
    assert catalog.resolve("swe-task").version == 1
    with pytest.raises(NotFound):
        catalog.resolve("swe-task:latest")
    with pytest.raises(NotFound):
        catalog.remove(NAME, 2)
    assert catalog.publish(NAME, two) == 3
    assert catalog.repository.snapshot(two)
    assert catalog.remove(NAME) == (1, 3)
    assert catalog.names() == () and catalog.entries() == []
    with pytest.raises(NotFound):
        catalog.remove(NAME)
    assert catalog.publish(NAME, one) == 4
    assert check(catalog.repository).ok


def test_a_tag_whose_version_was_removed_counts_as_none(catalog: Catalog, make: Callable[[int], Snapshot]) -> None:
    catalog.publish(NAME, make(1).id)
    catalog.publish(NAME, make(2).id)
    catalog.remove(NAME, 2)
    catalog.repository.store.put_new(tag_key(NAME, LATEST), b'{"format":"aenv.tag/1","version":2}')
    assert catalog.resolve("swe-task").version == 1
    report = check(catalog.repository)
    assert report.ok and report.counts["dangling_tags"] == 1


def test_entries(catalog: Catalog, tmp_path: Path) -> None:
    repository = catalog.repository
    base = commit(repository, tmp_path, b"12345")
    child = repository.commit(capture(tmp_path, b"12345", b"67", ram=b"r" * 10, device_state=b"d"), draft(base))
    catalog.publish(Name("b"), base.id)
    catalog.publish(Name("a"), child.id, [LATEST])
    a, b = catalog.entries()
    assert (a.name, a.version, a.tags, a.snapshot_id, a.has_memory) == ("a", 1, ("latest",), child.id, True)
    assert a.size_bytes == 5 + 2 + 10 + 1  # the layer that occurs twice counts once
    assert (b.name, b.size_bytes, b.has_memory) == ("b", 5, False)
    assert b.created_at.endswith("Z")
    assert catalog.entries(Name("b")) == [b]
    with pytest.raises(NotFound, match="a, b"):
        catalog.entries(Name("zzz"))


def test_a_catalog_that_remembers_asks_for_what_may_change_alone(tmp_path: Path) -> None:
    store = MemoryStore()
    catalog = Catalog(Repository(store), remember=True)
    ids = [commit(catalog.repository, tmp_path, b"%d" % number).id for number in range(5)]
    for number, id in enumerate(ids):
        catalog.publish(Name(f"n{number}"), id, [LATEST] if number == 0 else [])
    first, before = catalog.entries(), store.operations
    assert catalog.entries() == first
    assert store.operations - before == 4 + 1, "versions, removals, tags, labels are listed; one tag is read"
    before = store.operations
    assert [entry.snapshot_id for entry in catalog.all.fixed()] == ids and store.operations - before == 2
    catalog.label(Name("n1"), 1, {"a": "b"})
    catalog.remove(Name("n2"))
    catalog.publish(Name("n2"), ids[0])
    other = Catalog(catalog.repository)
    assert catalog.entries() == other.entries() and catalog.entries(Name("n1")) == other.entries(Name("n1"))
    assert [catalog.all.is_live(id) for id in ids] == [True, True, False, True, True]
    before = store.operations
    assert catalog.all.is_live(ids[3]) and store.operations - before == 2


def test_one_bad_snapshot_does_not_hide_the_others(catalog: Catalog, make: Callable[[int], Snapshot]) -> None:
    one = make(1).id
    catalog.publish(Name("a"), one)
    catalog.publish(Name("b"), make(2).id)
    catalog.repository.store.delete(manifest_key(one))
    bad, good = catalog.entries()
    assert bad.problem and one in bad.problem and good.problem is None


def test_a_newer_snapshot_does_not_hide_the_others(catalog: Catalog, make: Callable[[int], Snapshot]) -> None:
    newer = canonical_json(make(1)).replace(b"aenv.snapshot/1", b"aenv.snapshot/9")
    id = SnapshotId(hashlib.sha256(newer).hexdigest())
    catalog.repository.store.put_new(manifest_key(id), newer)
    record = VersionRecord(snapshot_id=id, created_at="2025-01-31T12:00:00Z")
    catalog.repository.store.put_new(version_key(Name("a"), 1), canonical_json(record))
    catalog.publish(Name("b"), make(2).id)
    other, good = catalog.entries()
    assert "aenv.snapshot/9" in (other.problem or "") and good.problem is None


def test_lineage(catalog: Catalog, tmp_path: Path) -> None:
    repository = catalog.repository
    chain = [commit(repository, tmp_path, b"base")]
    for number in range(3):
        chain.append(commit(repository, tmp_path, b"%d" % number, parent=chain[-1]))
    assert catalog.lineage(chain[-1].id) == chain[::-1]


@pytest.mark.parametrize("data", [b"", b"{}", b"x" * 100_000, b'{"format":"aenv.version/1","snapshot_id":"../x"}'])
def test_a_hostile_ref_is_refused(tmp_path: Path, data: bytes) -> None:
    store = MemoryStore()
    catalog = Catalog(Repository(store))
    catalog.publish(NAME, commit(catalog.repository, tmp_path, b"x").id)
    store.damage(version_key(NAME, 1), data)
    with pytest.raises(CorruptData, match="refs/names/swe-task/1"):
        catalog.resolve("swe-task")


def test_keys_of_another_form_are_no_versions(catalog: Catalog, make: Callable[[int], Snapshot]) -> None:
    catalog.publish(NAME, make(1).id)
    for part in ("02", "0", "x", "1.5", "9" * 12):
        catalog.repository.store.put_new(StoreKey(f"refs/names/{NAME}/{part}"), b"{}")
    assert catalog.versions(NAME) == (1,)
    kinds = [problem.kind for problem in check(catalog.repository).problems]
    assert kinds == ["unknown_file"] * 5


def test_a_damaged_ref_is_a_row_and_hides_nothing(tmp_path: Path) -> None:
    store = MemoryStore()
    catalog = Catalog(Repository(store))
    one = commit(catalog.repository, tmp_path, b"1").id
    catalog.publish(NAME, one, [LATEST, Tag("stable")])
    catalog.publish(NAME, commit(catalog.repository, tmp_path, b"2").id)
    store.damage(tag_key(NAME, LATEST), b"junk")
    store.damage(version_key(NAME, 2), b"junk")
    tag, good, bad = catalog.entries()
    assert (tag.reference, tag.snapshot_id) == ("swe-task:latest", None) and "refs/tags" in (tag.problem or "")
    assert (good.reference, good.problem, good.tags) == ("swe-task:1", None, (Tag("stable"),))
    assert (bad.reference, bad.snapshot_id) == ("swe-task:2", None) and "refs/names" in (bad.problem or "")
    assert {problem.kind for problem in check(catalog.repository).problems} == {"unreadable_ref"}
    assert catalog.resolve("swe-task:stable").snapshot_id == one
    with pytest.raises(NotFound, match="stable -> 1"):
        catalog.resolve("swe-task:7")
    assert catalog.publish(NAME, one, [LATEST]) == 3, "a publisher replaces a damaged tag"
    assert catalog.resolve("swe-task").version == 3
    store.damage(tag_key(NAME, LATEST), b"junk")
    assert catalog.remove(NAME) == (1, 2, 3)
    assert catalog.tags(NAME) == ()
