"""Labels of versions, search, and how a version was built."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aenv_build.running.provenance import source_state
from aenv_run.catalog import Built, Catalog, labels_key, search, with_labels
from aenv_run.catalog.labels import MAX_LABELS
from aenv_run.check import check
from aenv_run.cli.command import run
from aenv_run.errors import Conflict, InvalidInput, NotFound
from aenv_run.repository import Repository
from aenv_run.snapshot import Provenance
from aenv_run.store.memory import Crash, Fault, MemoryStore
from aenv_run.store.posix import PosixStore
from aenv_run.types import Name, Tag
from tests.bytes_half import capture, draft

ONE, TWO = Name("swe-task"), Name("python-dev")
BUILT = Built(base="image docker://python:3.12", builder="aenv-build 1", driver="gvisor", verified=("unit",))


def fill(catalog: Catalog, tmp_path: Path) -> None:
    """Two names; the first one's snapshot has a label of its own."""
    made = draft(None, None, suite="nightly", owner="ada")
    made = made.model_copy(update={"provenance": Provenance(recipe_name="bugs")})
    catalog.publish(ONE, catalog.repository.commit(capture(tmp_path, b"one"), made).id, [Tag("latest")])
    other = catalog.repository.commit(capture(tmp_path, b"two"), draft())
    catalog.publish(TWO, other.id, built=BUILT)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def catalog(store: MemoryStore, tmp_path: Path) -> Catalog:
    made = Catalog(Repository(store), by="x")
    fill(made, tmp_path)
    return made


def test_labels_of_a_version_stand_above_those_of_its_snapshot(catalog: Catalog) -> None:
    before = catalog.resolve("swe-task:1")
    assert catalog.label(ONE, 1, {"owner": "grace", "ticket": "7"}) == {"owner": "grace", "ticket": "7"}
    (entry,) = catalog.entries(ONE)
    assert entry.labels == {"suite": "nightly", "owner": "grace", "ticket": "7"}
    assert catalog.resolve("swe-task:1") == before
    assert catalog.repository.snapshot(before.snapshot_id).labels == {"suite": "nightly", "owner": "ada"}
    assert catalog.label(ONE, 1, {}, ["owner", "none"]) == {"ticket": "7"}
    assert catalog.entries(ONE)[0].labels["owner"] == "ada"
    assert check(catalog.repository).ok
    catalog.remove(ONE)
    assert catalog.repository.store.stat(labels_key(ONE, 1)) is None
    with pytest.raises(NotFound):
        catalog.label(ONE, 1, {"a": "b"})


@pytest.mark.parametrize(
    "labels",
    [{"": "x"}, {"a b": "x"}, {"a=b": "x"}, {"a\x1b": "x"}, {"a": "x\n"}, {"a": "x" * 600}, {"k" * 200: "x"}],
)
def test_a_label_that_cannot_be(catalog: Catalog, labels: dict[str, str]) -> None:
    with pytest.raises(InvalidInput):
        catalog.label(ONE, 1, labels)
    assert catalog.labels.of(ONE, 1) == {}


def test_no_record_is_written_that_would_be_too_large_to_read(catalog: Catalog) -> None:
    wide = {f"k{number}": "\u4e2d" * 500 for number in range(50)}
    with pytest.raises(InvalidInput, match="bytes, more than"):
        catalog.label(ONE, 1, wide)
    assert catalog.labels.of(ONE, 1) == {}
    built = Built(verified=tuple("v" * 250 for _ in range(200)))
    with pytest.raises(InvalidInput, match="bytes, more than"):
        catalog.publish(TWO, catalog.resolve("swe-task").snapshot_id, built=built)
    assert catalog.versions(TWO) == (1,) and check(catalog.repository).ok


def test_labels_are_bounded_and_none_is_lost_to_another(catalog: Catalog) -> None:
    with pytest.raises(InvalidInput, match="more than 64"):
        catalog.label(ONE, 1, {f"k{number}": "" for number in range(MAX_LABELS + 1)})
    barrier = threading.Barrier(8)

    def one(number: int) -> None:
        barrier.wait()
        catalog.label(ONE, 1, {f"k{number}": str(number)})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(8)))
    assert catalog.labels.of(ONE, 1) == {f"k{number}": str(number) for number in range(8)}


@pytest.mark.parametrize("when", ["before", "half", "after"])
def test_killed_at_every_operation_of_a_label(tmp_path: Path, when: str) -> None:
    for at in range(1, 6):
        store = MemoryStore()
        catalog = Catalog(Repository(store), by="x")
        fill(catalog, tmp_path)
        catalog.label(ONE, 1, {"a": "1"})
        store.arm(Fault(at, when))  # type: ignore[arg-type]
        try:
            catalog.label(ONE, 1, {"a": "2"})
        except Crash:
            store.restart()
        assert catalog.labels.of(ONE, 1)["a"] in ("1", "2") and check(catalog.repository, deep=True).ok
        assert catalog.label(ONE, 1, {"a": "2"}) == {"a": "2"}


