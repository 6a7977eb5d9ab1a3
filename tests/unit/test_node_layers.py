"""Memory in layers as the node keeps it: what stays below, what is shared, and layers that become too many."""

from __future__ import annotations

import asyncio

import pytest

from aenv_run.errors import NoSpace, NotFound
from aenv_run.lifecycle import State
from aenv_run.node_core import Node
from aenv_run.node_wire import SnapshotRequest
from aenv_run.sandbox import HostedSandbox
from aenv_run.types import Name
from tests.unit.node_site import Site, fork, launch, until


def roles(sandbox: HostedSandbox) -> list[str]:
    assert sandbox.record.memory is not None
    return sorted(sandbox.record.memory.files)


def layers(count: int) -> list[str]:
    return sorted(["ram", "device_state", *(f"ram.{number}" for number in range(1, count + 1))])


def inode(sandbox: HostedSandbox, role: str) -> int:
    assert sandbox.record.memory is not None
    return (sandbox.directory.root / sandbox.record.memory.files[role]).stat().st_ino


def kept_files(sandbox: HostedSandbox) -> set[str]:
    root = sandbox.directory.root
    return {f"{name}/{path.name}" for name in ("disk", "memory") for path in (root / name).iterdir()}


async def sleep_and_wake(site: Site, node: Node, sandbox: HostedSandbox, number: int) -> None:
    """A key in memory, a pause, a resume: all keys must be there."""
    site.machine(sandbox).memory[f"key{number}"] = str(number)
    await node.pause(sandbox)
    await node.resume(sandbox, timeout_s=60, cold=False)
    found = site.machine(sandbox).memory
    assert {key: found[key] for key in ("seed", *(f"key{one}" for one in range(number + 1)))} == {
        "seed": "yes", **{f"key{one}": str(one) for one in range(number + 1)}
    }  # fmt: skip


async def deepen(site: Site, node: Node, sandbox: HostedSandbox, count: int) -> None:
    """Pauses until it has ``count`` layers, the last one still paused."""
    for number in range(count - 1):
        await sleep_and_wake(site, node, sandbox, number)
    site.machine(sandbox).memory["last"] = "yes"
    await node.pause(sandbox)


async def test_each_pause_adds_a_layer_above_the_same_base(site: Site) -> None:
    node = site.node()
    sandbox = await launch(node)
    base = inode(sandbox, "ram")
    for number in range(3):
        await sleep_and_wake(site, node, sandbox, number)
        assert roles(sandbox) == layers(number + 1)
        assert inode(sandbox, "ram") == base
        assert kept_files(sandbox) >= sandbox.record.files()
    await node.kill(sandbox)
    assert site.clean()


async def test_children_have_their_parents_base_and_a_layer_of_their_own(site: Site) -> None:
    node = site.node()
    parent = await launch(node)
    site.machine(parent).memory["warm"] = "yes"
    entries = await fork(node, parent, 3)
    children = [node.find(entry.sandbox.sandbox_id) for entry in entries if entry.sandbox]
    assert {inode(one, "ram") for one in (parent, *children)} == {inode(parent, "ram")}
    assert len({inode(one, "ram.1") for one in children}) == 1
    assert roles(parent) == layers(0)
    for child in children:
        assert roles(child) == layers(1)
        assert site.machine(child).memory["warm"] == "yes"


async def test_many_layers_of_a_paused_sandbox_become_one(site: Site) -> None:
    site.engine.deep = 2
    node = site.node()
    sandbox = await launch(node)
    base = inode(sandbox, "ram")
    await deepen(site, node, sandbox, 3)
    await until(lambda: roles(sandbox) == layers(1))
    await until(lambda: kept_files(sandbox) == sandbox.record.files())
    assert inode(sandbox, "ram") == base
    assert sandbox.directory.read() == sandbox.record
    assert not sandbox.directory.merging.exists()
    await node.resume(sandbox, timeout_s=60, cold=False)
    memory = site.machine(sandbox).memory
    assert (memory["seed"], memory["key0"], memory["key1"], memory["last"]) == ("yes", "0", "1", "yes")


