"""The node over a real repository and a pretended engine."""

from __future__ import annotations

import asyncio
import json
import stat

import pytest

from aenv_run.errors import (
    BootFailed,
    Conflict,
    InvalidInput,
    NoSpace,
    NotFound,
    RestoreIncompatible,
    SandboxDead,
    TimeOver,
    Unsupported,
)
from aenv_run.lifecycle import State
from aenv_run.node_wire import ForkEntry, ForkRequest, ForkStart, SnapshotRequest
from aenv_run.types import Name, Tag
from tests.unit.node_site import Site, fork, launch


async def test_create_restores_and_gives_an_identity_first(site: Site) -> None:
    node = site.node()
    sandbox = await launch(node, env={"B": "mine"}, metadata={"run": "7"})
    info, machine = node.info(sandbox), site.machine(sandbox)
    assert (info.state, info.origin, info.reference) == (State.RUNNING, "restored", "tiny:1")
    assert info.metadata == {"run": "7"} and info.address is not None
    assert machine.token == info.access_token and machine.restored_flag
    env = json.loads(machine.memory["env"])
    assert env["A"] == "image" and env["B"] == "mine" and env["E2B_SANDBOX_ID"] == sandbox.id
    assert machine.memory["seed"] == "yes" and machine.memory["hostname"] == sandbox.id
    await node.kill(sandbox)
    assert site.clean()


async def test_the_directory_is_private(site: Site) -> None:
    node = site.node()
    sandbox = await launch(node)
    root = sandbox.directory.root
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert stat.S_IMODE((root / "sandbox.json").stat().st_mode) == 0o600
    assert all(info.access_token is None for info in node.infos())
    await node.kill(sandbox)


async def test_unknown_snapshot_and_bad_environment_make_nothing(site: Site) -> None:
    node = site.node()
    with pytest.raises(NotFound, match="tiny"):
        await launch(node, snapshot="tinny")
    with pytest.raises(InvalidInput, match="A=B"):
        await launch(node, env={"A=B": "x"})
    assert site.clean()


async def test_incompatible_memory_is_refused_and_cold_boots(site: Site) -> None:
    site.engine.incompatible = True
    node = site.node()
    with pytest.raises(RestoreIncompatible) as caught:
        await launch(node)
    assert "--cold" in caught.value.fix and site.clean()
    sandbox = await launch(node, cold=True)
    assert node.info(sandbox).origin == "booted" and "seed" not in site.machine(sandbox).memory
    await node.kill(sandbox)


async def test_a_failed_or_cancelled_launch_leaves_nothing(site: Site) -> None:
    node = site.node()
    site.engine.fail_launches = {0}
    with pytest.raises(BootFailed):
        await launch(node)
    assert site.clean() and not node.infos()
    site.engine.boot_gate = asyncio.Event()
    task = asyncio.create_task(launch(node))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert site.clean() and not node.infos()


async def test_pause_and_resume_keep_memory_disk_id_and_token(site: Site) -> None:
    node = site.node()
    sandbox = await launch(node)
    token, old = sandbox.record.access_token, site.machine(sandbox)
    old.memory["counter"] = "41"
    paused = await node.pause(sandbox)
    assert paused.state is State.PAUSED and paused.address is None and paused.expires_at_s is None
    await sandbox.freed()
    assert not site.engine.machines and not sandbox.directory.capturing.exists()
    resumed = await node.resume(sandbox, timeout_s=60, cold=False)
    new = site.machine(sandbox)
    assert resumed.state is State.RUNNING and new.memory["counter"] == "41"
    assert new.token == token and new.endpoint != old.endpoint
    assert [path.name for path in site.engine.disks[-1]] == ["0000.qcow2", "0003.qcow2"]
    await node.kill(sandbox)


