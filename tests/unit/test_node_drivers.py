"""A node with one driver, sandboxes and snapshots of another."""

from __future__ import annotations

import pytest

from aenv_run.drivers.protocol import DriverName
from aenv_run.errors import RestoreIncompatible
from aenv_run.lifecycle import State
from tests.unit.node_site import Site, launch
from tests.unit.pretend_engine import PretendEngine


@pytest.fixture
def newer(site: Site) -> Site:
    """The home after gVisor was installed: what is there was made by QEMU."""
    return site.with_driver(PretendEngine(DriverName.GVISOR, first_port=30000), site.engine)


async def test_sandboxes_keep_their_driver(site: Site, newer: Site) -> None:
    old = site.node()
    running, paused = [await launch(old) for _ in range(2)]
    await old.pause(paused)
    await old.close()
    node = newer.node()
    await node.reconcile()
    await node.settled()
    assert {info.state for info in node.infos()} == {State.RUNNING, State.PAUSED}
    await node.resume(node.find(paused.id), timeout_s=60, cold=False)
    assert len(site.engine.machines) == 2 and not newer.engine.machines
    await node.pause(node.find(running.id))
    await node.resume(node.find(running.id), timeout_s=60, cold=True)
    assert len(site.engine.machines) == 2 and not newer.engine.machines
    await node.kill_live()
    assert site.clean() and newer.clean()


async def test_memory_of_another_driver_is_restored_with_it(site: Site, newer: Site) -> None:
    node = newer.node()
    sandbox = await launch(node)
    info = node.info(sandbox)
    assert (info.driver, info.mode, info.origin) == ("qemu", "tcg", "restored") and len(site.engine.machines) == 1
    cold = await launch(node, cold=True)
    assert node.info(cold).driver == "gvisor" and len(newer.engine.machines) == 1
    site.engine.usable = False
    with pytest.raises(RestoreIncompatible, match="qemu") as caught:
        await launch(node)
    assert "--cold" in caught.value.fix and len(site.directories()) == 2
    await node.pause(sandbox)
    with pytest.raises(RestoreIncompatible, match="qemu") as caught:
        await node.resume(sandbox, timeout_s=60, cold=False)
    assert "--cold" in caught.value.fix and sandbox.state is State.PAUSED
    info = await node.resume(sandbox, timeout_s=60, cold=True)
    assert (info.driver, info.origin, info.state) == ("gvisor", "booted", State.RUNNING)
    await node.kill_live()
    assert site.clean() and newer.clean()
