"""The first boot of a snapshot without memory leaves an image; the second launch restores it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from aenv_run.cache_limit import GRACE_S, trim, usage
from aenv_run.capture import Capture
from aenv_run.catalog import Catalog
from aenv_run.config import first_boot_warms
from aenv_run.errors import InvalidInput
from aenv_run.node_core import Node
from aenv_run.node_wire import SnapshotRequest
from aenv_run.repository import Draft
from aenv_run.types import Architecture, MachineSpec, Name, SnapshotId
from aenv_run.warm_images import WarmImages
from tests.bytes_half import FACTS
from tests.unit.node_site import Site, launch


@pytest_asyncio.fixture
async def node(site: Site, tmp_path: Path) -> AsyncIterator[Node]:
    """One that keeps images, with the disk-only snapshot ``disk:1``."""
    directory = tmp_path / "disk-only"
    directory.mkdir()
    (directory / "base.qcow2").write_text("base of a disk")
    repository = site.tools.repository
    draft = Draft(architecture=Architecture("amd64"), machine=MachineSpec())
    snapshot = repository.commit(Capture(directory, (directory / "base.qcow2",)), draft)
    Catalog(repository).publish(Name("disk"), snapshot.id)
    made = Node(site.home, replace(site.tools, images=WarmImages(site.home.cache)))
    await made.reconcile()
    yield made
    await made.kill_live()
    await made.settled()
    await made.close()
    assert site.clean()


def images(site: Site) -> list[Path]:
    return sorted((site.home.cache / "warm").glob("*"))


async def test_the_second_launch_restores_what_the_first_left(node: Node, site: Site) -> None:
    first = await launch(node, snapshot="disk", env={"B": "of the first"})
    assert node.info(first).origin == "booted"
    await node.settled()
    (image,) = images(site)
    assert len(site.engine.machines) == 1  # the image's own machine has ended
    second = await launch(node, snapshot="disk")
    assert node.info(second).origin == "restored" and site.machine(second).restored_flag
    memory = site.machine(second).memory
    assert memory["hostname"] == second.id and "B" not in json.loads(memory["env"])
    layers = site.engine.disks[-1]
    assert [path.read_text()[:8] for path in layers] == ["base of ", "layer of"]
    await node.settled()
    assert images(site) == [image] and next(site.engine.launches) == 3
    reply = await node.snapshot(second, SnapshotRequest(name=Name("more")))  # it commits as any other
    third = await launch(node, snapshot=reply.snapshot_id)
    assert node.info(third).origin == "restored"


async def test_cold_and_another_size_boot(node: Node, site: Site) -> None:
    await launch(node, snapshot="disk")
    await node.settled()
    assert node.info(await launch(node, snapshot="disk", cold=True)).origin == "booted"
    assert node.info(await launch(node, snapshot="disk", memory_mib=1024)).origin == "booted"
    await node.settled()
    assert len(images(site)) == 1


async def test_without_the_switch_nothing_is_left(site: Site, node: Node) -> None:
    plain = site.node()
    await launch(plain, snapshot="disk")
    await plain.settled()
    assert images(site) == []
    await plain.kill_live()


async def test_an_image_that_cannot_be_restored_is_replaced(node: Node, site: Site) -> None:
    await launch(node, snapshot="disk")
    await node.settled()
    site.engine.fail_launches.add(2)
    again = await launch(node, snapshot="disk")
    assert node.info(again).origin == "booted"
    await node.settled()
    assert node.info(await launch(node, snapshot="disk")).origin == "restored"


@pytest.mark.parametrize("damage", ["no record", "bad record", "no file", "a name that leads out"])
async def test_a_damaged_image_is_none(node: Node, site: Site, damage: str) -> None:
    await launch(node, snapshot="disk")
    await node.settled()
    (image,) = images(site)
    record = image / "image.json"
    if damage == "no record":
        record.unlink()
    elif damage == "bad record":
        record.write_text("{")
    elif damage == "no file":
        next(image.glob("*.qcow2")).unlink()
    else:
        record.write_text(record.read_text().replace('"ram": "ram"', '"ram": "../../../etc/passwd"'))
    assert node.info(await launch(node, snapshot="disk")).origin == "booted"
    await node.settled()
    assert node.info(await launch(node, snapshot="disk")).origin == "restored"


def test_an_image_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = tmp_path / "capture"
    captured.mkdir()
    for name in ("disk.qcow2", "ram"):
        (captured / name).write_text(name)
        (captured / name).chmod(0o444)
    snapshot_id = SnapshotId("1" * 64)
    made = WarmImages(tmp_path / "cache")
    synced: list[tuple[str, bool]] = []
    sync = os.fsync

    def seen(descriptor: int) -> None:
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, made.has(snapshot_id, FACTS)))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", seen)
    capture = Capture(captured, (captured / "disk.qcow2",), {"ram": captured / "ram"}, FACTS)
    made.keep(snapshot_id, capture)
    wanted = [("disk.qcow2", False), ("ram", False), ("image.json", False), ("capture", False), ("warm", True)]
    assert synced[-5:] == wanted and ("cache", False) in synced
    assert made.has(snapshot_id, FACTS) and not captured.exists()


async def test_two_first_launches_at_once_leave_one(node: Node, site: Site) -> None:
    await asyncio.gather(*(launch(node, snapshot="disk") for _ in range(3)))
    await node.settled()
    assert len(images(site)) == 1


async def test_an_image_goes_when_the_cache_is_full_and_comes_again(node: Node, site: Site) -> None:
    sandbox = await launch(node, snapshot="disk")
    await node.settled()
    (image,) = images(site)
    assert usage(site.home.cache).warm_images == 1
    assert trim(site.home.cache, 0).left.warm_images == 1  # used just now
    then = time.time() - 2 * GRACE_S
    os.utime(image, (then, then))
    trim(site.home.cache, 0)
    assert images(site) == []
    await node.kill(sandbox)
    assert node.info(await launch(node, snapshot="disk")).origin == "booted"


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AENV_FIRST_BOOT_WARMS", raising=False)
    assert first_boot_warms()
    monkeypatch.setenv("AENV_FIRST_BOOT_WARMS", "off")
    assert not first_boot_warms()
    monkeypatch.setenv("AENV_FIRST_BOOT_WARMS", "no")
    with pytest.raises(InvalidInput, match="on or off"):
        first_boot_warms()
