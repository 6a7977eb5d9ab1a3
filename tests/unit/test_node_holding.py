"""What sandboxes use is held against garbage collection by anybody, also while no node runs."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from aenv_run.cache import BlobCache
from aenv_run.catalog import Catalog
from aenv_run.config import open_repository
from aenv_run.errors import AenvError, NoSpace, NotFound, StoreUnavailable, Unauthenticated, Unsupported
from aenv_run.garbage.collect import Collected, Rules, collect
from aenv_run.garbage.leases import read_leases
from aenv_run.garbage.state import Gate, Timing
from aenv_run.garbage.unheld import UNHELD_VARIABLE
from aenv_run.node_core import Node
from aenv_run.paths import Home
from aenv_run.repository import Repository
from aenv_run.store import StoreKey
from aenv_run.store.posix import PosixStore
from aenv_run.types import Name, SnapshotId
from tests.unit.node_site import Site, fork, launch, until


def elsewhere(site: Site) -> Collected:
    """``aenv gc --grace 0s`` of a home that knows nothing of this one."""
    store = PosixStore(site.home.repository)
    return collect(Repository(store, Gate(store, Timing(settle_s=0))), Rules(grace_s=0), dict)


def held(site: Site) -> set[SnapshotId]:
    return {id for found in read_leases(site.tools.repository) for id in found.lease.held}


async def begun(site: Site) -> Node:
    node = site.node()
    await node.reconcile()
    return node


async def test_live_and_paused_sandboxes_hold_what_they_stand_on(site: Site) -> None:
    snapshot_id = site.tools.catalog.resolve("tiny").snapshot_id
    node = await begun(site)
    live, paused = await launch(node), await launch(node)
    await node.pause(paused)
    site.tools.catalog.remove(Name("tiny"))
    done = elsewhere(site)
    assert [one.snapshot_id for one in done.kept] == [snapshot_id]
    assert any(live.id in who or paused.id in who or "starts" in who for who in done.kept[0].held_by)
    await node.resume(paused, timeout_s=60, cold=False)
    assert all(entry.sandbox is not None for entry in await fork(node, live, 2))
    for sandbox in list(node.infos()):
        await node.kill(node.find(sandbox.sandbox_id))
    await until(lambda: snapshot_id not in held(site))
    assert elsewhere(site).snapshots == 1
    with pytest.raises(NotFound):
        site.tools.repository.snapshot(snapshot_id)
    await node.close()
    assert not list(read_leases(site.tools.repository))


async def test_a_paused_sandbox_holds_while_no_node_runs(site: Site) -> None:
    node = await begun(site)
    sandbox = await launch(node)
    await node.pause(sandbox)
    await node.close()
    site.tools.catalog.remove(Name("tiny"))
    done = elsewhere(site)
    assert done.snapshots == 0 and sandbox.id in done.kept[0].held_by[0]
    node = await begun(site)
    await node.resume(node.find(sandbox.id), timeout_s=60, cold=False)
    assert elsewhere(site).snapshots == 0
    await node.kill(node.find(sandbox.id))
    await node.close()
    assert elsewhere(site).snapshots == 1


async def test_what_a_killed_node_left_is_held_until_the_next_one_looks(site: Site) -> None:
    node = await begun(site)
    await launch(node)
    site.tools.catalog.remove(Name("tiny"))
    assert elsewhere(site).snapshots == 0  # as it is after kill -9: nothing was said
    for machine in list(site.engine.machines.values()):
        machine.end("the host went down")
    after = await begun(site)
    await after.settled()
    for sandbox in list(after.infos()):
        await after.kill(after.find(sandbox.sandbox_id))
    await after.close()
    assert elsewhere(site).snapshots == 1
    await node.close()


async def test_the_newest_snapshot_of_a_sandbox_is_held_too(site: Site) -> None:
    from aenv_run.node_wire import SnapshotRequest

    node = await begun(site)
    sandbox = await launch(node)
    reply = await node.snapshot(sandbox, SnapshotRequest())
    await until(lambda: reply.snapshot_id in held(site))
    assert elsewhere(site).snapshots == 0
    await node.kill(sandbox)
    await until(lambda: reply.snapshot_id not in held(site))
    assert elsewhere(site).snapshots == 1
    await node.close()


async def test_a_second_launch_of_a_snapshot_writes_no_lease(site: Site) -> None:
    node = await begun(site)
    await launch(node)
    (before,) = read_leases(site.tools.repository)
    await launch(node)
    (after,) = read_leases(site.tools.repository)
    assert after.lease.beat - before.lease.beat <= 1  # at most the one that names the sandboxes
    for sandbox in list(node.infos()):
        await node.kill(node.find(sandbox.sandbox_id))
    await node.close()


class Refusing(PosixStore):
    """Leases of holders cannot be written."""

    def __init__(self, root: Path, error: AenvError) -> None:
        super().__init__(root)
        self.error: AenvError | None = error
        self.allowed: Repository

    def swap(self, key: StoreKey, data: bytes, *, expected: bytes | None) -> bool:
        if key.startswith("leases/holder/") and self.error is not None:
            raise self.error
        return super().swap(key, data, expected=expected)


def refusing(site: Site, error: AenvError) -> tuple[Site, Refusing]:
    store = Refusing(site.home.repository, error)
    repository = store.allowed = Repository(store)
    tools = replace(
        site.tools,
        repository=repository,
        catalog=Catalog(repository),
        cache=BlobCache(site.home.cache, repository),
    )
    return replace(site, tools=tools), store


@pytest.mark.parametrize("error", [StoreUnavailable("503 of leases"), NoSpace("no space: leases")])
async def test_what_cannot_be_held_now_is_not_launched(site: Site, error: AenvError) -> None:
    site, store = refusing(site, error)
    node = await begun(site)
    with pytest.raises(type(error), match="cannot be held"):
        await launch(node)
    assert not node.infos()
    store.error = None
    sandbox = await launch(node)
    assert node.info(sandbox).warnings == () and held(site)
    await node.kill(sandbox)
    await node.close()


FOR_GOOD = [Unauthenticated("403 of leases"), Unsupported("read only"), PermissionError(errno.EACCES, "leases")]


@pytest.mark.parametrize("error", FOR_GOOD, ids=lambda error: type(error).__name__)
async def test_what_can_never_be_held_is_launched_only_if_the_operator_says_so(
    site: Site, error: AenvError | PermissionError
) -> None:
    if isinstance(error, PermissionError):
        denied = StoreUnavailable("writing leases: permission denied")
        denied.__cause__ = error
        error = denied
    site, store = refusing(site, error)
    node = await begun(site)
    with pytest.raises(type(error), match="cannot be held") as failed:
        await launch(node)
    assert f"{UNHELD_VARIABLE}=on" in failed.value.fix and not node.infos()
    store.allowed.allow_unheld = True
    sandbox = await launch(node)
    (warning,) = node.info(sandbox).warnings
    assert warning.code == error.code and "cannot be held" in warning.message
    store.error = StoreUnavailable("503 of leases")  # not for good: that is waited for
    await node.kill(sandbox)
    with pytest.raises(StoreUnavailable, match="cannot be held"):
        await launch(node)
    await node.close()


@pytest.mark.parametrize("value, allowed", [("on", True), ("off", False), ("", False)])
def test_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, allowed: bool) -> None:
    monkeypatch.setenv(UNHELD_VARIABLE, value)
    assert open_repository(str(tmp_path), Home(tmp_path)).allow_unheld is allowed
