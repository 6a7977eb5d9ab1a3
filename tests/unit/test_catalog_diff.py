"""What two snapshots differ in, read from real disks without a mount."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import pytest_asyncio

from aenv_run import disk
from aenv_run.cache import BlobCache
from aenv_run.capture import Capture
from aenv_run.catalog import Catalog
from aenv_run.check import check
from aenv_run.cli.command import run
from aenv_run.errors import CorruptData, InvalidInput
from aenv_run.hooks import Hook, Hooks
from aenv_run.repository import Draft, Repository
from aenv_run.snapshot import Snapshot
from aenv_run.snapshot_diff import Difference, FactChange, FileChange, PackageChange, compare, fact_changes
from aenv_run.store.posix import PosixStore
from aenv_run.types import Architecture, Context, MachineSpec, Name
from tests.bytes_half import capture, draft

DISK_MIB = 64
ODD = b"odd-\xff\x1b[31m\n"


def write(root: Path, path: str, data: bytes = b"", mode: int = 0o644) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    target.chmod(mode)


def both(root: Path) -> None:
    write(root, "etc/same", b"same")
    write(root, "big", b"b" * (3 << 20))
    with (root / "sparse").open("wb") as file:
        file.seek(2 << 20)
        file.write(b"end")
    (root / "link").symlink_to("etc/same")
    write(root, "usr/lib/python3/dist-packages/six-1.16.0.dist-info/METADATA")


def before(root: Path) -> None:
    both(root)
    write(root, "etc/mode")
    write(root, "etc/content", b"one")
    write(root, "gone/away", b"x" * 10)
    write(root, "becomes-directory")
    (root / "target").symlink_to("a")
    write(root, "filled", b"")
    os.truncate(root / "filled", 1 << 20)
    status = (
        "Package: git\nStatus: install ok installed\nVersion: 1:2.39\n\n"
        "Package: vim\nStatus: install ok installed\nVersion: 9\nDescription: x\n Version: no\n\n"
        "Package: libc6\nStatus: install ok installed\nArchitecture: amd64\nMulti-Arch: same\nVersion: 2\n\n"
        "Package: libc6\nStatus: install ok installed\nArchitecture: i386\nMulti-Arch: same\nVersion: 2\n\n"
        "Package: old\nStatus: deinstall ok config-files\nVersion: 3\n"
    )
    write(root, "var/lib/dpkg/status", status.encode())
    write(root, "usr/lib/python3/site-packages/Some_Thing-1.0-py3.11.egg-info")


def after(root: Path) -> None:
    both(root)
    write(root, "etc/mode", mode=0o4755)
    write(root, "etc/content", b"two")
    write(root, "becomes-directory/inside")
    (root / "target").symlink_to("b")
    write(root, "filled", bytes(1 << 20))
    write(root, "var/lib/dpkg/status", b"Package: git\nStatus: install ok installed\nVersion: 1:2.40\n")
    write(root, "usr/lib/python3/site-packages/some_thing-2.0.dist-info/METADATA")
    (root / os.fsdecode(ODD)).write_bytes(b"12")
    if os.geteuid() == 0:
        os.chown(root / "etc" / "same", 7, 8)


class Made:
    """Two snapshots of one layer each, and a third with an empty layer above the first."""

    def __init__(self, home: Path, images: dict[str, Path]) -> None:
        self.home = home
        self.repository = Repository(PosixStore(home / "repository"))
        self.catalog = Catalog(self.repository, by="x")
        self.cache = BlobCache(home / "cache", self.repository)
        self.images = images
        self.a = self.commit(images["before"])
        self.b = self.commit(images["after"])
        empty = home / "empty.qcow2"
        disk.write_overlay(empty, DISK_MIB << 20)
        self.c = self.commit(empty, below=self.a)

    def commit(self, image: Path, *, below: Snapshot | None = None, disk_mib: int = DISK_MIB) -> Snapshot:
        own = self.home / f"capture-{len(list(self.repository.ids()))}"
        own.mkdir()
        shutil.copy(image, own / "layer.qcow2")
        made = Draft(
            parent=below.id if below else None, architecture=Architecture("amd64"),
            machine=MachineSpec(disk_mib=disk_mib), disk_below=below.disk if below else (),
        )  # fmt: skip
        return self.repository.commit(Capture(own, (own / "layer.qcow2",)), made)

    async def compare(self, a: Snapshot, b: Snapshot, limit: int = 100) -> Difference:
        scratch = self.home / "scratch"
        scratch.mkdir()
        try:
            return await compare(a, b, self.cache, scratch, limit=limit)
        finally:
            shutil.rmtree(scratch)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("images")
    made = {}
    for fill in (before, after):
        tree = place / fill.__name__
        tree.mkdir()
        fill(tree)
        made[fill.__name__] = place / f"{fill.__name__}.qcow2"
        await disk.make_image(tree, DISK_MIB, made[fill.__name__])
    return made


@pytest.fixture
def made(tmp_path: Path, images: dict[str, Path]) -> Made:
    return Made(tmp_path, images)


async def test_files_and_packages(made: Made) -> None:
    found = await made.compare(made.a, made.b)
    assert found.files is not None
    owned = [FileChange(path="/etc/same", what=("owner",), size_bytes_before=4, size_bytes_after=4)]
    assert [change for change in found.files.changed if change.what != ("mode",) or "etc" in change.path] == [
        FileChange(path="/becomes-directory", what=("kind",), size_bytes_before=0, size_bytes_after=4096),
        FileChange(path="/etc/content", what=("content",), size_bytes_before=3, size_bytes_after=3),
        FileChange(path="/etc/mode", what=("mode",), size_bytes_before=0, size_bytes_after=0),
        *(owned if os.geteuid() == 0 else []),
        FileChange(path="/target", what=("target",), size_bytes_before=1, size_bytes_after=1),
        *[change for change in found.files.changed if "dpkg" in change.path],
    ]
    prefix = "/usr/lib/python3/site-packages/"
    assert [change.path for change in found.files.added] == [
        "/becomes-directory/inside",
        "/odd-\\xff\x1b[31m\n",
        f"{prefix}some_thing-2.0.dist-info",
        f"{prefix}some_thing-2.0.dist-info/METADATA",
    ]
    assert [(change.path, change.size_bytes_before) for change in found.files.removed] == [
        ("/gone", 4096),
        ("/gone/away", 10),
        (f"{prefix}Some_Thing-1.0-py3.11.egg-info", 0),
    ]
    assert found.packages == (
        PackageChange(manager="dpkg", name="git", before="1:2.39", after="1:2.40"),
        PackageChange(manager="dpkg", name="libc6:amd64", before="2", after=None),
        PackageChange(manager="dpkg", name="libc6:i386", before="2", after=None),
        PackageChange(manager="dpkg", name="vim", before="9", after=None),
        PackageChange(manager="python", name="some-thing", before="1.0", after="2.0"),
    )


async def test_lists_are_bounded_and_counted(made: Made) -> None:
    found = await made.compare(made.a, made.b, limit=1)
    whole = await made.compare(made.a, made.b)
    assert found.files is not None and whole.files is not None
    assert found.files.added == whole.files.added[:1] and found.files.added_count == len(whole.files.added) == 4
    assert found.files.changed == whole.files.changed[:1]
    assert found.files.changed_count == len(whole.files.changed) and found.files.removed_count == 3


async def test_a_layer_of_nothing_changes_no_file(made: Made) -> None:
    found = await made.compare(made.a, made.c)
    assert found.files is not None and found.packages == ()
    assert (found.files.added_count, found.files.removed_count, found.files.changed_count) == (0, 0, 0)
    assert [change.fact for change in found.facts] == ["layers", "size_bytes"]
    same = await made.compare(made.a, made.a)
    assert same.facts == () and same.files is not None and same.files.changed_count == 0


def garbage(image: Path) -> None:
    image.write_bytes(b"not a disk" * 1000)


def external(image: Path) -> None:
    """A header that says that the data is in another file of the host."""
    data = bytearray(image.read_bytes())
    data[72:80] = struct.pack(">Q", 1 << 2)
    image.write_bytes(data)


def damaged(image: Path) -> None:
    """Its superblock, wherever it is in the image, names no file system any more."""
    data = image.read_bytes()
    magic = data.index(b"\x53\xef", 1 << 16)
    image.write_bytes(data[:magic] + b"XX" + data[magic + 2 :])


@pytest.mark.parametrize("change", [garbage, external, damaged])
async def test_a_disk_that_is_none_is_refused(made: Made, tmp_path: Path, change: Callable[[Path], None]) -> None:
    image = tmp_path / "hostile.qcow2"
    shutil.copy(made.images["after"], image)
    change(image)
    with pytest.raises(CorruptData) as caught:
        await made.compare(made.a, made.commit(image))
    assert "disk" in caught.value.message


async def test_a_disk_of_another_size_is_refused(made: Made) -> None:
    with pytest.raises(InvalidInput, match="64 MiB"):
        await made.compare(made.a, made.commit(made.images["after"], disk_mib=128))


def test_facts(tmp_path: Path) -> None:
    repository = Repository(PosixStore(tmp_path / "store"))
    one = repository.commit(capture(tmp_path, b"x"), draft(None, None, suite="a", both="1"))
    hooks = Hooks(on_restore=(Hook.of("true"),))
    other = draft(None, None, suite="b", both="1").model_copy(
        update={
            "context": Context(env={"A": "1"}, user="app"),
            "machine": MachineSpec(cpus=2),
            "hooks": hooks,
        }
    )
    two = repository.commit(capture(tmp_path, b"x", ram=b"r"), other)
    changes = {change.fact: (change.before, change.after) for change in fact_changes(one, two)}
    assert changes["env A"] == (None, "1") and changes["cpus"] == ("1", "2") and changes["memory"] == ("no", "yes")
    assert (
        changes["label suite"] == ("a", "b") and "label both" not in changes and changes["user"] == ("root", "app")
    )
    assert changes["memory driver"] == (None, "qemu") and "true" in (changes["on_restore"][1] or "")
    assert FactChange(fact="cpus", before="2", after="1") in fact_changes(two, one)
    assert fact_changes(one, one) == ()


def test_commands(made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("AENV_HOME", str(made.home))
    for snapshot in (made.a, made.b):
        made.catalog.publish(Name("task"), snapshot.id)

    def said(*argv: str) -> str:
        assert run(["catalog", "diff", *argv]) == 0
        return capsys.readouterr().out

    shown = said("task:1", "task:2", "--limit", "3")
    assert "files added: 4" in shown and "and 1 more; --limit shows them" in shown and "\x1b" not in shown
    assert "/odd-\\xff\ufffd[31m\ufffd" in said("task:1", "task:2") and "dpkg git" in shown
    told = json.loads(said("task:1", "task:2", "--json"))
    assert told["files"]["removed_count"] == 3 and told["before"] == made.a.id
    assert json.loads(said("task:1", "task:2", "--no-files", "--json"))["files"] is None
    assert said("task:1", "task:1") == "no difference\n"
    assert list((made.home / "staging").iterdir()) == [] and check(made.repository, deep=True).ok
