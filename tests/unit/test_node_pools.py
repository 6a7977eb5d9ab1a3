"""Warm pools over a real repository and a pretended engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from pydantic import ValidationError

from aenv_run.errors import BootFailed, HookFailed, InvalidInput, NotFound, Unsupported
from aenv_run.hooks import Hook
from aenv_run.lifecycle import State
from aenv_run.node_core import Node
from aenv_run.node_wire import PoolInfo, PoolRequest, PoolsFile, ResetRequest, SnapshotRequest
from aenv_run.types import Name
from tests.unit.node_site import Site, launch, until


@pytest_asyncio.fixture
async def node(site: Site) -> AsyncIterator[Node]:
    """One that is ended with the test, and leaves nothing."""
    made = site.node()
    await made.reconcile()
    yield made
    await made.kill_live()
    await made.close()
    assert site.clean()


def the_pool(node: Node) -> PoolInfo:
    (info,) = node.pools.infos()
    return info


async def filled(node: Node, count: int) -> None:
    await until(lambda: the_pool(node).ready == count)


async def test_a_launch_takes_a_machine_that_stands_ready_and_gives_it_its_identity(
    node: Node, site: Site
) -> None:
    info = await node.set_pool(PoolRequest(snapshot="tiny", low=2, high=2))
    assert (info.reference, info.ready, info.high) == ("tiny:1", 0, 2)
    await filled(node, 2)
    ready = dict(site.engine.machines)
    assert all(not machine.running and machine.init_count == 0 for machine in ready.values())
    assert node.infos() == [] and node.counts().live == 0  # nobody was given one
    sandbox = await launch(node, env={"B": "mine"}, metadata={"run": "7"}, max_seconds=60)
    machine, shown = site.machine(sandbox), node.info(sandbox)
    assert machine in ready.values() and machine.running and machine.init_count == 1 and machine.restored_flag
    assert machine.memory["hostname"] == sandbox.id and json.loads(machine.memory["env"])["B"] == "mine"
    assert (shown.state, shown.origin, shown.metadata) == (State.RUNNING, "restored", {"run": "7"})
    assert shown.reference == "tiny:1" and shown.time_over_at_s is not None
    assert sandbox.directory.read().state is State.RUNNING
    await filled(node, 2)
    assert (the_pool(node).taken, the_pool(node).missed) == (1, 0)
    await node.pause(sandbox)  # it is a sandbox as any other
    await node.resume(sandbox, timeout_s=60, cold=False)
    await node.kill(sandbox)


async def test_filling_begins_below_the_low_mark_and_goes_on_to_the_high_one(node: Node, site: Site) -> None:
    await node.set_pool(PoolRequest(snapshot="tiny", low=1, high=3))
    await filled(node, 3)
    started = next(site.engine.launches)
    one, two = await launch(node), await launch(node)
    assert the_pool(node).ready == 1 and next(site.engine.launches) == started + 1
    three = await launch(node)
    await filled(node, 3)
    for sandbox in (one, two, three):
        await node.kill(sandbox)


async def test_hooks_run_when_a_machine_that_stands_ready_is_given_out(node: Node, site: Site) -> None:
    seed = await launch(node)
    hook = Hook.of("reseed")
    reply = await node.snapshot(seed, SnapshotRequest(name=Name("hooked"), on_restore=(hook,), on_fork=(hook,)))
    await node.kill(seed)
    await node.set_pool(PoolRequest(snapshot=reply.snapshot_id, low=1, high=1))
    await filled(node, 1)
    (ready,) = site.engine.machines.values()
    assert not ready.ran
    sandbox = await launch(node, snapshot="hooked")
    assert site.machine(sandbox) is ready
    assert [(one.env["AENV_HOOK"], one.hostname) for one in ready.ran] == [("on_restore", sandbox.id)]
    await filled(node, 1)
    without = await launch(node, snapshot="hooked", hooks=False)
    assert not site.machine(without).ran and the_pool(node).taken == 1
    site.engine.outcomes["reseed"] = 1
    with pytest.raises(HookFailed):
        await launch(node, snapshot="hooked")
    for one in (sandbox, without):
        await node.kill(one)


async def test_what_differs_from_the_snapshot_is_launched(node: Node, site: Site) -> None:
    await node.set_pool(PoolRequest(snapshot="tiny", low=1, high=1))
    await filled(node, 1)
    cold = await launch(node, cold=True)
    larger = await launch(node, cold=True, memory_mib=1024)
    assert the_pool(node).taken == 0 and the_pool(node).ready == 1
    for sandbox in (cold, larger):
        await node.kill(sandbox)


async def test_a_machine_that_ends_in_the_pool_is_replaced(node: Node, site: Site) -> None:
    await node.set_pool(PoolRequest(snapshot="tiny", low=1, high=1))
    await filled(node, 1)
    (machine,) = site.engine.machines.values()
    machine.end("killed by the host")
    await until(lambda: machine.directory.exists() is False)
    await filled(node, 1)
    assert machine not in site.engine.machines.values()


async def test_one_that_is_no_good_does_not_fail_the_launch(node: Node, site: Site) -> None:
    await node.set_pool(PoolRequest(snapshot="tiny", low=1, high=1))
    await filled(node, 1)
    (machine,) = site.engine.machines.values()
    machine.dead.set()  # before anybody has seen it
    sandbox = await launch(node)
    assert node.info(sandbox).state is State.RUNNING and site.machine(sandbox) is not machine
    await node.kill(sandbox)


async def test_what_cannot_be_warmed_up_is_told_and_tried_again(node: Node, site: Site) -> None:
    site.engine.fail_launches = {0, 1}
    await node.set_pool(PoolRequest(snapshot="tiny", low=1, high=1))
    await until(lambda: "did not boot" in the_pool(node).problem)
    await filled(node, 1)  # seconds later
    assert the_pool(node).problem == ""


async def test_pools_outlive_the_node_and_their_machines_do_not(site: Site) -> None:
    first = site.node()
    await first.reconcile()
    await first.set_pool(PoolRequest(snapshot="tiny", low=1, high=2))
    await filled(first, 2)
    await first.close()
    assert site.clean()
    second = site.node()
    await second.reconcile()
    await filled(second, 2)
    for task in asyncio.all_tasks():  # as by kill -9: nothing is tidied up
        if task.get_name().startswith(("fill the pools", "watch warm")):
            task.cancel()
    third = site.node()
    await third.reconcile()
    await third.settled()
    await filled(third, 2)
    assert len(site.engine.machines) == 2
    await third.remove_pool("tiny:1")
    assert site.clean() and third.pools.infos() == []
    fourth = site.node()
    await fourth.reconcile()
    assert not fourth.pools.any
    for node in (third, fourth):
        await node.close()


async def test_smaller_and_gone(node: Node, site: Site) -> None:
    await node.set_pool(PoolRequest(snapshot="tiny", low=3, high=3))
    await filled(node, 3)
    assert (await node.set_pool(PoolRequest(snapshot="tiny", low=1, high=1))).ready == 1
    assert len(site.engine.machines) == 1
    await node.remove_pool("tiny")
    assert site.clean()
    with pytest.raises(NotFound, match="no pool"):
        await node.remove_pool("tiny")


async def test_refusals(node: Node) -> None:
    with pytest.raises(InvalidInput, match="above high"):
        await node.set_pool(PoolRequest(snapshot="tiny", low=3, high=2))
    with pytest.raises(ValidationError):
        PoolRequest(snapshot="tiny", low=0, high=2)
    with pytest.raises(NotFound):
        await node.set_pool(PoolRequest(snapshot="nonesuch"))
    sandbox = await launch(node)
    await node.snapshot(sandbox, SnapshotRequest(name=Name("disk"), memory=False))
    with pytest.raises(Unsupported, match="no memory"):
        await node.set_pool(PoolRequest(snapshot="disk"))
    await node.kill(sandbox)


@pytest.mark.parametrize("pooled", [False, True])
async def test_reset_begins_again_with_the_same_settings(node: Node, site: Site, pooled: bool) -> None:
    if pooled:
        await node.set_pool(PoolRequest(snapshot="tiny", low=1, high=1))
        await filled(node, 1)
    before = await launch(node, env={"B": "mine"}, metadata={"run": "7"}, max_seconds=60, on_timeout="pause")
    site.machine(before).memory["dirt"] = "of the episode"
    if pooled:
        await filled(node, 1)
    info = await node.reset(before, ResetRequest(timeout_s=100))
    after = node.find(info.sandbox_id)
    await node.settled()
    assert info.sandbox_id != before.id and [one.sandbox_id for one in node.infos()] == [after.id]
    memory = site.machine(after).memory
    assert "dirt" not in memory and json.loads(memory["env"])["B"] == "mine"
    assert (info.metadata, info.max_seconds, info.on_timeout) == ({"run": "7"}, 60, "pause")
    if pooled:
        await filled(node, 1)
        assert the_pool(node).taken == 2
        await node.remove_pool("tiny")
    await node.kill(after)


async def test_reset_keeps_the_size_the_cold_start_and_the_name(node: Node, site: Site) -> None:
    before = await launch(node, cold=True, memory_mib=1024, cpus=2, hooks=False)
    info = await node.reset(before, ResetRequest(timeout_s=100))
    await node.settled()
    record = node.find(info.sandbox_id).record
    assert (record.machine.memory_mib, record.machine.cpus, record.cold) == (1024, 2, True)
    assert not record.with_hooks and info.origin == "booted" and info.reference == "tiny:1"


async def test_a_reset_that_fails_or_is_cancelled_changes_nothing(node: Node, site: Site) -> None:
    before = await launch(node)
    site.engine.fail_launches.add(1)
    with pytest.raises(BootFailed):
        await node.reset(before, ResetRequest(timeout_s=100))
    site.engine.hold_launches.add(2)
    resetting = asyncio.create_task(node.reset(before, ResetRequest(timeout_s=100)))
    await until(lambda: len(site.directories()) == 2)
    resetting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resetting
    await node.settled()
    assert [one.sandbox_id for one in node.infos()] == [before.id] and len(site.engine.machines) == 1
    assert node.info(before).state is State.RUNNING


async def test_changes_at_once_all_count(node: Node, site: Site) -> None:
    await asyncio.gather(*(node.set_pool(PoolRequest(snapshot="tiny", low=1, high=1 + n)) for n in range(5)))
    kept = PoolsFile.model_validate_json(site.home.pools.read_bytes()).pools
    assert len(kept) == 1 and kept[0].high == the_pool(node).high
    await filled(node, kept[0].high)


async def test_what_cannot_be_written_down_has_not_happened(node: Node, site: Site) -> None:
    await node.set_pool(PoolRequest(snapshot="tiny", low=1, high=2))
    await filled(node, 2)
    blocker = site.home.pools.with_name(f"{site.home.pools.name}.tmp")
    blocker.mkdir()  # in the place of the temporary file
    with pytest.raises(OSError):
        await node.set_pool(PoolRequest(snapshot="tiny", low=1, high=3))
    with pytest.raises(OSError):
        await node.remove_pool("tiny")
    assert (the_pool(node).high, the_pool(node).ready) == (2, 2)
    blocker.rmdir()
    await node.remove_pool("tiny")
    assert site.clean()


async def test_a_pool_is_found_when_its_name_is_gone(node: Node, site: Site) -> None:
    await node.set_pool(PoolRequest(snapshot="tiny", low=1, high=1))
    await filled(node, 1)
    site.tools.catalog.remove(Name("tiny"))
    await node.remove_pool("tiny:1")
    assert site.clean()


async def test_a_larger_pool_is_filled_at_once(node: Node) -> None:
    await node.set_pool(PoolRequest(snapshot="tiny", low=1, high=1))
    await filled(node, 1)
    await node.set_pool(PoolRequest(snapshot="tiny", low=1, high=3))
    await filled(node, 3)


async def test_a_node_that_ends_while_a_machine_waits_for_its_turn_leaves_nothing(site: Site) -> None:
    node = Node(site.home, replace(site.tools, starts=asyncio.Semaphore(1)))
    await node.reconcile()
    site.engine.hold_launches.add(0)
    busy = asyncio.create_task(launch(node))
    await until(lambda: len(site.directories()) == 1)
    await node.set_pool(PoolRequest(snapshot="tiny", low=1, high=1))
    await until(lambda: len(site.directories()) == 2)
    await node.close()
    assert len(site.directories()) == 1
    busy.cancel()
    with pytest.raises(asyncio.CancelledError):
        await busy
    assert site.clean()