@pytest.mark.parametrize("ends", ["resume", "kill", "close", "failure"])
async def test_a_merge_that_does_not_end_leaves_the_files_of_before(site: Site, ends: str) -> None:
    site.engine.deep, site.engine.merge_gate = 2, asyncio.Event()
    node = site.node()
    sandbox = await launch(node)
    await deepen(site, node, sandbox, 3)
    await until(sandbox.directory.merging.exists)
    if ends == "failure":
        site.engine.fail_merge = NoSpace("the disk is full")
        site.engine.merge_gate.set()
        await until(lambda: not sandbox.directory.merging.exists())
    elif ends == "kill":
        await node.kill(sandbox)
        assert site.clean()
        with pytest.raises(NotFound):
            node.find(sandbox.id)
        return
    elif ends == "close":
        await sandbox.close()
    assert sandbox.directory.read() == sandbox.record
    assert roles(sandbox) == layers(3)
    await node.resume(sandbox, timeout_s=60, cold=False)
    assert not sandbox.directory.merging.exists()
    assert site.machine(sandbox).memory["last"] == "yes"
    await node.kill(sandbox)


async def test_what_a_killed_node_left_of_a_merge_is_removed(site: Site) -> None:
    site.engine.deep, site.engine.merge_gate = 2, asyncio.Event()
    first = site.node()
    sandbox = await launch(first)
    await deepen(site, first, sandbox, 3)
    await until(sandbox.directory.merging.exists)
    (sandbox.directory.root / "memory" / "9999").write_text("linked, not yet recorded")
    site.engine.merge_gate = None
    node = site.node()
    await node.reconcile()
    again = node.find(sandbox.id)
    await again.settled()
    assert again.state is State.PAUSED
    assert kept_files(again) == again.record.files()
    assert not again.directory.merging.exists()
    await node.resume(again, timeout_s=60, cold=False)
    assert site.machine(again).memory["last"] == "yes"
    await sandbox.close()


async def test_a_line_of_forks_never_gets_too_deep(site: Site) -> None:
    site.engine.too_deep = 2
    node = site.node()
    sandbox = await launch(node)
    for number in range(5):
        site.machine(sandbox).memory[f"key{number}"] = str(number)
        (entry,) = await fork(node, sandbox, 1)
        assert entry.sandbox is not None
        child = node.find(entry.sandbox.sandbox_id)
        assert inode(child, "ram") == inode(sandbox, "ram")
        sandbox = child
        assert len(roles(sandbox)) <= 2 + 2
    memory = site.machine(sandbox).memory
    assert [memory[f"key{number}"] for number in range(5)] == ["0", "1", "2", "3", "4"]


async def test_a_merge_that_fails_in_a_fork_fails_the_fork_and_nothing_else(site: Site) -> None:
    site.engine.too_deep, site.engine.fail_merge = 1, NoSpace("the disk is full")
    node = site.node()
    parent = await launch(node)
    (entry,) = await fork(node, parent, 1)
    assert entry.sandbox is not None
    child = node.find(entry.sandbox.sandbox_id)
    with pytest.raises(NoSpace):
        await fork(node, child, 1)
    assert child.state is State.RUNNING
    assert not child.directory.capturing.exists()
    site.engine.fail_merge = None
    assert (await fork(node, child, 1))[0].sandbox is not None


async def test_a_snapshot_stores_each_layer_once(site: Site) -> None:
    node = site.node()
    sandbox = await launch(node)
    repository = site.tools.repository
    seed = repository.snapshot(sandbox.record.snapshot_id)
    assert seed.memory is not None and sandbox.record.memory is not None
    assert sandbox.record.memory.blobs == seed.memory.files
    await sleep_and_wake(site, node, sandbox, 0)
    assert sandbox.record.memory.blobs == {"ram": seed.memory.files["ram"]}
    site.machine(sandbox).memory["warm"] = "yes"
    reply = await node.snapshot(sandbox, SnapshotRequest(name=Name("mine")))
    stored = repository.snapshot(reply.snapshot_id)
    assert stored.memory is not None
    assert sorted(stored.memory.files) == layers(2)
    assert stored.memory.files["ram"] == seed.memory.files["ram"]
    assert roles(sandbox) == layers(1)
    below = {role: stored.memory.files[role] for role in ("ram", "ram.1")}
    assert sandbox.record.memory.blobs == below
    again = await node.snapshot(sandbox, SnapshotRequest(name=Name("mine")))
    second = repository.snapshot(again.snapshot_id)
    assert second.memory is not None
    assert {role: second.memory.files[role] for role in below} == below
    launched = await launch(node, snapshot="mine:1")
    memory = site.machine(launched).memory
    assert (memory["seed"], memory["key0"], memory["warm"]) == ("yes", "0", "yes")
