"""A repository that somebody else writes: whatever is in it, nothing outside it and the home is touched."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest

from aenv_run.cache import BlobCache
from aenv_run.catalog import Catalog, VersionRecord, version_key
from aenv_run.catalog.export import export
from aenv_run.catalog.records import now
from aenv_run.check import check
from aenv_run.digest import canonical_json
from aenv_run.errors import AenvError, CorruptData
from aenv_run.garbage.collect import Rules, collect
from aenv_run.garbage.repair import repair
from aenv_run.garbage.state import Gate, Timing
from aenv_run.minisign import SecretKey
from aenv_run.repository import Repository
from aenv_run.signatures import sign, signatures_of
from aenv_run.snapshot import Snapshot
from aenv_run.store.posix import PosixStore
from aenv_run.store.reserve import RESERVE
from aenv_run.store.s3 import S3Store
from aenv_run.types import Name, SnapshotId, Tag
from tests.bytes_half import commit
from tests.s3.server import Server
from tests.unit.node_site import Site, launch

NAME = Name("tiny")
#: A lock of a collector that says nothing is soon that of a dead one.
QUICK = Timing(ttl_s=0.2, settle_s=0.0, poll_s=0.01)
SECRET = b"not for guests\n"


class Outside:
    """Files beside repository and home, which nobody has any business with. Whoever reads one sets its atime."""

    def __init__(self, place: Path) -> None:
        self.place = place
        (place / "directory" / "ab").mkdir(parents=True)
        for path in (place / "secret", place / "directory" / "file", place / "directory" / "ab" / "file"):
            path.write_bytes(SECRET)
            os.utime(path, (1, 1_000_000_000))
        self.before = self._look()

    def _look(self) -> dict[str, tuple[object, ...]]:
        found = {str(path): path.lstat() for path in self.place.rglob("*")}
        return {
            name: (one.st_mode, one.st_ino, one.st_size, one.st_mtime_ns, one.st_nlink)
            + ((one.st_atime_ns,) if stat.S_ISREG(one.st_mode) else ())
            for name, one in found.items()
        }

    def untouched(self) -> None:
        assert self._look() == self.before


def test_reading_outside_would_be_noticed(tmp_path: Path) -> None:
    outside = Outside(tmp_path)
    (tmp_path / "secret").read_bytes()
    with pytest.raises(AssertionError):
        outside.untouched()


@dataclass(frozen=True)
class Hostile:
    """What the other writer can reach: the repository's directory. ``outside`` is what it wants."""

    root: Path
    snapshot: Snapshot
    outside: Path

    def blob(self) -> Path:
        return self.path(self.snapshot.disk[0].digest.hex)

    def path(self, hex: str, place: str = "blobs/sha256") -> Path:
        return self.root / place / hex[:2] / hex

    def put(self, make: Callable[[Path], object], *paths: Path) -> None:
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir() and not path.is_symlink():
                path.rename(path.with_name(path.name + ".aside"))
            else:
                path.unlink(missing_ok=True)
            make(path)

    def publish(self, manifest: bytes) -> None:
        """``tiny:1`` is whatever has these bytes, rightly named by their digest."""
        id = SnapshotId(hashlib.sha256(manifest).hexdigest())
        self.put(lambda path: path.write_bytes(manifest), self.path(id, "snapshots"))
        record = VersionRecord(snapshot_id=id, created_at=now())
        self.put(lambda path: path.write_bytes(canonical_json(record)), self.root / version_key(NAME, 1))

    def changed(self, change: Callable[[dict[str, object]], object]) -> bytes:
        value = json.loads(canonical_json(self.snapshot))
        change(value)
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def with_role(role: str) -> Callable[[Hostile], None]:
    def act(hostile: Hostile) -> None:
        def change(value: dict[str, object]) -> None:
            files: dict[str, object] = value["memory"]["files"]  # type: ignore[index, assignment]
            files[role] = files["ram"]

        hostile.publish(hostile.changed(change))

    return act


