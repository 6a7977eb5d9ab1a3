"""Hooks: what a snapshot may say, how they travel, when they run and what a failure leaves."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from pydantic import ValidationError

from aenv_build.language.recipe import Output
from aenv_run.digest import canonical_json
from aenv_run.errors import BootFailed, HookFailed, InvalidInput, NotFound
from aenv_run.hooks import MAX_CHARACTERS, MAX_HOOKS, MAX_WORDS, Hook, Hooks
from aenv_run.lifecycle import State
from aenv_run.node_core import Node
from aenv_run.node_wire import SnapshotRequest
from aenv_run.sandbox import HostedSandbox
from aenv_run.snapshot import Blob, MemoryPart, Snapshot
from aenv_run.types import Architecture, Digest, MachineSpec, Name
from tests.bytes_half import FACTS
from tests.style.source import ROOT
from tests.unit.node_site import Site, fork, launch, until

BLOB = Blob(digest=Digest("sha256:" + "1" * 64), size_bytes=1)
MEMORY = MemoryPart(files={"ram": BLOB}, facts=FACTS)
RESEED, SPLIT = Hook.of("reseed"), Hook.of(["/bin/split", "now"], user="app")
HOOKS = Hooks(on_restore=(RESEED,), on_fork=(SPLIT,))
FLUSH = Hook.of("flush")


def manifest(hooks: Hooks | None = None, memory: MemoryPart | None = MEMORY) -> Snapshot:
    architecture = Architecture("amd64")
    return Snapshot(architecture=architecture, machine=MachineSpec(), disk=(BLOB,), memory=memory, hooks=hooks)


# -- the value -----------------------------------------------------------------------------------------------


def test_only_a_snapshot_with_hooks_is_of_the_new_format() -> None:
    plain, hooked = manifest(), manifest(HOOKS)
    assert plain.format == "aenv.snapshot/1" and "hooks" not in json.loads(canonical_json(plain))
    assert hooked.format == "aenv.snapshot/2" and plain.id != hooked.id
    again = Snapshot.model_validate_json(canonical_json(hooked))
    assert again == hooked and again.id == hooked.id and again.hooks == HOOKS


def test_only_a_snapshot_with_hooks_before_a_pause_is_of_format_3() -> None:
    before = canonical_json(manifest(HOOKS))
    assert b"on_pause" not in before and Hooks.model_validate_json(HOOKS.model_dump_json()) == HOOKS
    newest = manifest(HOOKS.model_copy(update={"on_pause": (FLUSH,)}))
    assert newest.format == "aenv.snapshot/3"
    again = Snapshot.model_validate_json(canonical_json(newest))
    assert again == newest and again.hooks is not None and again.hooks.on_pause == (FLUSH,)
    value = json.loads(canonical_json(newest))
    for format in ("aenv.snapshot/1", "aenv.snapshot/2"):
        with pytest.raises(ValidationError):
            Snapshot.model_validate(value | {"format": format})
    with pytest.raises(ValidationError):
        Snapshot.model_validate(json.loads(before) | {"format": "aenv.snapshot/3"})


def test_hooks_and_format_and_memory_go_together() -> None:
    value = json.loads(canonical_json(manifest(HOOKS)))
    for change in ({"format": "aenv.snapshot/1"}, {"hooks": None}, {"memory": None}):
        with pytest.raises(ValidationError):
            Snapshot.model_validate(value | change)
    with pytest.raises(ValidationError):
        Snapshot.model_validate(json.loads(canonical_json(manifest())) | {"format": "aenv.snapshot/2"})


@pytest.mark.parametrize(
    "hooks",
    [
        {},
        {"on_restore": [], "on_fork": []},
        {"on_restore": [{"command": []}]},
        {"on_restore": [{"command": [""]}]},
        {"on_restore": [{"command": ["a\0"]}]},
        {"on_restore": [{"command": ["a"] * (MAX_WORDS + 1)}]},
        {"on_restore": [{"command": ["a", "b" * MAX_CHARACTERS]}]},
        {"on_fork": [{"command": ["a"]}] * (MAX_HOOKS + 1)},
        {"on_fork": [{"command": ["a"], "user": "-x"}]},
        {"on_fork": [{"command": "a"}]},
        {"on_boot": [{"command": ["a"]}]},
    ],
)
def test_a_hostile_manifest_is_refused(hooks: dict[str, object]) -> None:
    value = json.loads(canonical_json(manifest(HOOKS)))
    with pytest.raises(ValidationError):
        Snapshot.model_validate(value | {"hooks": hooks})


def test_the_documented_hooks_are_hooks() -> None:
    text = (ROOT / "docs" / "snapshot-format.md").read_text().split("### Hooks", 1)[1]
    field = "{" + text.split("```\n", 1)[1].split("```", 1)[0] + "}"
    value = Snapshot.model_validate(json.loads(canonical_json(manifest(HOOKS))) | json.loads(field))
    assert json.loads(canonical_json(value))["hooks"] == json.loads(field)["hooks"]


def test_what_callers_give_is_refused_with_the_reason() -> None:
    assert Hook.of("a b").command == ("sh", "-ec", "a b") and Hook.of("a b").words == "a b"
    assert Hook.of(["kill", "-USR1"]).words == "kill -USR1"
    with pytest.raises(InvalidInput, match="no NUL"):
        Hook.of("a\0")
    for nothing in ("", " \n", []):
        with pytest.raises(InvalidInput, match="without any word"):
            Hook.of(nothing)
    with pytest.raises(InvalidInput, match="names a program"):
        Hook.of([""])
    with pytest.raises(InvalidInput, match="on_fork: there are at most 16"):
        Hooks.of((), [RESEED] * 17)
    assert Hooks.of((), ()) is None


def test_hooks_of_a_recipe() -> None:
    output = Output.model_validate(
        {"on_restore": ["reseed"], "on_fork": [{"command": ["/bin/split", "now"], "user": "app"}]}
    )
    assert output.hooks() == HOOKS and Output().hooks() is None
    assert Output.model_validate({"on_pause": ["flush"]}).hooks() == Hooks(on_pause=(FLUSH,))


# -- when they run -------------------------------------------------------------------------------------------


async def hooked(site: Site, node: Node) -> HostedSandbox:
    """A sandbox of a snapshot with hooks."""
    plain = await launch(node)
    request = SnapshotRequest(name=Name("hooked"), on_restore=HOOKS.on_restore, on_fork=HOOKS.on_fork)
    await node.snapshot(plain, request)
    await node.kill(plain)
    return await launch(node, snapshot="hooked")


def ran(site: Site, sandbox: HostedSandbox) -> list[tuple[str, str]]:
    return [(one.env["AENV_HOOK"], one.env["AENV_START"]) for one in site.machine(sandbox).ran]


async def test_after_the_identity_and_before_anybody_may_use_it(site: Site) -> None:
    node = site.node()
    first = await hooked(site, node)
    (seen,) = site.machine(first).ran
    assert (seen.command, seen.user, seen.hostname) == ("reseed", None, first.id)
    site.engine.command_gate = asyncio.Event()
    launching = asyncio.create_task(launch(node, snapshot="hooked"))
    await until(lambda: sum(len(machine.ran) for machine in site.engine.machines.values()) == 2)
    (info,) = [info for info in node.infos() if info.sandbox_id != first.id]
    assert (info.state, info.address, launching.done()) == (State.STARTING, None, False)
    site.engine.command_gate.set()
    await launching
    await node.kill_live()
    assert site.clean()


async def test_a_hook_that_takes_long_keeps_nobody_else_from_starting(site: Site) -> None:
    site = replace(site, tools=replace(site.tools, starts=asyncio.Semaphore(1)))
    node = site.node()
    await hooked(site, node)
    site.engine.command_gate = asyncio.Event()
    launching = asyncio.create_task(launch(node, snapshot="hooked"))
    await until(lambda: sum(len(machine.ran) for machine in site.engine.machines.values()) == 2)
    other = await launch(node)
    assert other.state is State.RUNNING and not launching.done()
    site.engine.command_gate.set()
    await launching
    await node.kill_live()
    assert site.clean()


async def test_each_start_runs_its_own(site: Site) -> None:
    node = site.node()
    parent = await hooked(site, node)
    (entry,) = await fork(node, parent, 1)
    assert entry.sandbox is not None
    child = node.find(entry.sandbox.sandbox_id)
    assert ran(site, parent) == [("on_restore", "launch")]  # a fork restores its children, not the parent
    assert ran(site, child) == [("on_fork", "fork"), ("on_restore", "fork")]
    assert [one.user for one in site.machine(child).ran] == ["app", None]
    assert {one.hostname for one in site.machine(child).ran} == {child.id}
    await node.pause(child)
    await node.resume(child, timeout_s=60, cold=False)
    assert ran(site, child) == [("on_restore", "resume")]
    await node.kill_live()


async def with_pause_hook(site: Site, node: Node) -> HostedSandbox:
    """A sandbox whose snapshot has one of each kind."""
    plain = await launch(node)
    settings = {"on_restore": HOOKS.on_restore, "on_pause": (FLUSH,)}
    await node.snapshot(plain, SnapshotRequest.model_validate({"name": "flushed", **settings}))
    await node.kill(plain)
    return await launch(node, snapshot="flushed")


async def test_before_a_pause_and_a_snapshot_and_not_before_a_fork(site: Site) -> None:
    node = site.node()
    sandbox = await with_pause_hook(site, node)
    machine = site.machine(sandbox)

    def told() -> list[tuple[str, str]]:
        return [(one.command, one.env.get("AENV_BEFORE", "")) for one in machine.ran[1:]]

    await node.snapshot(sandbox, SnapshotRequest())
    await node.snapshot(sandbox, SnapshotRequest(memory=False))
    await node.snapshot(sandbox, SnapshotRequest(hooks=False))
    await fork(node, sandbox, 1)
    assert told() == [("flush", "snapshot")] * 2
    await node.pause(sandbox)
    assert told() == [("flush", "snapshot")] * 2 + [("flush", "pause")]
    assert machine.ran[-1].env["AENV_HOOK"] == "on_pause" and sandbox.state is State.PAUSED
    await node.resume(sandbox, timeout_s=60, cold=False)
    again = site.machine(sandbox)
    await node.pause(sandbox, hooks=False)
    assert [one.command for one in again.ran] == ["reseed"]
    for one in list(node.infos()):
        await node.kill(node.find(one.sandbox_id))
    assert site.clean()


async def test_a_failed_hook_before_a_pause_leaves_it_running(site: Site) -> None:
    node = site.node()
    sandbox = await with_pause_hook(site, node)
    for outcome, how in ((4, "exited with 4"), ("deadline_exceeded", "limit for all hooks of a pause")):
        site.engine.outcomes["flush"] = outcome
        with pytest.raises(HookFailed, match=how) as caught:
            await node.pause(sandbox)
        assert "the hook on_pause of sandbox" in caught.value.message and "--no-hooks" in caught.value.fix
        assert sandbox.state is State.RUNNING
    with pytest.raises(HookFailed):
        await node.snapshot(sandbox, SnapshotRequest(name=Name("no")))
    assert "no" not in {entry.name for entry in site.tools.catalog.entries()}
    await sandbox.pause(limit_s=5.0)  # as at the end of its time: nobody is there to mend it
    assert sandbox.state is State.PAUSED
    await node.kill(sandbox)
    assert site.clean()


async def test_what_boots_from_its_disk_has_none(site: Site) -> None:
    node = site.node()
    await node.kill(await hooked(site, node))
    cold = await launch(node, snapshot="hooked", cold=True)
    await node.pause(cold)
    await node.resume(cold, timeout_s=60, cold=False)
    assert not site.machine(cold).ran
    warm = await launch(node, snapshot="hooked")
    await node.pause(warm)
    await node.resume(warm, timeout_s=60, cold=True)
    await node.pause(warm)
    await node.resume(warm, timeout_s=60, cold=False)
    assert not site.machine(warm).ran
    await node.kill_live()


async def test_snapshots_pass_them_on_or_replace_them(site: Site) -> None:
    node = site.node()
    sandbox = await hooked(site, node)
    repository = site.tools.repository

    async def taken(**settings: object) -> Hooks | None:
        reply = await node.snapshot(sandbox, SnapshotRequest.model_validate(settings))
        return repository.snapshot(reply.snapshot_id).hooks

    assert await taken() == HOOKS
    assert await taken(memory=False) is None
    assert await taken(on_fork=()) == Hooks(on_restore=(RESEED,))
    assert await taken(on_fork=(), on_restore=()) is None
    with pytest.raises(InvalidInput, match="disk alone"):
        await taken(memory=False, on_restore=(RESEED,))
    await node.kill(sandbox)


# -- what a failure leaves -----------------------------------------------------------------------------------


async def test_a_failed_hook_fails_the_launch_and_says_all(site: Site) -> None:
    node = site.node()
    sandbox = await hooked(site, node)
    site.engine.outcomes["reseed"] = 3
    with pytest.raises(HookFailed) as caught:
        await launch(node, snapshot="hooked")
    assert "the hook on_restore of sandbox" in caught.value.message
    assert "exited with 3: reseed; its last output:\n  | said by reseed" in caught.value.message
    assert "--no-hooks" in caught.value.fix and site.directories() == [sandbox.id]
    without = await launch(node, snapshot="hooked", hooks=False)
    assert not site.machine(without).ran and without.record.hooks == HOOKS
    await node.pause(without)
    with pytest.raises(HookFailed):
        await node.resume(without, timeout_s=60, cold=False)
    await node.resume(without, timeout_s=60, cold=False, hooks=False)
    assert not site.machine(without).ran
    await node.kill_live()
    assert site.clean()


@pytest.mark.parametrize(
    ("code", "text"), [("deadline_exceeded", "did not end within 60 s"), ("invalid_argument", "could not be run")]
)
async def test_a_hook_without_an_end_or_a_program(site: Site, code: str, text: str) -> None:
    node = site.node()
    sandbox = await hooked(site, node)
    site.engine.outcomes["reseed"] = code
    with pytest.raises(HookFailed, match=text):
        await launch(node, snapshot="hooked")
    await node.kill(sandbox)
    assert site.clean()


async def test_a_machine_that_goes_away_in_a_hook_is_not_a_failed_hook(site: Site) -> None:
    node = site.node()
    sandbox = await hooked(site, node)
    site.engine.outcomes["reseed"] = "unavailable"
    with pytest.raises(BootFailed):
        await launch(node, snapshot="hooked")
    await node.kill(sandbox)
    assert site.clean()


async def test_a_failed_resume_stays_paused_and_a_failed_child_is_its_own(site: Site) -> None:
    node = site.node()
    sandbox = await hooked(site, node)
    site.engine.outcomes["now"] = 1
    (entry,) = await fork(node, sandbox, 1)
    assert entry.error is not None and entry.error.code == "hook_failed" and "on_fork" in entry.error.message
    assert isinstance(entry.error.error(), HookFailed)
    assert sandbox.state is State.RUNNING and site.directories() == [sandbox.id]
    await node.pause(sandbox)
    site.engine.outcomes["reseed"] = 1
    with pytest.raises(HookFailed):
        await node.resume(sandbox, timeout_s=60, cold=False)
    assert sandbox.state is State.PAUSED and not site.engine.machines
    site.engine.outcomes.clear()
    await node.resume(sandbox, timeout_s=60, cold=False)
    assert ran(site, sandbox) == [("on_restore", "resume")]
    await node.kill(sandbox)
    assert site.clean()


async def test_kill_interrupts_a_hook(site: Site) -> None:
    node = site.node()
    sandbox = await hooked(site, node)
    await node.pause(sandbox)
    site.engine.command_gate = asyncio.Event()
    resuming = asyncio.create_task(node.resume(sandbox, timeout_s=60, cold=False))
    await until(lambda: bool(site.engine.machines) and bool(site.machine(sandbox).ran))
    await node.kill(sandbox)
    with pytest.raises(NotFound, match="killed"):
        await resuming
    assert site.clean()