async def test_a_second_pause_is_a_conflict(site: Site) -> None:
    node = site.node()
    sandbox = await launch(node)
    results = await asyncio.gather(node.pause(sandbox), node.pause(sandbox), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["Conflict", "SandboxInfo"]
    await node.kill(sandbox)


async def test_a_failed_pause_leaves_the_sandbox_running(site: Site) -> None:
    node = site.node()
    sandbox = await launch(node)
    site.engine.fail_capture = NoSpace("the disk is full")
    with pytest.raises(NoSpace):
        await node.pause(sandbox)
    assert sandbox.state is State.RUNNING and site.machine(sandbox).token == sandbox.record.access_token
    site.engine.fail_capture = None
    await node.pause(sandbox)
    await node.kill(sandbox)


async def test_a_failed_resume_leaves_it_paused(site: Site) -> None:
    node = site.node()
    sandbox = await launch(node)
    await node.pause(sandbox)
    site.engine.fail_launches = {1}
    with pytest.raises(BootFailed):
        await node.resume(sandbox, timeout_s=60, cold=False)
    assert sandbox.state is State.PAUSED and not site.engine.machines
    await node.resume(sandbox, timeout_s=60, cold=False)
    await node.kill(sandbox)


async def test_fork_copies_memory_and_makes_own_identities(site: Site) -> None:
    node = site.node()
    parent = await launch(node)
    site.machine(parent).memory["x"] = "before"
    entries = await fork(node, parent, 3)
    children = [node.find(entry.sandbox.sandbox_id) for entry in entries if entry.sandbox]
    assert len(children) == 3 and parent.state is State.RUNNING
    everyone = [parent, *children]
    for field in ("access_token", "machine_id", "id"):
        assert len({getattr(sandbox.record, field) for sandbox in everyone}) == 4
    for child in children:
        assert site.machine(child).memory["x"] == "before"
        assert site.machine(child).memory["hostname"] == child.id
        assert child.record.parent == parent.id
    assert site.machine(parent).token == parent.record.access_token
    await node.kill(parent)  # its files go; the children's do not
    grandchild = (await fork(node, children[0], 1))[0].sandbox
    assert grandchild is not None
    await node.pause(children[1])
    await node.resume(children[1], timeout_s=60, cold=False)
    await node.kill_live()
    assert site.clean()


async def test_a_child_that_fails_is_an_entry_of_its_own(site: Site) -> None:
    node = site.node()
    parent = await launch(node)
    site.engine.fail_launches = {2}
    entries = await fork(node, parent, 3)
    failed = [entry.error for entry in entries if entry.error]
    assert [error.code for error in failed] == ["boot_failed"] and parent.state is State.RUNNING
    assert len(site.directories()) == 3
    await node.kill_live()
    assert site.clean()


async def test_a_name_that_reads_like_an_id_is_refused_before_anything_is_committed(site: Site) -> None:
    node = site.node()
    sandbox = await launch(node)
    before = list(site.tools.repository.ids())
    with pytest.raises(InvalidInput, match="reads like a snapshot id"):
        await node.snapshot(sandbox, SnapshotRequest(name=Name("deadbeefdead")))
    assert list(site.tools.repository.ids()) == before and sandbox.state is State.RUNNING


async def test_snapshots_of_a_resumed_fork_commit_every_layer_once_in_order(site: Site) -> None:
    node = site.node()
    parent = await launch(node)
    entry = (await fork(node, parent, 1))[0]
    assert entry.sandbox is not None
    child = node.find(entry.sandbox.sandbox_id)
    await node.pause(child)
    await node.resume(child, timeout_s=60, cold=False)
    first = await node.snapshot(child, SnapshotRequest(name=Name("mine"), tags=(Tag("latest"),)))
    second = await node.snapshot(child, SnapshotRequest(name=Name("mine"), memory=False))
    repository = site.tools.repository
    one, two = (repository.snapshot(reply.snapshot_id) for reply in (first, second))
    assert (first.version, second.version) == (1, 2)
    assert one.parent == child.record.snapshot_id and two.parent == one.id
    assert len(one.disk) == 4 and two.disk[:4] == one.disk and two.memory is None
    contents = []
    for blob in one.disk:
        with repository.open_blob(blob.digest) as reader:
            contents.append(reader.read().decode())
    # The child's pause and its snapshot each sealed a layer of the same bytes: one blob, twice in the chain.
    assert contents == [
        "base layer",
        f"layer of {parent.id} 0",
        f"layer of {child.id} 0",
        f"layer of {child.id} 0",
    ]
    again = await launch(node, snapshot="mine:1")
    assert len(again.record.disk) == 4
    await node.kill_live()


async def test_a_tag_without_a_name_is_refused_before_anything_stops(site: Site) -> None:
    node = site.node()
    sandbox = await launch(node)
    with pytest.raises(InvalidInput, match="name"):
        await node.snapshot(sandbox, SnapshotRequest(tags=(Tag("latest"),)))
    assert site.machine(sandbox).init_count == 1
    await node.kill(sandbox)


async def test_kill_interrupts_a_pause(site: Site) -> None:
    node = site.node()
    sandbox = await launch(node)
    site.engine.capture_gate = asyncio.Event()
    pausing = asyncio.create_task(node.pause(sandbox))
    await asyncio.sleep(0.05)
    assert sandbox.state is State.PAUSING
    await asyncio.wait_for(node.kill(sandbox), 5)
    with pytest.raises(NotFound, match="killed"):
        await pausing
    assert site.clean()


async def test_an_engine_that_ends_is_told_with_its_reason(site: Site) -> None:
    node = site.node()
    sandbox = await launch(node)
    site.machine(sandbox).end("killed by signal 9")
    async with asyncio.timeout(5):
        while sandbox.state is not State.DEAD:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
    with pytest.raises(SandboxDead, match="signal 9"):
        await node.pause(sandbox)
    with pytest.raises(SandboxDead):
        await node.set_timeout(sandbox, 60)
    assert node.counts().dead == 1
    await node.kill(sandbox)
    assert site.clean()


async def test_ttl_kills_or_pauses(site: Site) -> None:
    node = site.node()
    killed = await launch(node, timeout_s=0.05)
    paused = await launch(node, timeout_s=0.05, on_timeout="pause")
    lasting = await launch(node, timeout_s=300)
    await asyncio.sleep(0.1)
    await node.reap()
    await node.settled()
    next_s = await node.reap()
    assert [info.state for info in node.infos()] == [State.PAUSED, State.RUNNING]
    assert killed.id not in site.directories() and next_s is not None and 290 < next_s <= 300
    await node.set_timeout(lasting, 0.01)
    await asyncio.sleep(0.05)
    await node.reap()
    await node.settled()
    assert await node.reap() is None
    assert site.directories() == [paused.id]


async def test_a_pause_at_the_end_that_fails_throws_nothing_away(site: Site) -> None:
    node = site.node()
    sandbox = await launch(node, timeout_s=0.05, on_timeout="pause")
    site.engine.fail_capture = NoSpace("the disk is full")
    await asyncio.sleep(0.1)
    await node.reap()
    await node.settled()
    next_s = await node.reap()
    assert sandbox.state is State.RUNNING and next_s is not None and next_s > 30
    await node.kill(sandbox)


async def test_a_new_node_takes_over_what_the_old_one_left(site: Site) -> None:
    old = site.node()
    running, paused, lost, half = [await launch(old) for _ in range(4)]
    await old.pause(paused)
    site.machine(half).running = False  # killed in the middle of a pause: stopped, and its token forgotten
    site.machine(half).token = None
    lost_machine = site.machine(lost)
    await old.close()
    await lost_machine.kill()
    new = site.node()
    await new.reconcile()
    await new.settled()
    states = {info.sandbox_id: info.state for info in new.infos()}
    assert states == {
        running.id: State.RUNNING,
        paused.id: State.PAUSED,
        lost.id: State.DEAD,
        half.id: State.RUNNING,
    }
    again = new.find(half.id)
    assert site.machine(again).running and site.machine(again).token == half.record.access_token
    await new.resume(new.find(paused.id), timeout_s=60, cold=False)
    await new.kill_live()
    await new.kill(new.find(lost.id))
    assert site.clean()


async def test_reconcile_removes_the_half_made_and_nothing_else(site: Site) -> None:
    node = site.node()
    sandbox = await launch(node)
    record = sandbox.record.model_copy(update={"state": State.STARTING})
    sandbox.directory.write(record)
    await node.close()
    (site.home.sandboxes / "s-without-record").mkdir()
    broken = site.home.sandboxes / "sbrokenbrokenbroken1"
    broken.mkdir()
    (broken / "sandbox.json").write_text("{")
    new = site.node()
    await new.reconcile()
    await new.settled()
    assert site.directories() == [broken.name] and not site.engine.machines
    (info,) = new.infos()
    assert (info.sandbox_id, info.state) == (broken.name, State.DEAD) and "cannot be read" in info.reason
    with pytest.raises(SandboxDead, match="cannot be read"):
        await new.pause(new.find(broken.name))
    await new.kill(new.find("sbroken"))
    assert site.clean()


async def test_find_takes_unique_prefixes_only(site: Site) -> None:
    node = site.node()
    sandbox = await launch(node)
    assert node.find(sandbox.id[:6]) is sandbox
    for wrong in ("", "s", "zzzz", sandbox.id + "x"):
        with pytest.raises((NotFound, Conflict)):
            node.find(wrong)
    await node.kill(sandbox)


async def test_a_timeout_set_during_a_pause_does_not_undo_it(site: Site) -> None:
    node = site.node()
    sandbox = await launch(node)
    site.engine.capture_gate = asyncio.Event()
    pausing = asyncio.create_task(node.pause(sandbox))
    await asyncio.sleep(0.05)
    await node.set_timeout(sandbox, 60)  # at once: it does not wait for the pause
    site.engine.capture_gate.set()
    await pausing
    assert sandbox.directory.read().state is State.PAUSED and sandbox.record.expires_at_s is None
    with pytest.raises(Conflict, match="paused"):
        await node.set_timeout(sandbox, 60)
    await node.kill(sandbox)


@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.005, 0.01, 0.02])
async def test_a_fork_cancelled_at_any_time_leaves_the_parent_alone(site: Site, delay_s: float) -> None:
    node = site.node()
    parent = await launch(node)
    forking = asyncio.create_task(fork(node, parent, 8))
    await asyncio.sleep(delay_s)
    forking.cancel()
    await asyncio.gather(forking, return_exceptions=True)
    if forking.cancelled():
        assert site.directories() == [parent.id] and len(site.engine.machines) == 1
    assert parent.state is State.RUNNING and site.machine(parent).token == parent.record.access_token
    assert not parent.directory.capturing.exists()
    await node.kill_live()
    assert site.clean()