def link_to(target: str) -> Callable[[Hostile], Callable[[Path], None]]:
    return lambda hostile: lambda path: path.symlink_to(hostile.outside / target)


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def places(hostile: Hostile) -> list[Path]:
    """Objects of every kind that are read."""
    return [
        hostile.blob(), hostile.path(hostile.snapshot.id, "snapshots"), hostile.root / version_key(NAME, 1),
        hostile.root / "refs" / "tags" / NAME / "latest", hostile.root / "leases" / "gc",
        hostile.root / "signatures" / hostile.snapshot.id[:2] / hostile.snapshot.id / ("0" * 16),
        hostile.path(hostile.snapshot.disk[0].digest.hex, "packed/sha256"),
    ]  # fmt: skip


def folders(hostile: Hostile) -> list[Path]:
    """Directories of every kind that are walked or written to."""
    top = ("refs", "refs/names", "snapshots", "blobs/sha256", "signatures", "leases", "quarantine", "collected")
    return [*(hostile.root / name for name in (*top, ".tmp")), hostile.blob().parent]


CASES: Mapping[str, Callable[[Hostile], object]] = {
    "objects that are links to a file": lambda h: h.put(link_to("secret")(h), *places(h)),
    "objects that are links to a directory": lambda h: h.put(link_to("directory")(h), *places(h)),
    "objects that are FIFOs": lambda h: h.put(os.mkfifo, *places(h)),
    "objects that are directories": lambda h: h.put(Path.mkdir, *places(h)),
    "objects of a terabyte": lambda h: h.put(huge, *places(h)),
    "objects that are junk": lambda h: h.put(lambda path: path.write_bytes(b"\0junk\xff"), *places(h)),
    "objects that are deep": lambda h: h.put(lambda path: path.write_bytes(b"[" * 60_000), *places(h)),
    "a lock that is a link": lambda h: h.put(link_to("secret")(h), h.root / ".lock"),
    "a lock that is a FIFO": lambda h: h.put(os.mkfifo, h.root / ".lock"),
    "a manifest that is deep": lambda h: h.publish(b'{"a":' * 100_000),
    "a manifest of another thing": lambda h: h.publish(b'{"format":"aenv.snapshot/9"}'),
    "a role that leads out": with_role("../../../../outside/new"),
    "a role that is a path": with_role("/tmp/new"),
    "a role with a NUL": with_role("a\0b"),
    "a role that is no name": with_role(".."),
    "names that lead out": lambda h: h.put(
        lambda path: path.write_bytes(b"{}"), h.root / "refs" / "names" / "..." / "1", h.root / "refs" / "\n" / "x"
    ),
    "a parent that is itself": lambda h: h.publish(
        h.changed(lambda value: value.update(parent=str(h.snapshot.id)))
    ),
    "a parent that is not there": lambda h: h.publish(h.changed(lambda value: value.update(parent="0" * 64))),
}  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, *(f"folder {number}" for number in range(10))])
@pytest.mark.timeout(60)  # of a FIFO that is waited for
async def test_nothing_outside_is_read_or_written(site: Site, tmp_path: Path, case: str) -> None:
    outside = Outside(tmp_path / "outside")
    root = site.home.repository
    repository = Repository(PosixStore(root), Gate(PosixStore(root), QUICK))
    snapshot = repository.snapshot(site.tools.catalog.resolve("tiny").snapshot_id)
    hostile = Hostile(root, snapshot, outside.place)
    if case in CASES:
        CASES[case](hostile)
    else:
        folder = folders(hostile)[int(case.removeprefix("folder "))]
        hostile.put(link_to("directory")(hostile), folder)
    key = SecretKey.new()

    def sign_it() -> None:
        sign(repository.store, snapshot.id, canonical_json(snapshot), key)

    catalog = Catalog(repository)
    acts: list[Callable[[], object]] = [
        catalog.entries, lambda: catalog.resolve("tiny:latest"), lambda: check(repository, deep=True),
        lambda: list(signatures_of(repository.store, snapshot.id)), sign_it,
        lambda: catalog.promote(NAME, Tag("stable"), 1), lambda: catalog.label(NAME, 1, {"a": "b"}),
        lambda: commit(repository, tmp_path / "own", b"more"), lambda: export(catalog, "tiny:1", tmp_path / "out"),
        lambda: collect(repository, Rules(grace_s=0.0), dict), lambda: repair(repository),
        lambda: catalog.remove(NAME, 1), catalog.entries,
    ]  # fmt: skip
    with suppress(AenvError):
        node = site.node()
        await node.kill(await launch(node))
    for act in acts:
        with suppress(AenvError):
            act()
    outside.untouched()
    inside = (path for path in site.home.root.rglob("*") if path.is_file() and not path.is_symlink())
    assert not [path for path in inside if path.stat().st_size == len(SECRET) and path.read_bytes() == SECRET]


