"""Export and import: the same snapshot on the other side, or an error that names what is wrong."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from aenv_run.catalog import Catalog
from aenv_run.catalog.export import export
from aenv_run.catalog.intake import take_in
from aenv_run.catalog.oci_documents import ARTIFACT_TYPE, SNAPSHOT_TYPE
from aenv_run.check import check
from aenv_run.cli.command import run
from aenv_run.digest import canonical_json, digest_bytes
from aenv_run.errors import AenvError, Conflict, CorruptData, InvalidInput, NotFound, TooLarge, Unsupported
from aenv_run.repository import Repository
from aenv_run.snapshot import Blob, Snapshot
from aenv_run.store.memory import Crash, Fault, MemoryStore
from aenv_run.store.posix import PosixStore
from aenv_run.types import Digest, Name, SnapshotId, Tag
from tests.bytes_half import capture, commit, draft

NAME = Name("task")
CHECKOUT = Path(__file__).parents[2]


class Made:
    """``task:1`` with memory, its parent and its parent's parent, exported to ``layout``."""

    def __init__(self, scratch: Path, hole_bytes: int = 3 << 20) -> None:
        self.repository = Repository(PosixStore(scratch / "one"))
        self.catalog = Catalog(self.repository, by="x")
        base = commit(self.repository, scratch, b"base")
        middle = self.repository.commit(capture(scratch, b"middle", ram=b"own memory"), draft(base))
        holes = b"ram" + bytes(hole_bytes) + b"ram"
        self.top = self.repository.commit(capture(scratch, b"top", ram=holes), draft(middle, suite="nightly"))
        self.catalog.publish(NAME, self.top.id, [Tag("latest")])
        self.layout = scratch / "layout"
        self.exported = export(self.catalog, "task:latest", self.layout)
        self.scratch = scratch

    def blob(self, digest: str) -> Path:
        return self.layout / "blobs" / "sha256" / digest.removeprefix("sha256:")

    @property
    def artifact(self) -> Path:
        return self.blob(self.exported.manifest_digest)

    def rewrite(self, change: Callable[[dict[str, object]], object]) -> None:
        """Another manifest of the artifact, rightly listed in the index: only what it says is wrong."""
        document = json.loads(self.artifact.read_bytes())
        change(document)
        data = json.dumps(document).encode()
        self.blob(digest_bytes(data)).write_bytes(data)
        index = json.loads((self.layout / "index.json").read_bytes())
        index["manifests"][0] |= {"digest": digest_bytes(data), "size": len(data)}
        (self.layout / "index.json").write_text(json.dumps(index))


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


class Other:
    """An empty repository."""

    def __init__(self, root: Path, store: MemoryStore | PosixStore | None = None) -> None:
        self.repository = Repository(store or PosixStore(root / "two"))
        self.catalog = Catalog(self.repository, by="y")
        self.root = root
        self._serial = 0

    def take_in(self, layout: Path, **settings: object) -> SnapshotId:
        self._serial += 1
        scratch = self.root / f"scratch-{self._serial}"
        scratch.mkdir()
        try:
            return take_in(self.catalog, layout, scratch, **settings).snapshot_id  # type: ignore[arg-type]
        finally:
            shutil.rmtree(scratch)

    def empty(self) -> bool:
        return list(self.repository.ids()) == [] and self.catalog.names() == ()


@pytest.fixture
def other(tmp_path: Path) -> Other:
    return Other(tmp_path)


def test_the_same_snapshot_on_the_other_side(made: Made, other: Other) -> None:
    assert other.take_in(made.layout) == made.top.id
    assert other.catalog.lineage(made.top.id) == made.catalog.lineage(made.top.id)
    report = check(other.repository, deep=True)
    assert report.ok and report.counts["orphan_blobs"] == 0 and report.counts["snapshots"] == 3
    resolved = other.catalog.resolve("task:1")
    assert resolved.snapshot_id == made.top.id and other.catalog.tags(NAME) == ()
    again = other.root / "again"
    assert export(other.catalog, "task:1", again).manifest_digest == made.exported.manifest_digest
    assert other.take_in(made.layout) == made.top.id and other.catalog.versions(NAME) == (1,)
    other.take_in(made.layout, name=Name("copy"), tags=(Tag("latest"),))
    assert other.catalog.resolve("copy:latest").snapshot_id == made.top.id


def test_both_ways_say_how_far_they_are(made: Made, other: Other) -> None:
    told: list[tuple[int, int]] = []
    other.take_in(made.layout, progress=lambda done, total: told.append((done, total)))
    export(other.catalog, "task", other.root / "back", lambda done, total: told.append((done, total)))
    total = made.exported.size_bytes
    assert {one[1] for one in told} == {total} and [one[0] for one in told].count(total) >= 2
    assert len([one for one in told if one[0] < total]) > 6, "also within a large blob"