async def test_a_fork_gives_each_child_when_it_is_ready_and_takes_all_back(site: Site) -> None:
    node = site.node()
    parent = await launch(node)
    site.engine.hold_launches = {1, 3}
    lines = node.fork(parent, ForkRequest(count=3))
    async with asyncio.timeout(10):
        assert isinstance(await anext(lines), ForkStart)
        entry = await anext(lines)  # the others have not begun to answer
    assert isinstance(entry, ForkEntry) and entry.sandbox is not None and parent.state is State.RUNNING
    assert node.find(entry.sandbox.sandbox_id).state is State.RUNNING
    await lines.aclose()
    assert site.directories() == [parent.id] and len(site.engine.machines) == 1
    await node.kill(parent)
    assert site.clean()


async def test_max_seconds_count_while_there_is_a_machine(site: Site) -> None:
    node = site.node()
    sandbox = await launch(node, max_seconds=100)
    (entry,) = [entry async for entry in node.fork(sandbox, ForkRequest(count=1))][1:]
    await node.pause(sandbox)
    assert sandbox.record.time_over_at_s is None and 99 < (sandbox.record.seconds_left or 0) < 100
    await sandbox._update(seconds_left=0.05)
    await node.resume(sandbox, timeout_s=60, cold=False)
    await asyncio.sleep(0.06)
    await node.reap()
    await node.settled()
    assert (sandbox.state, sandbox.record.ended_by) == (State.DEAD, "time_over")
    with pytest.raises(TimeOver):
        await node.pause(sandbox)
    assert isinstance(entry, ForkEntry) and entry.sandbox is not None
    child = node.find(entry.sandbox.sandbox_id)
    assert child.state is State.RUNNING and child.record.seconds_left == 100
    for one in (sandbox, child):
        await node.kill(one)
    assert site.clean()


async def test_another_size_needs_a_cold_start(site: Site) -> None:
    node = site.node()
    with pytest.raises(InvalidInput, match="cpus"):
        await launch(node, cpus=2)
    with pytest.raises(InvalidInput, match="memory_mib"):
        await launch(node, cold=True, memory_mib=1)
    sandbox = await launch(node, cold=True, cpus=2)
    assert sandbox.record.machine.cpus == 2
    await node.kill(sandbox)


async def test_without_slots_nothing_is_promised(site: Site) -> None:
    node = site.node()
    for asked in ({"internet": True}, {"allow": ["example.org"]}, {"publish": [{"path": "/s", "port": 1}]}):
        with pytest.raises(Unsupported):
            await launch(node, **asked)
    with pytest.raises(InvalidInput):
        await launch(node, deny=["not a domain"])
    sandbox = await launch(node)
    assert not sandbox.record.policy.internet and node.info(sandbox).host_address is None
    await node.kill(sandbox)
    assert site.clean()