def test_damaged_labels_hide_no_version_and_are_replaced(catalog: Catalog, store: MemoryStore) -> None:
    catalog.label(ONE, 1, {"a": "1"})
    store.damage(labels_key(ONE, 1), b"junk")
    (entry,) = catalog.entries(ONE)
    assert entry.problem and "refs/labels" in entry.problem and entry.labels["owner"] == "ada"
    assert [problem.kind for problem in check(catalog.repository).problems] == ["unreadable_ref"]
    assert catalog.label(ONE, 1, {"b": "2"}) == {"b": "2"} and check(catalog.repository).ok


def test_search_and_labels_of_ls(catalog: Catalog) -> None:
    catalog.label(TWO, 1, {"suite": "weekly"})

    def found(text: str) -> list[tuple[str, tuple[str, ...]]]:
        return [(hit.entry.reference, hit.found_in) for hit in search(catalog, text)]

    assert found("SWE") == [("swe-task:1", ("name",))]
    assert found("python") == [("python-dev:1", ("name",))]
    assert found("docker://") == [("python-dev:1", ("base",))]
    assert found("bugs latest") == [("swe-task:1", ("recipe", "tag"))]
    assert found("suite=") == [("python-dev:1", ("label suite",)), ("swe-task:1", ("label suite",))]
    assert found("ada weekly") == [] and found("nothing") == []
    with pytest.raises(InvalidInput):
        search(catalog, "  ")

    def labelled(*wanted: str) -> list[str]:
        return [entry.reference for entry in with_labels(catalog.entries(), wanted)]

    assert labelled("suite") == ["python-dev:1", "swe-task:1"]
    assert labelled("suite=nightly", "owner") == ["swe-task:1"] and labelled("suite=") == []
    with pytest.raises(InvalidInput):
        labelled("=x")


def test_only_what_was_verified_is_promoted_where_that_is_asked(catalog: Catalog) -> None:
    stable = Tag("stable")
    with pytest.raises(Conflict, match="not verified"):
        catalog.promote(ONE, stable, 1, verified=True)
    assert catalog.tags(ONE) == ("latest",)
    assert catalog.promote(TWO, stable, 1, verified=True)
    id = catalog.resolve("swe-task:1").snapshot_id
    assert catalog.publish(ONE, id, built=Built(host="elsewhere")) == 1, "no news of importance"
    assert catalog.publish(ONE, id, built=BUILT) == 2, "now it was verified"
    assert catalog.publish(ONE, id, built=BUILT) == 2
    assert catalog.promote(ONE, stable, 2, verified=True) and check(catalog.repository).ok
    with pytest.raises(NotFound):
        catalog.promote(ONE, stable, 9, verified=True)


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("AENV_HOME", str(tmp_path))
    catalog = Catalog(Repository(PosixStore(tmp_path / "repository")), by="bot\u202e")
    fill(catalog, tmp_path)

    def said(*argv: str, code: int = 0) -> str:
        assert run(["catalog", *argv]) == code
        return capsys.readouterr().out

    assert json.loads(said("label", "swe-task:latest", "a=1", "b=2", "--json"))["labels"] == {"a": "1", "b": "2"}
    assert said("label", "swe-task:1", "--delete", "a").split() == ["LABEL", "VALUE", "b", "2"]
    said("label", str(catalog.resolve("swe-task").snapshot_id), "a=1", code=64)
    said("label", "swe-task:1", "novalue", code=64)
    assert said("ls", "--label", "b=2").splitlines()[1].startswith("swe-task:1")
    assert said("ls", "--label", "b=3") == ""
    assert [hit["found_in"] for hit in json.loads(said("search", "dev", "python", "--json"))] == [["name"]]
    assert "label b" in said("search", "b=2")
    shown = said("show", "python-dev:1")
    assert "image docker://python:3.12" in shown and "gvisor" in shown and "unit" in shown
    assert "bot\ufffd" in shown and "\u202e" not in shown
    assert json.loads(said("show", "python-dev", "--json"))["version"]["built"]["verified"] == ["unit"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "recipe.yaml").write_text("version: 1\n")
    git(folder, "add", ".")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b.example", "commit", "-qm", "first")
    return folder


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


async def test_the_commit_of_the_recipe(checkout: Path, tmp_path: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    assert await source_state(checkout) == (commit, False)
    (checkout / "recipe.yaml").write_text("version: 1\nname: x\n")
    assert await source_state(checkout) == (commit, True)
    git(checkout, "checkout", "-q", "--", ".")
    (checkout / "new").write_text("")
    assert await source_state(checkout) == (commit, True)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / ".git").write_text("nonsense")
    assert await source_state(plain) == (None, None)


@pytest.mark.parametrize("setting", ["filter.x.clean", "core.fsmonitor"])
async def test_a_checkout_cannot_have_programs_run(checkout: Path, tmp_path: Path, setting: str) -> None:
    ran = tmp_path / "ran"
    script = tmp_path / "evil"
    script.write_text(f"#!/bin/sh\n: >{ran}\ncat\n")
    script.chmod(0o755)
    git(checkout, "config", setting, str(script))
    (checkout / ".gitattributes").write_text("* filter=x\n")
    os.utime(checkout / "recipe.yaml", (1, 1))
    commit, dirty = await source_state(checkout)
    assert commit is not None and dirty is None and not ran.exists()