@pytest.mark.parametrize("role", ["../../x", "/tmp/x", "a/b", "a\0b", "..", "", "A", "x" * 65])
def test_a_role_of_memory_is_a_plain_name(site: Site, role: str) -> None:
    """Drivers make file names of roles: that of gVisor a link in the sandbox's directory for each."""
    repository = site.tools.repository
    snapshot = repository.snapshot(site.tools.catalog.resolve("tiny").snapshot_id)
    with_role(role)(Hostile(site.home.repository, snapshot, site.home.root))
    with pytest.raises(CorruptData, match="damaged"):
        repository.snapshot(site.tools.catalog.resolve("tiny:1").snapshot_id)


def test_a_blob_that_others_can_write_is_copied(tmp_path: Path) -> None:
    """Who keeps a file of a blob can write it when it was verified; so it does not become the cache's own."""
    if os.geteuid() != 0:
        pytest.skip("giving a file away needs root: run the tests as root")
    repository = Repository(PosixStore(tmp_path / "r"))
    first, second = commit(repository, tmp_path, b"first" * 99), commit(repository, tmp_path, b"second" * 99)
    files = [tmp_path / "r" / repository.blob_key(one.disk[0].digest) for one in (first, second)]
    os.chown(files[0], 12345, -1)
    files[1].chmod(0o664)
    cache = BlobCache(tmp_path / "cache", Repository(PosixStore(tmp_path / "r")))
    for file, one in zip(files, (first, second), strict=True):
        cached = cache.path(one.disk[0])
        assert not cached.samefile(file) and cached.stat().st_mode & 0o777 == 0o444
        file.write_bytes(b"other" * 99)
        assert cache.path(one.disk[0]).read_bytes() != file.read_bytes()


def test_a_repository_is_private_and_its_blobs_are_read_only(site: Site, tmp_path: Path) -> None:
    commit(Repository(PosixStore(site.home.repository)), tmp_path / "c", b"x")
    for path in (site.home.repository, *site.home.repository.rglob("*")):
        mode = path.lstat().st_mode
        if path.is_dir():
            assert stat.S_IMODE(mode) == 0o700, path
        elif path.name != ".lock" and path.parent.name != RESERVE:
            assert stat.S_IMODE(mode) == 0o444, path


def test_a_bucket_with_keys_that_lead_out(s3_server: Server, tmp_path: Path) -> None:
    store = S3Store(s3_server.place("hostile"), lock=tmp_path / "lock")
    repository = Repository(store, Gate(store, QUICK))
    catalog = Catalog(repository)
    base = commit(repository, tmp_path, b"base")
    catalog.publish(NAME, base.id)
    client = boto3.client("s3", endpoint_url=s3_server.endpoint, region_name="us-east-1")
    odd = ["../../x", "refs/names/../../x/1", "refs/names//1", "/etc/passwd", "blobs/sha256/ab/../../../x", " x"]
    for key in (*odd, "a" * 900, "refs/tags/tiny/../latest", f"signatures/{base.id[:2]}/{base.id}/../x"):
        client.put_object(Bucket=s3_server.bucket, Key=f"hostile/{key}", Body=b"{}")
    assert [entry.reference for entry in catalog.entries()] == ["tiny:1"]
    assert check(repository).problems
    with pytest.raises(CorruptData, match="has a name that no object has"):
        collect(repository, Rules(grace_s=0.0), dict)
    assert [entry.reference for entry in catalog.entries()] == ["tiny:1"]
    client.put_object(
        Bucket=s3_server.bucket, Key=f"hostile/{repository.blob_key(base.disk[0].digest)}", Body=b"abcd"
    )
    with pytest.raises(CorruptData):
        BlobCache(tmp_path / "cache", repository).path(base.disk[0])
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.name != "use.lock"]
