"""Which versions go by rules, and which stay and why."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest

from aenv_run.catalog import Catalog, VersionRecord, tag_key, version_key
from aenv_run.catalog.records import TagRecord
from aenv_run.catalog.retention import Decision, Rules, decide, retain
from aenv_run.check import check
from aenv_run.cli.arguments import parse_age
from aenv_run.cli.command import run
from aenv_run.digest import canonical_json
from aenv_run.errors import CorruptData, InvalidInput, NotFound
from aenv_run.lifecycle import State
from aenv_run.repository import Repository, manifest_key
from aenv_run.snapshot import Snapshot
from aenv_run.store.memory import Crash, Fault, MemoryStore
from aenv_run.types import Name, SnapshotId, Tag
from aenv_run.used_snapshots import used_snapshots
from tests.bytes_half import commit
from tests.unit.node_site import Site, launch, make_site

NAME = Name("task")


class Made:
    """Versions 1 to ``count`` of a name, each its own snapshot; version 5 grew from 2."""

    def __init__(self, scratch: Path, count: int = 6) -> None:
        self.store = MemoryStore()
        self.repository = Repository(self.store)
        self.catalog = Catalog(self.repository, by="x")
        self.snapshots: dict[int, Snapshot] = {}
        for version in range(1, count + 1):
            parent = self.snapshots[2] if version == 5 else None
            self.snapshots[version] = commit(self.repository, scratch, b"%d" % version, parent=parent)
            self.publish(version)

    def publish(self, version: int) -> None:
        """As if it had been published in the first month of 2025, on the day of its number."""
        moment = f"2025-01-{version:02}T12:00:00Z"
        record = VersionRecord(snapshot_id=self.snapshots[version].id, created_at=moment)
        self.store.put_new(version_key(NAME, version), canonical_json(record))


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def stay(decisions: list[Decision]) -> dict[int, str]:
    return {one.version: one.kept_because for one in decisions if one.kept_because is not None}


def test_the_newest_the_tagged_the_used_and_the_grown_from_stay(made: Made) -> None:
    made.catalog.tag(NAME, Tag("stable"), 1)
    used = {made.snapshots[3].id: "the sandbox s1"}
    decisions = retain(made.catalog, NAME, Rules(newest=2), used)
    assert stay(decisions) == {
        1: "tagged stable",
        2: "task:5 grew from it",
        3: "used by the sandbox s1",
        5: "one of the newest 2",
        6: "one of the newest 2",
    }
    assert made.catalog.versions(NAME) == (1, 2, 3, 5, 6) and check(made.repository, deep=True).ok
    assert stay(retain(made.catalog, NAME, Rules(newest=1, keep_tagged=False), {})) == {6: "one of the newest 1"}
    assert made.catalog.versions(NAME) == (6,) and made.catalog.tags(NAME) == (), "5 went, so 2 could go too"
    assert check(made.repository, deep=True).ok


def test_lineage_counts_across_names(made: Made, tmp_path: Path) -> None:
    child = commit(made.repository, tmp_path, b"child", parent=made.snapshots[4])
    made.catalog.publish(Name("other"), child.id)
    assert stay(decide(made.catalog, NAME, Rules(newest=0), {})) == {4: "other:1 grew from it"}


def test_age(made: Made, tmp_path: Path) -> None:
    young = made.catalog.publish(NAME, commit(made.repository, tmp_path, b"young").id)
    assert stay(decide(made.catalog, NAME, Rules(older_than_s=86400), {})) == {young: "not old enough"}
    assert stay(decide(made.catalog, NAME, Rules(newest=6, older_than_s=86400), {}))[2] == "one of the newest 6"
    made.store.damage(
        version_key(NAME, 4),
        canonical_json(VersionRecord(snapshot_id=made.snapshots[4].id, created_at="someday")),
    )
    assert stay(decide(made.catalog, NAME, Rules(older_than_s=0), {}))[4] == "not old enough"
    assert [parse_age(text) for text in ("90s", "5m", "12h", "30d", "0d")] == [90, 300, 43200, 2592000, 0]
    for wrong in ("30", "d", "-1d", "1w", "1.5h"):
        with pytest.raises(InvalidInput):
            parse_age(wrong)


def test_what_cannot_be_read_removes_nothing(made: Made) -> None:
    whole = canonical_json(made.snapshots[2])
    made.store.delete(manifest_key(made.snapshots[2].id))
    with pytest.raises(CorruptData, match="task:2 cannot be read, so nothing is removed"):
        retain(made.catalog, NAME, Rules(newest=0), {})
    made.catalog.remove(NAME, 2)
    with pytest.raises(CorruptData, match="task:5 cannot be read, so nothing is removed"):
        retain(made.catalog, NAME, Rules(newest=2), {})
    made.store.put_new(manifest_key(made.snapshots[2].id), whole)
    made.store.damage(version_key(NAME, 1), b"junk")
    with pytest.raises(CorruptData, match="task:1 cannot be read, so nothing is removed"):
        retain(made.catalog, NAME, Rules(newest=2), {})
    assert made.catalog.versions(NAME) == (1, 3, 4, 5, 6)
    assert "cannot be read" in stay(decide(made.catalog, NAME, Rules(newest=4), {}))[1]


def test_a_tag_that_comes_while_it_is_decided_keeps_its_version(made: Made) -> None:
    class Meanwhile(dict[SnapshotId, str]):
        """Somebody promotes version 1 after its tags were looked at."""

        def get(self, id: SnapshotId, default: object = None) -> None:  # type: ignore[override]
            made.catalog.tag(NAME, Tag("late"), 1)

    assert stay(retain(made.catalog, NAME, Rules(newest=3), Meanwhile()))[1] == "tagged late"
    assert made.catalog.resolve(f"{NAME}:late").version == 1 and check(made.repository).ok


def test_no_rule_removes_nothing(made: Made) -> None:
    with pytest.raises(InvalidInput, match="no rule"):
        retain(made.catalog, NAME, Rules(), {})
    with pytest.raises(NotFound):
        retain(made.catalog, Name("none"), Rules(newest=0), {})


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_every_operation(tmp_path: Path, when: str) -> None:
    at = 0
    while True:
        made = Made(tmp_path, 3)
        made.store.put_new(tag_key(NAME, Tag("keep")), canonical_json(TagRecord(version=2)))
        start, at = made.store.operations, at + 1
        made.store.arm(Fault(at, when))  # type: ignore[arg-type]
        with suppress(Crash):
            retain(made.catalog, NAME, Rules(newest=1), {})
        if made.store.operations - start < at:
            break
        made.store.restart()
        assert {2, 3} <= set(made.catalog.versions(NAME)) and check(made.repository, deep=True).ok
        retain(made.catalog, NAME, Rules(newest=1), {})
        assert made.catalog.versions(NAME) == (2, 3) and made.catalog.tags(NAME) == ("keep",)
    assert at > 20


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return make_site(tmp_path / "home", tmp_path / "seed")


async def test_what_sandboxes_use(site: Site) -> None:
    (entry,) = site.tools.catalog.entries()
    assert used_snapshots(site.home) == {}
    node = site.node()
    running, paused = await launch(node), await launch(node)
    await node.pause(paused)
    assert list(used_snapshots(site.home)) == [entry.snapshot_id]
    await node.kill(running)
    assert used_snapshots(site.home) == {entry.snapshot_id: f"the sandbox {paused.record.id}"}
    record = paused.directory.read()
    paused.directory.write(record.model_copy(update={"state": State.DEAD}))
    assert used_snapshots(site.home) == {}
    (paused.directory.root / "sandbox.json").write_text("junk")
    with pytest.raises(CorruptData, match="record of a sandbox"):
        used_snapshots(site.home)
    paused.directory.write(record)
    site.home.pools.write_text('{"format":"aenv.pools/1","pools":7}')
    with pytest.raises(CorruptData, match="which pools"):
        used_snapshots(site.home)
    site.home.pools.unlink()
    await node.kill(paused)


async def test_the_command(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AENV_HOME", str(site.home.root))
    catalog = site.tools.catalog
    node = site.node()
    sandbox = await launch(node)
    for content in (b"two", b"three"):
        catalog.publish(Name("tiny"), commit(catalog.repository, tmp_path, content).id, [Tag("latest")])
    assert run(["catalog", "retain", "tiny", "--keep", "0", "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    reasons = [one["kept_because"] for one in told["versions"]]
    assert told["dry_run"] and reasons == [f"used by the sandbox {sandbox.record.id}", None, "tagged latest"]
    assert catalog.versions(Name("tiny")) == (1, 2, 3)
    assert run(["catalog", "retain", "tiny", "--keep", "0"]) == 0
    assert "tiny:2    removed" in capsys.readouterr().out
    assert catalog.versions(Name("tiny")) == (1, 3)
    assert run(["catalog", "retain", "tiny"]) == 64
    assert check(catalog.repository).ok
    await node.kill(sandbox)
