"""The ends of sandboxes: one by one, bounded, and whatever their guests do."""

from __future__ import annotations

import asyncio
import time

import pytest

from aenv_run.errors import AenvError, NoSpace, SandboxDead, StoreUnavailable
from aenv_run.lifecycle import State
from aenv_run.node_reaper import Limits
from tests.unit.node_site import Site, launch, until

SOON = Limits(prepare_s=0.2, attempts=3, retry_s=0.1)


async def test_a_guest_that_does_not_answer_delays_no_other(site: Site) -> None:
    node = site.node(Limits(prepare_s=600))
    deaf = await launch(node, timeout_s=0.05, on_timeout="pause")
    other = await launch(node, timeout_s=0.05)
    site.engine.deaf.add(deaf.directory.machine)
    await asyncio.sleep(0.06)
    async with asyncio.timeout(5):
        assert await node.reap() is None
        await until(lambda: other.id not in site.directories())
        late = await launch(node, timeout_s=0.01)
        await asyncio.sleep(0.02)
        await node.reap()
        await until(lambda: late.id not in site.directories())
    assert deaf.state is State.PAUSING
    await node.kill(deaf)
    await node.settled()
    assert site.clean()


async def test_a_guest_cannot_outlive_its_time_by_not_answering(site: Site) -> None:
    node = site.node(SOON)
    deaf = await launch(node, timeout_s=0.05, on_timeout="pause")
    site.engine.deaf.add(deaf.directory.machine)
    await asyncio.sleep(0.06)
    await node.reap()
    async with asyncio.timeout(5):
        await node.settled()
    assert deaf.state is State.DEAD and not site.engine.machines
    with pytest.raises(SandboxDead, match=r"could not be paused.*does not answer"):
        await node.pause(deaf)
    assert (node.infos()[0].expires_at_s or 0) > time.time() + 60  # long enough to be asked why


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (NoSpace("full"), 3),
        (StoreUnavailable("passing"), 3),
        (OSError(28, "No space left on device"), 3),
        (AenvError("anything"), 1),
        (RuntimeError("a bug"), 1),
    ],
)
async def test_a_pause_at_the_end_is_tried_again_a_few_times_for_passing_reasons(
    site: Site, error: Exception, attempts: int
) -> None:
    node = site.node(SOON)
    sandbox = await launch(node, timeout_s=0.05, on_timeout="pause")
    site.engine.fail_capture = error
    await asyncio.sleep(0.06)
    for number in range(1, attempts + 1):
        assert sandbox.state is State.RUNNING, number
        await node.reap()
        await node.settled()
        await asyncio.sleep(0.11)
    assert sandbox.state is State.DEAD and "could not be paused" in sandbox.record.reason
    await node.kill(sandbox)
    assert site.clean()


async def test_a_stopped_guest_delays_no_start_of_a_node(site: Site) -> None:
    old = site.node()
    deaf, other, killed = [await launch(old) for _ in range(3)]
    await old.close()
    site.engine.deaf |= {deaf.directory.machine, killed.directory.machine}
    new = site.node()
    async with asyncio.timeout(5):
        await new.reconcile()
        assert {info.state for info in new.infos()} == {State.RUNNING}
        await new.pause(new.find(other.id))
        await new.kill(new.find(killed.id))  # waits for nothing
        pausing = asyncio.create_task(new.pause(new.find(deaf.id)))
        done, _ = await asyncio.wait({pausing}, timeout=0.1)
        assert not done  # calls on that one wait
        site.engine.deaf.clear()
        await new.kill(new.find(deaf.id))
        await asyncio.gather(pausing, return_exceptions=True)
        await new.kill(new.find(other.id))
    await new.close()
    assert site.clean()


async def test_an_engine_without_a_readable_record_is_ended(site: Site) -> None:
    old = site.node()
    lost, damaged, half = [await launch(old) for _ in range(3)]
    await old.close()
    site.engine.no_attach.add(lost.directory.machine)
    record = damaged.directory.root / "sandbox.json"
    record.write_bytes(record.read_bytes()[:100])
    (half.directory.root / "sandbox.json").unlink()
    new = site.node()
    await new.reconcile()
    await new.settled()
    assert not site.engine.machines
    reasons = {info.sandbox_id: (info.state, info.reason) for info in new.infos()}
    assert reasons.keys() == {lost.id, damaged.id} and half.id not in site.directories()
    assert all(state is State.DEAD for state, _ in reasons.values())
    assert "machine.json" in reasons[lost.id][1] and "cannot be read" in reasons[damaged.id][1]
    for info in new.infos():
        await new.kill(new.find(info.sandbox_id))
    assert site.clean()


async def test_a_death_is_told_also_when_it_cannot_be_written(site: Site) -> None:
    node = site.node()
    sandbox = await launch(node)
    (sandbox.directory.root / "sandbox.json.tmp").mkdir()
    site.machine(sandbox).end("killed by signal 9")
    await until(lambda: sandbox.state is State.DEAD)
    with pytest.raises(SandboxDead, match="signal 9"):
        await node.pause(sandbox)
    await node.kill(sandbox)
    assert site.clean()
