"""A lease that is damaged, put away or removed: nothing is collected, and its holder writes it again at once."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from aenv_run.check import check
from aenv_run.cli.command import run
from aenv_run.errors import AenvError, Conflict, CorruptData, NotFound, Unsupported
from aenv_run.garbage.holder import LOOK_S, TTL_S, Holder
from aenv_run.garbage.holders import drop_holder
from aenv_run.garbage.leases import HolderLease, holder_key, lease_bytes, mark_key, read_leases
from aenv_run.garbage.lost import lost_holds
from aenv_run.garbage.owner import Owner
from aenv_run.garbage.repair import Repaired, repair
from aenv_run.repository import Repository
from aenv_run.snapshot import Snapshot
from aenv_run.store.posix import PosixStore
from aenv_run.types import Name
from tests.bytes_half import commit
from tests.unit.node_site import Site, launch
from tests.unit.test_gc import ELSEWHERE, QUICK, World

ID = "ab" * 16
KEY = holder_key(ID)


@pytest.fixture
def world(tmp_path: Path) -> World:
    """With a snapshot that has a name."""
    world = World(tmp_path)
    world.catalog.publish(Name("env"), world.commit(b"named").id)
    return world


def holds(world: World) -> tuple[Snapshot, Holder]:
    """A node that holds a snapshot without a name."""
    held = world.commit(b"held")
    node = Holder.of_node(world.repository, "/var/aenv-x", ID)
    node.hold({held.id: ["sandbox s1"]})
    return held, node


def content(world: World) -> bytes:
    return world.store.read(KEY, limit_bytes=1 << 20)


def nothing(world: World) -> Repaired | None:
    return None


def cut(world: World) -> Repaired | None:
    world.store.damage(KEY, content(world)[:-30])
    return None


def flip(world: World) -> Repaired | None:
    """Another snapshot, a right lease otherwise."""
    data = json.loads(content(world))
    data["held"] = {("0" if id[0] != "0" else "1") + id[1:]: users for id, users in data["held"].items()}
    world.store.damage(KEY, json.dumps(data, separators=(",", ":"), sort_keys=True).encode())
    return None


def put_away(world: World) -> Repaired | None:
    cut(world)
    return repair(world.repository)


def remove(world: World) -> Repaired | None:
    world.store.delete(KEY)
    return None


def flip_format(world: World) -> Repaired | None:
    world.store.damage(KEY, content(world).replace(b"aenv.holder/", b"aenv.holdez/"))
    return None


def restore_older(world: World) -> Repaired | None:
    """As a copy of the bucket from before would."""
    lease = HolderLease(kind="node", owner=Owner.this(), home="/var/aenv-x")
    world.store.damage(KEY, lease_bytes(lease))
    return None


LOSSES: tuple[Callable[[World], Repaired | None], ...] = (cut, flip, flip_format, put_away, remove)


@pytest.mark.parametrize("lose", LOSSES, ids=lambda lose: lose.__name__)
def test_nothing_is_collected_until_the_holder_wrote_it_again(
    world: World, lose: Callable[[World], Repaired | None]
) -> None:
    held, node = holds(world)
    orphan = world.commit(b"orphan")
    lose(world)
    for dry_run in (True, False):
        with pytest.raises(CorruptData) as failed:
            world.gc(dry_run=dry_run, quarantine_older_s=0)
        assert failed.value.fix and "not known what is needed" in failed.value.message
    assert {held.id, orphan.id} <= world.ids()
    node.look()
    assert node.id == ID and not lost_holds(world.repository)
    done = world.gc(quarantine_older_s=0)
    assert held.id in world.ids() and orphan.id not in world.ids()
    assert [one.id for one in done.holders] == [ID]
    world.whole()
    node.drop()
    assert world.gc().snapshots == 1 and not list(world.store.list("leases/node/"))


@pytest.mark.parametrize("lose", [*LOSSES, restore_older], ids=lambda lose: lose.__name__)
@pytest.mark.parametrize("how", ["hold", "keep", "renew", "next node"])
def test_whatever_the_holder_does_writes_it_again(
    world: World, lose: Callable[[World], Repaired | None], how: str
) -> None:
    held, node = holds(world)
    more = world.commit(b"more")
    lose(world)
    users = {held.id: ["sandbox s1"], more.id: ["sandbox s2"]}
    if how == "hold":
        node.hold({more.id: ["sandbox s2"]})
    elif how == "keep":
        node.keep(users)
    elif how == "renew":
        node.renew()
    else:
        Holder.of_node(world.repository, "/var/aenv-x", ID).hold(users)
    (lease,) = read_leases(world.repository)
    assert lease.id == ID and held.id in lease.lease.held
    world.gc()
    assert held.id in world.ids()
    world.whole()


def test_what_is_held_already_is_looked_at_now_and_then(world: World) -> None:
    held, node = holds(world)
    now_s = QUICK.clock_s()
    world.repository.gate.timing = replace(QUICK, clock_s=lambda: now_s)
    node.hold({held.id: ["sandbox s2"]})
    before = world.store.operations
    node.hold({held.id: ["sandbox s2"]})
    assert world.store.operations == before
    remove(world)
    now_s += LOOK_S + 1
    node.hold({held.id: ["sandbox s2"]})
    assert [one.id for one in read_leases(world.repository)] == [ID]
    now_s += LOOK_S + 1
    before = world.store.operations
    node.look(older_than_s=LOOK_S)
    node.look(older_than_s=LOOK_S)
    assert world.store.operations == before + 1


def test_repair_names_whose_hold_is_lost(world: World) -> None:
    held, _ = holds(world)
    done = put_away(world)
    assert done is not None and done.report.ok
    (warned,) = done.report.warnings
    assert ID in warned.about and held.id.short in warned.detail and "/var/aenv-x" in warned.detail
    assert str(Owner.this()) in warned.detail and f"--drop-holder {ID[:8]}" in warned.fix
    assert any("/var/aenv-x" in step and "--drop-holder" in step for step in done.next_steps)
    assert check(world.repository).warnings == (warned,)


def test_a_lease_of_which_nothing_is_left_is_missed_all_the_same(world: World) -> None:
    holds(world)
    world.store.delete(mark_key(ID))
    world.store.damage(KEY, b"\x00" * 100)
    done = repair(world.repository)
    assert done.report.ok and "nothing is known" in done.report.warnings[0].detail
    with pytest.raises(CorruptData):
        world.gc()


@pytest.mark.parametrize("lose", LOSSES, ids=lambda lose: lose.__name__)
def test_an_administrator_drops_it_by_name(world: World, lose: Callable[[World], Repaired | None]) -> None:
    held, _ = holds(world)
    lose(world)
    if lose in (cut, flip, flip_format):  # it is there, and it is not known how long ago its holder was
        with pytest.raises(Conflict, match="may well run"):
            drop_holder(world.repository, ID[:8])
        world.store.age(KEY, TTL_S + 1)
    assert drop_holder(world.repository, ID[:8], dry_run=True).id == ID
    with pytest.raises(CorruptData):
        world.gc()
    assert drop_holder(world.repository, ID[:8]).id == ID
    assert world.gc().snapshots == 1 and held.id not in world.ids()
    world.whole()
    with pytest.raises(NotFound):
        drop_holder(world.repository, ID[:8])


@pytest.mark.parametrize("kind", ["node", "build"])
def test_one_elsewhere_that_gave_a_sign_of_late_needs_force(world: World, kind: str) -> None:
    held = world.commit(b"held")
    lease = HolderLease.model_validate(
        {"kind": kind, "owner": ELSEWHERE, "held": {held.id: ("x",)}, "since_s": 4_000_000_000}
    )
    world.store.put_new(KEY, lease_bytes(lease))
    for age_s in (0.0, TTL_S - 5):
        world.store.age(KEY, age_s)
        with pytest.raises(Conflict, match="was renewed") as failed:
            drop_holder(world.repository, ID)
        assert "--force" in failed.value.fix
        with pytest.raises(Conflict):
            drop_holder(world.repository, ID, dry_run=True)
    world.store.age(KEY, TTL_S + 5)
    assert drop_holder(world.repository, ID, dry_run=True).snapshots == 1
    world.store.age(KEY, 0)
    assert drop_holder(world.repository, ID, force=True).snapshots == 1
    assert world.gc().snapshots == 1


def test_one_whose_process_ended_here_is_dropped_at_once(world: World) -> None:
    dead = Owner.this().model_copy(update={"start_ticks": 1})
    world.store.put_new(KEY, lease_bytes(HolderLease(kind="node", owner=dead)))
    assert drop_holder(world.repository, ID).id == ID


def test_a_build_that_ends_leaves_nothing_to_miss(world: World) -> None:
    build = Holder.of_build(world.repository, "/h")
    build.renew()
    world.store.damage(holder_key(build.id), b"{")
    repair(world.repository)
    with pytest.raises(CorruptData):
        world.gc()
    build.drop()
    world.gc()
    world.whole()
    assert not check(world.repository).warnings


def test_a_node_without_anything_left_leaves_nothing_to_miss(world: World) -> None:
    held, _ = holds(world)
    put_away(world)
    after = Holder.of_node(world.repository, "/var/aenv-x", ID)
    after.keep({})
    after.drop()
    assert world.gc().snapshots == 1 and held.id not in world.ids()


def test_a_lease_of_before_is_read_and_one_of_a_newer_format_stays(world: World) -> None:
    held = world.commit(b"held")
    old = HolderLease(format="aenv.holder/1", kind="node", owner=ELSEWHERE, held={held.id: ("s",)})
    data = json.loads(lease_bytes(old))
    del data["sum"]
    world.store.put_new(KEY, json.dumps(data).encode())
    assert world.gc().snapshots == 0 and world.ids() >= {held.id}
    newer = json.dumps({**data, "format": "aenv.holder/3"}).encode()
    world.store.damage(KEY, newer)
    with pytest.raises(Unsupported):
        world.gc()
    assert not repair(world.repository).moved
    with pytest.raises(Unsupported):
        Holder.of_node(world.repository, "/var/aenv-x", ID)
    assert content(world) == newer


def test_any_altered_byte_is_seen(world: World) -> None:
    """Never another lease, never taken for whole: refused, or written over with all that is held."""
    held, node = holds(world)
    whole = content(world)
    chance = random.Random(1)
    for at in chance.sample(range(len(whole)), 60):
        world.store.damage(KEY, whole[:at] + bytes([whole[at] ^ (1 << chance.randrange(8))]) + whole[at + 1 :])
        with pytest.raises(AenvError):
            world.gc()
    node.look()
    world.gc()
    assert held.id in world.ids()


async def test_a_node_sees_that_its_lease_was_put_away(site: Site) -> None:
    """At its next launch, and when the next node of the home begins."""
    node = site.node()
    await node.reconcile()
    sandbox = await launch(node)
    await node.pause(sandbox)
    await node.close()
    repository = site.tools.repository
    (lease,) = read_leases(repository)
    path = site.home.repository / holder_key(lease.id)
    path.chmod(0o644)
    path.write_bytes(b"{")
    repository.gate.timing = QUICK
    assert repair(repository).report.ok and not list(read_leases(repository))
    assert [one.id for one in lost_holds(repository)] == [lease.id]
    node = site.node()
    await node.reconcile()
    await launch(node)
    (again,) = read_leases(repository)
    assert again.id == lease.id and sandbox.record.snapshot_id in again.lease.held
    for one in list(node.infos()):
        await node.kill(node.find(one.sandbox_id))
    await node.close()
    assert not lost_holds(repository) and not list(repository.store.list("leases/holder/"))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("AENV_HOME", str(tmp_path))
    repository = Repository(PosixStore(tmp_path / "repository"))
    held = commit(repository, tmp_path, b"held")
    Holder.of_node(repository, "/elsewhere", ID).hold({held.id: ["sandbox s1"]})
    path = tmp_path / "repository" / KEY
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-9])
    assert run(["check", "--repair"]) == 0
    said = capsys.readouterr().out
    assert "/elsewhere" in said and held.id.short in said and f"--drop-holder {ID[:8]}" in said
    assert run(["check"]) == 0
    assert "/elsewhere" in capsys.readouterr().err
    assert run(["gc", "--grace", "0s", "--allow-no-refs"]) == 74
    assert f"--drop-holder {ID[:8]}" in capsys.readouterr().err
    assert run(["gc", "--drop-holder", ID[:8], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == ID
    assert run(["gc", "--grace", "0s", "--allow-no-refs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["snapshots"] == 1