def test_what_is_there_is_not_copied(made: Made, other: Other) -> None:
    base = made.catalog.lineage(made.top.id)[-1]
    assert commit(other.repository, other.root, b"base").id == base.id
    for blob in base.blobs():
        made.blob(blob.digest).unlink()
    assert other.take_in(made.layout) == made.top.id and check(other.repository, deep=True).ok


def test_the_directory_is_an_oci_image_layout(made: Made) -> None:
    assert json.loads((made.layout / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads((made.layout / "index.json").read_bytes())
    (entry,) = index["manifests"]
    assert entry["annotations"] == {"org.opencontainers.image.ref.name": "task:1"}
    document = json.loads(made.artifact.read_bytes())
    assert document["artifactType"] == ARTIFACT_TYPE
    assert document["config"] == {
        "mediaType": SNAPSHOT_TYPE, "digest": f"sha256:{made.top.id}", "size": len(canonical_json(made.top)),
    }  # fmt: skip
    names = {path.name for path in (made.layout / "blobs" / "sha256").iterdir()}
    listed = [document["config"], *document["layers"]]
    assert names == {one["digest"][7:] for one in listed} | {made.exported.manifest_digest.hex}
    for one in listed:
        data = made.blob(one["digest"]).read_bytes()
        assert (digest_bytes(data), len(data)) == (one["digest"], one["size"])
    assert made.layout.stat().st_mode & 0o77 == 0
    assert made.top.memory is not None
    ram = made.blob(made.top.memory.files["ram"].digest).stat()
    assert ram.st_blocks * 512 < ram.st_size, "holes stay holes"


def test_export_is_whole_or_absent(made: Made, tmp_path: Path) -> None:
    with pytest.raises(Conflict, match="exists already"):
        export(made.catalog, "task", made.layout)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(Conflict):
        export(made.catalog, "task", tmp_path / "link")
    with pytest.raises(NotFound):
        export(made.catalog, "task:7", tmp_path / "seven")
    left = tmp_path / ".new.aenv-part"
    (left / "blobs").mkdir(parents=True)
    (left / "half").write_text("of a killed one")
    (tmp_path / "new").mkdir()
    export(made.catalog, made.top.id, tmp_path / "new")
    assert not left.exists() and not (tmp_path / "new" / "half").exists()
    os.truncate(tmp_path / "one" / made.repository.blob_key(made.top.disk[2].digest), 1)
    with pytest.raises(CorruptData):
        export(made.catalog, "task", tmp_path / "broken")
    assert not (tmp_path / "broken").exists() and not list(tmp_path.glob(".*"))


def test_one_export_to_a_place_at_a_time(made: Made, tmp_path: Path) -> None:
    def second(done: int, total: int) -> None:
        with pytest.raises(Conflict, match="another export"):
            export(made.catalog, "task", tmp_path / "new")

    export(made.catalog, "task", tmp_path / "new", second)
    assert Other(tmp_path).take_in(tmp_path / "new") == made.top.id


def layer(made: Made, index: int = 0) -> Path:
    return made.blob(made.top.disk[index].digest)


def descriptor(document: dict[str, object], digest: str) -> dict[str, object]:
    layers: list[dict[str, object]] = document["layers"]  # type: ignore[assignment]
    (found,) = [one for one in layers if one["digest"] == digest]
    return found


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def without(made: Made, digest: str) -> None:
    def change(document: dict[str, object]) -> None:
        layers: list[dict[str, object]] = document["layers"]  # type: ignore[assignment]
        layers.remove(descriptor(document, digest))

    made.rewrite(change)


def larger(made: Made) -> None:
    """A manifest whose disk layer is larger than that blob is, consistently everywhere."""
    blob = Blob(digest=made.top.disk[2].digest, size_bytes=1 << 50)
    snapshot = made.top.model_copy(update={"disk": (*made.top.disk[:2], blob)})
    data = canonical_json(snapshot)
    made.blob(snapshot.id).write_bytes(data)

    def change(document: dict[str, object]) -> None:
        document["config"] = {"mediaType": SNAPSHOT_TYPE, "digest": f"sha256:{snapshot.id}", "size": len(data)}
        descriptor(document, blob.digest)["size"] = blob.size_bytes

    made.rewrite(change)


def index_with(made: Made, **fields: object) -> None:
    index = json.loads((made.layout / "index.json").read_bytes())
    index["manifests"][0] |= fields
    (made.layout / "index.json").write_text(json.dumps(index))


def elsewhere(made: Made) -> None:
    (made.layout / "blobs").rename(made.scratch / "moved")
    (made.layout / "blobs").symlink_to(made.scratch / "moved")


HOSTILE: dict[str, tuple[Callable[[Made], object], type[AenvError], str]] = {
    "truncated": (lambda made: os.truncate(layer(made), 2), CorruptData, "2 bytes instead of 4"),
    "grown": (lambda made: os.truncate(layer(made), 1 << 40), CorruptData, "instead of 4"),
    "altered": (lambda made: flip(layer(made)), CorruptData, "has the digest"),
    "missing": (lambda made: layer(made).unlink(), CorruptData, "No such file"),
    "a link": (
        lambda made: replaced(layer(made), lambda path: path.symlink_to("/etc/passwd")), CorruptData, "symbolic",
    ),
    "a fifo": (lambda made: replaced(layer(made), os.mkfifo), CorruptData, "no regular file"),
    "a directory": (lambda made: replaced(layer(made), Path.mkdir), CorruptData, "no regular file"),
    "a way out in a digest": (
        lambda made: made.rewrite(
            lambda document: descriptor(document, made.top.disk[0].digest).update(digest="sha256:../../../x")
        ),
        CorruptData, "layers.0.digest",
    ),
    "a layer that is not listed": (lambda made: without(made, made.top.disk[1].digest), CorruptData, "not list"),
    "an ancestor that is not listed": (
        lambda made: without(made, f"sha256:{made.top.parent}"), CorruptData, "lacks snapshot",
    ),
    "another size": (
        lambda made: made.rewrite(
            lambda document: descriptor(document, made.top.disk[0].digest).update(size=5)
        ),
        CorruptData, "does not list",
    ),
    "more than is allowed": (larger, TooLarge, "--max-size"),
    "an altered manifest": (lambda made: flip(made.blob(made.top.id)), CorruptData, "has the digest"),
    "an altered artifact": (lambda made: flip(made.artifact), CorruptData, "has the digest"),
    "a manifest that is none": (
        lambda made: made.rewrite(lambda document: document.update(config=document["layers"][0])),  # type: ignore[index]
        Unsupported, "no snapshot",
    ),
    "a container image": (
        lambda made: made.rewrite(lambda document: document.update(artifactType="application/x")),
        Unsupported, "no snapshot",
    ),
    "a huge index": (
        lambda made: os.truncate(made.layout / "index.json", 5 << 20), CorruptData, "more than",
    ),
    "a huge artifact": (lambda made: os.truncate(made.artifact, 1 << 40), CorruptData, "more than"),
    "a huge manifest": (lambda made: os.truncate(made.blob(made.top.id), 1 << 40), CorruptData, "more than"),
    "an index of nothing": (
        lambda made: (made.layout / "index.json").write_text('{"schemaVersion":2,"manifests":[]}'),
        Unsupported, "lists 0",
    ),
    "an index that is none": (
        lambda made: (made.layout / "index.json").write_text("[" * 100_000), CorruptData, "index.json",
    ),
    "a negative size": (lambda made: index_with(made, size=-1), CorruptData, "manifests.0.size"),
    "an unknown layout": (
        lambda made: (made.layout / "oci-layout").write_text('{"imageLayoutVersion":"2"}'), Unsupported, "2",
    ),
    "no layout": (lambda made: shutil.rmtree(made.layout / "blobs"), InvalidInput, "no OCI image layout"),
    "blobs elsewhere": (elsewhere, InvalidInput, "no OCI image layout",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_refused_by_name(made: Made, other: Other, case: str) -> None:
    change, kind, reason = HOSTILE[case]
    change(made)
    with pytest.raises(kind) as caught:
        other.take_in(made.layout)
    assert reason in str(caught.value) and caught.value.fix
    assert other.catalog.names() == () and check(other.repository, deep=True).ok
    assert not list(other.root.glob("scratch-*"))


def test_a_name_that_is_none_is_not_taken_over(made: Made, other: Other) -> None:
    index_with(made, annotations={"org.opencontainers.image.ref.name": "../../etc/x:1"})
    assert other.take_in(made.layout) == made.top.id
    assert other.catalog.names() == () and check(other.repository, deep=True).counts["snapshots"] == 3
    with pytest.raises(InvalidInput, match="--name"):
        other.take_in(made.layout, tags=(Tag("latest"),))
    with pytest.raises(InvalidInput, match="reads like"):
        other.take_in(made.layout, name=Name("deadbeefcafe"))


@pytest.mark.parametrize("when", ["before", "half", "after"])
def test_killed_at_every_operation_of_an_import(tmp_path: Path, when: str) -> None:
    made, counted = Made(tmp_path, hole_bytes=10), MemoryStore()
    Other(tmp_path, counted).take_in(made.layout)
    for at in range(1, counted.operations + 1):
        store = MemoryStore()
        other = Other(tmp_path, store)
        store.arm(Fault(at, when))  # type: ignore[arg-type]
        with suppress(Crash):  # an operation that finds nothing does not come to its end
            other.take_in(made.layout)
        store.restart()
        assert check(other.repository).ok
        for version in other.catalog.versions(NAME):
            assert other.catalog.resolve(f"{NAME}:{version}").snapshot_id == made.top.id
        assert other.take_in(made.layout) == made.top.id and other.catalog.versions(NAME) == (1,)
        assert check(other.repository, deep=True).ok


@pytest.mark.timeout(120)
def test_processes_killed_at_random_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = int(os.environ.get("AENV_TEST_SEED") or time.time_ns() % 10**9)
    print(f"AENV_TEST_SEED={seed}")
    source = random.Random(seed)
    one, two = tmp_path / "one", tmp_path / "two"
    catalog = Catalog(Repository(PosixStore(one / "repository")), by="x")
    top = commit(catalog.repository, tmp_path, *(source.randbytes(200_000) for _ in range(20)))
    catalog.publish(NAME, top.id)
    export_it = "from aenv_run.cli.command import run; run(['catalog', 'export', 'task', {0!r}])"
    import_it = "from aenv_run.cli.command import run; run(['catalog', 'import', {0!r}])"
    layout = tmp_path / "layout"
    for _ in range(3):
        killed(export_it.format(str(layout)), one, source.uniform(0.0, 0.15))
        if layout.exists():
            assert Other(tmp_path, MemoryStore()).take_in(layout) == top.id, f"seed {seed}"
            shutil.rmtree(layout)
    export(catalog, "task", layout)
    assert [path.name for path in tmp_path.glob(".*")] == []
    other = Catalog(Repository(PosixStore(two / "repository")))
    for _ in range(3):
        killed(import_it.format(str(layout)), two, source.uniform(0.0, 0.15))
        assert check(other.repository, deep=True).ok, f"seed {seed}"
        for version in other.versions(NAME):
            assert other.resolve(f"{NAME}:{version}").snapshot_id == top.id
    monkeypatch.setenv("AENV_HOME", str(two))
    assert run(["catalog", "import", str(layout)]) == 0
    assert other.versions(NAME) == (1,) and check(other.repository, deep=True).ok
    assert list((two / "staging").iterdir()) == []


def killed(code: str, home: Path, seconds: float) -> None:
    """Run it until it is killed, so long after it has begun to work."""
    begun = f"import aenv_run.cli.catalog; print(flush=True); {code}"
    with subprocess.Popen(
        [sys.executable, "-c", begun], env={**os.environ, "AENV_HOME": str(home)}, cwd=CHECKOUT,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        time.sleep(seconds)
        process.kill()


def test_commands(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AENV_HOME", str(tmp_path / "home"))

    def said(*argv: str, code: int = 0) -> str:
        assert run(["catalog", *argv]) == code
        return capsys.readouterr().out

    assert said("import", str(made.layout)) == "task:1\n"
    told = json.loads(said("import", str(made.layout), "--name", "copy", "--tag", "latest", "--json"))
    assert (told["name"], told["version"], told["snapshot_id"]) == ("copy", 1, made.top.id)
    said("import", str(tmp_path / "none"), code=64)
    said("import", str(tmp_path), code=64)
    said("import", str(made.layout), "--max-size", "x", code=64)
    assert said("export", "copy:latest", str(tmp_path / "out")).startswith("copy:1 -> ")
    told = json.loads(said("export", made.top.id[:12], str(tmp_path / "out2"), "--json"))
    assert told["reference"] is None and told["manifest_digest"] == made.exported.manifest_digest
    said("export", "copy", str(tmp_path / "out"), code=65)
    assert check(Repository(PosixStore(tmp_path / "home" / "repository")), deep=True).ok


def test_adopting_is_as_strict_as_committing(made: Made, tmp_path: Path) -> None:
    repository = Repository(MemoryStore())
    base = made.catalog.lineage(made.top.id)[-1]
    with pytest.raises(NotFound):
        repository.adopt(made.top, {})
    with pytest.raises(CorruptData, match="missing"):
        repository.adopt(base, {})
    wrong = tmp_path / "wrong"
    wrong.write_bytes(b"BASE")
    with pytest.raises(CorruptData, match="what is said to be"):
        repository.adopt(base, {Digest(base.disk[0].digest): wrong})
    assert list(repository.store.list("")) == [] and wrong.exists()
    assert isinstance(base, Snapshot)


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="needs skopeo, as a tool that knows OCI and not aenv")
def test_another_tool_copies_it(made: Made, other: Other) -> None:
    copied = other.root / "copied"
    command = ["skopeo", "--insecure-policy", "copy", f"oci:{made.layout}:task:1", f"oci:{copied}:task:1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert other.take_in(copied) == made.top.id and check(other.repository, deep=True).ok
