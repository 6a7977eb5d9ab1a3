"""Runs a plan: every missing stage in a staging machine, committed as soon as it is done, branches in parallel."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from aenv_build.bases import make_base_disk
from aenv_build.cache.cache_mounts import Mounts, MountStore
from aenv_build.cache.elsewhere import Elsewhere
from aenv_build.cache.known import Freshness, Known, Old, look_up
from aenv_build.cache.ledger import BASE, Ledger, Notes
from aenv_build.cache.locks import key_lock
from aenv_build.language.recipe import Step
from aenv_build.planning.lent import Lent
from aenv_build.planning.plan import Plan, PlannedOutput, Stage
from aenv_build.planning.schedule import Schedule, copied_paths, make_schedule, state_of, state_parent
from aenv_build.reports import events
from aenv_build.reports.stage_events import StageEvents
from aenv_build.reports.wording import base_words, step_words
from aenv_build.running.causes import first_cause
from aenv_build.running.commit import Committer
from aenv_build.running.copied import CopiedFiles
from aenv_build.running.provenance import how_built, source_state
from aenv_build.running.redact import Redactor
from aenv_build.running.staging import Slots, StagingMachine
from aenv_build.running.staging_network import NOTHING, Reach, StagingNetwork
from aenv_build.running.steps import Given, perform
from aenv_build.running.workshop import BuildResult, Published, Workshop
from aenv_run.cache import BlobCache
from aenv_run.cache_limit import trim
from aenv_run.catalog import Catalog
from aenv_run.errors import StepFailed, Unsupported
from aenv_run.repository import RACE_TRIES
from aenv_run.scratch import scratch
from aenv_run.snapshot import Snapshot
from aenv_run.threads import in_thread, to_the_end
from aenv_run.types import StageKey

#: The longest pause before a step is tried again.
MAX_WAIT_S = 30.0


async def build(plan: Plan, workshop: Workshop) -> BuildResult:
    """Build all of the plan and name its outputs. Whatever ends it, no machine and no scratch is left."""
    began = time.monotonic()
    with scratch(workshop.home.staging) as directory:
        run = _Run(plan, workshop, directory)
        try:
            await run.all()
        except BaseExceptionGroup as group:
            raise first_cause(group) from None
        finally:
            await run.close()
        outputs = await run.publish()
    result = BuildResult(outputs, run.hits, run.misses, time.monotonic() - began)
    spent_ms = round(result.seconds * 1000)
    workshop.sink(events.BuildFinished(hits=run.hits, misses=run.misses, milliseconds=spent_ms))
    return result


def _is_work(stage: Stage) -> bool:
    return stage.makes_state or stage.step.verb == "verify"


class _Run:
    """One execution of a plan."""

    def __init__(self, plan: Plan, workshop: Workshop, directory: Path) -> None:
        self._plan = plan
        self._shop = workshop
        self._elsewhere = Elsewhere.opened(workshop.cache_from, workshop.home, directory)
        self._ledger = Ledger(
            workshop.repository, clock=workshop.clock, elsewhere=None if workshop.fresh else self._elsewhere
        )
        self._too_old: Mapping[str, str] = {}
        self._old = Old({}, {})
        self._origins: Mapping[str, str] = {}
        self._notes = Notes.of(workshop.home, plan.source)
        self._cache = BlobCache(workshop.home.cache, workshop.repository)
        self._network = StagingNetwork(workshop.home)
        machines = workshop.machines or asyncio.Semaphore(max(1, workshop.parallel))
        self._slots = Slots(machines, directory, self._network, workshop.guests, workshop.layers)
        self._committer = Committer(plan, workshop.repository, workshop.architecture, workshop.driver.caps)
        self._mounts = MountStore(workshop.home.cache / "mounts", workshop.mount_limit_bytes)
        self._redactor = Redactor([*workshop.secrets.values.values(), *workshop.lent.passwords])
        self._told = StageEvents(plan, workshop.sink)
        self._work = [stage for stage in plan.stages.values() if _is_work(stage)]
        self._positions = {stage.id: number for number, stage in enumerate(self._work, start=2)}
        self._done = {stage.id: asyncio.Event() for stage in plan.stages.values()}
        self._snapshots: dict[str | None, Snapshot] = {}
        self._outputs: dict[int, Snapshot] = {}
        self._built_outputs: set[int] = set()
        self._live: dict[str, StagingMachine] = {}
        self._machines: list[StagingMachine] = []
        self._base_done = asyncio.Event()
        self._needed: frozenset[str] = frozenset()
        self._copied = CopiedFiles(plan, self._slots, lambda state: self._boot(self._snapshots[state]))
        self.hits = 0
        self.misses = 0

    async def all(self) -> None:
        """Look up what is known, then run the rest."""
        self._refuse_memory_without_the_driver()
        freshness = Freshness(self._shop.clock(), self._shop.since, self._shop.fresh, self._shop.made)
        known = await self._look_up(freshness)
        self._too_old, self._old, self._origins = known.too_old, known.old, known.origins
        self._snapshots.update(known.stages)
        if known.base is not None:
            self._snapshots[None] = known.base
        self._outputs.update(known.outputs)
        missing = {position for position in range(len(self._plan.outputs)) if position not in known.outputs}
        schedule = make_schedule(self._plan, set(known.stages), missing)
        self._needed = schedule.needed
        if (problem := self._shop.secrets.missing(self._plan, schedule.needed)) is not None:
            raise problem
        total = 1 + len(self._work)
        self.misses = len(schedule.needed) + (schedule.base_needed and known.base is None)
        self.hits = total - self.misses
        self._told.begin(total, self.hits, self._shop.driver.name, self._shop.why_driver)
        for warning in self._elsewhere.warnings:
            self._told.note(BASE, warning)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._base(schedule))
            for stage in self._plan.stages.values():
                group.create_task(self._stage(stage, schedule))
            for position in sorted(missing):
                group.create_task(self._output(position, self._plan.outputs[position]))

    async def _look_up(self, freshness: Freshness) -> Known:
        """What there is, and held from now on; again when a garbage collector was at work meanwhile."""
        for _ in range(RACE_TRIES):
            watch = await in_thread(self._shop.repository.gate.watch)
            known = await in_thread(look_up, self._plan, self._ledger, self._shop.repository, freshness)
            await in_thread(self._shop.hold, {snapshot.id: ("a running build",) for snapshot in known.all()})
            if await in_thread(watch.quiet):
                return known
            await in_thread(watch.wait)
        return known  # collectors never rest; whatever they take now is held, or made again

    async def publish(self) -> tuple[Published, ...]:
        """Name the outputs, in the recipe's order: all verifies have held."""
        catalog = Catalog(self._shop.repository)
        published = []
        source = await source_state(self._plan.source.folder)
        for position, planned in enumerate(self._plan.outputs):
            snapshot = self._outputs[position]
            tags = planned.output.tags
            built = how_built(self._plan, self._shop.driver.name, snapshot, source, planned.state)
            version = str(await in_thread(catalog.publish, planned.name, snapshot.id, tags, built=built))
            fresh = position in self._built_outputs
            published.append(Published(planned.name, version, tags, snapshot, fresh))
            self._shop.sink(
                events.OutputPublished(
                    name=planned.name, version=version, tags=tags, snapshot_id=snapshot.id, fresh=fresh
                )
            )
        return tuple(published)

    async def close(self) -> None:
        """End every machine that is left, and note for the next time what this build was made of."""
        for machine in self._machines:
            await machine.close()
        await to_the_end(self._network.close())
        await in_thread(trim, self._shop.home.cache, self._shop.cache_limit_bytes)
        done = {step for step in self._snapshots if step is not None}
        await in_thread(self._notes.write, self._plan, done | ({BASE} if None in self._snapshots else set()))

    # -- the base ------------------------------------------------------------------------------------------

    async def _base(self, schedule: Schedule) -> None:
        what = base_words(self._plan)
        if None in self._snapshots or not schedule.base_needed:
            kept = self._snapshots.get(None)
            self._told.hit(BASE, 1, what, self._where(BASE, kept), kept)
        else:
            why = self._why(BASE)
            async with self._told.measured(BASE, 1, what, why) as result, self._locked(self._plan.base.key, BASE):
                found = await self._recall(BASE, self._plan.base.key)
                self._snapshots[None] = found or await self._make_base()
                result.append(self._snapshots[None])
        self._base_done.set()

    async def _make_base(self, stage: Stage | None = None) -> Snapshot:
        """The recipe's base, or that of a step."""
        directory = self._slots.next_directory("base")
        directory.mkdir(mode=0o700)
        image = await make_base_disk(self._plan, self._shop.architecture, directory, stage)
        base = self._plan.base_of(stage.id if stage else None)
        return await self._keep(stage.id if stage else BASE, base.key, await self._committer.base(image, base))

    # -- stages --------------------------------------------------------------------------------------------

    async def _stage(self, stage: Stage, schedule: Schedule) -> None:
        if not _is_work(stage):
            await self._wait_for(stage)
        elif stage.id not in schedule.needed:
            kept = self._snapshots.get(stage.id)
            what, position = step_words(stage), self._positions[stage.id]
            self._told.hit(stage.id, position, what, self._where(stage.id, kept), kept)
        else:
            await self._wait_for(stage)
            await self._work_on(stage, schedule)
        self._done[stage.id].set()

    async def _wait_for(self, stage: Stage) -> None:
        for other in ((stage.parent,) if stage.parent else ()) + stage.waits:
            await self._done[other].wait()
        if state_parent(self._plan, stage) is None and not stage.is_base:
            await self._base_done.wait()

    async def _work_on(self, stage: Stage, schedule: Schedule) -> None:
        parent = state_parent(self._plan, stage)
        inherited = self._live.pop(parent, None) if parent and schedule.heirs.get(parent) == stage.id else None

        async def let_go() -> None:
            # Never wait for another builder with a machine in hand: it may wait for ours.
            if inherited is not None:
                await inherited.close()

        position, what = self._positions[stage.id], step_words(stage)
        async with self._told.measured(stage.id, position, what, self._why(stage.id)) as result:
            async with self._locked(stage.key, stage.id, let_go):
                below = None if stage.is_base else self._snapshots[parent]
                found = await self._recall(stage.id, stage.key, below)
                if found is not None:
                    await let_go()
                else:
                    found = await self._run_stage(stage, inherited, keep_machine=stage.id in schedule.heirs)
                self._snapshots[stage.id] = found
            result.append(found)

    async def _recall(self, step: str, key: StageKey, parent: Snapshot | None = None) -> Snapshot | None:
        """What another builder has made meanwhile; of a result that was too old, only one made since we began."""
        kept = await in_thread(self._ledger.recall, "stages", key)
        if kept is None or step not in self._too_old:
            return kept.snapshot if kept else None
        stands = parent is None or parent.id in {kept.snapshot.id, kept.snapshot.parent}
        return kept.snapshot if stands and kept.at != self._old.steps.get(step) else None

    async def _keep(self, step: str, key: StageKey, snapshot: Snapshot) -> Snapshot:
        kept = await in_thread(self._ledger.keep, "stages", key, snapshot, replace=step in self._too_old)
        self._shop.made.add(key)
        return kept

    async def _run_stage(self, stage: Stage, inherited: StagingMachine | None, *, keep_machine: bool) -> Snapshot:
        """Run it, again where it may be tried again: each time from the same state on a fresh machine."""
        if stage.is_base:
            return await self._make_base(stage)
        verb, own = stage.step.verb, stage.step.retry
        tries = 1 + (own if own is not None else self._shop.retries) if verb in stage.step.TIMED else 1
        for attempt in range(1, tries + 1):
            try:
                return await self._attempt(stage, inherited, keep_machine=keep_machine, last=attempt == tries)
            except StepFailed as error:
                if attempt == tries or not error.by_command:
                    raise
                self._told.retried(stage.id, attempt, tries, error.message)
                await asyncio.sleep(min(MAX_WAIT_S, self._shop.retry_wait_s * 2 ** (attempt - 1)))
        raise AssertionError("a step is tried at least once")

    async def _attempt(
        self, stage: Stage, inherited: StagingMachine | None, *, keep_machine: bool, last: bool
    ) -> Snapshot:
        parent = self._snapshots[state_parent(self._plan, stage)]
        # Before a machine is started: a step must not wait for a second slot while it holds one.
        fetched = await self._copied.for_stage(stage)
        reach, given = self._reach(stage), self._given(stage)
        if inherited is not None and inherited.reach != reach:
            await inherited.close()
        usable = inherited is not None and not inherited.closed
        staged = inherited if inherited is not None and usable else await self._boot(parent, reach)
        try:
            async with staged.whole(f"step {stage.id!r}"):
                await perform(stage, staged, self._shop.sink, fetched, given)
            for note in given.mounts.notes if given.mounts is not None else ():
                self._told.note(stage.id, self._redactor.text(note))
            if stage.step.verb == "verify":
                return await self._keep(stage.id, stage.key, parent)
            ahead = not stage.memory and bool(copied_paths(self._plan, stage.id, self._needed))
            snapshot = await self._committer.stage(stage, staged, keep_running=keep_machine or ahead)
            snapshot = await self._keep(stage.id, stage.key, snapshot)
            if ahead:
                await self._copied.take_ahead(stage, staged, self._needed)
            if keep_machine:
                self._live[stage.id] = staged
            return snapshot
        except StepFailed as error:
            if not last and error.by_command:
                raise
            raise await self._committer.with_entrance(stage, staged, error, keep=self._shop.keep) from error
        finally:
            if stage.id not in self._live:
                await staged.close()

    def _reach(self, stage: Stage) -> Reach:
        """The recipe's internet with the hosts that are lent; without, what a step's own index needs."""
        lent = self._shop.lent
        if self._plan.internet:
            return Reach(internet=True, hosts=lent.hosts)
        return Reach(hosts=lent.hosts_for(stage.step.verb))

    def _given(self, stage: Stage) -> Given:
        networked = stage.step.verb in Step.GIVEN and bool(self._reach(stage))
        lent = self._shop.lent if networked else Lent()
        if stage.memory and stage.step.verb != "verify":
            lent = lent.without_passwords()
        mounts = Mounts(self._mounts, self._plan.source.recipe.name, stage.step.cache)
        return Given(lent, self._shop.secrets.of(stage.step.secrets), mounts, self._redactor)

    async def _boot(
        self, snapshot: Snapshot, reach: Reach = NOTHING, *, initialise: bool = True
    ) -> StagingMachine:
        """A machine in that state: restored where it has memory, else booted."""
        staged = await StagingMachine.start(
            self._slots,
            self._shop.driver,
            self._cache,
            snapshot,
            self._plan.machine,
            reach=reach,
            restore=snapshot.memory is not None and snapshot.id not in self._plan.base_snapshots,
            initialise=initialise,
        )
        self._machines.append(staged)
        return staged

    # -- outputs -------------------------------------------------------------------------------------------

    async def _output(self, position: int, planned: PlannedOutput) -> None:
        """Commit an output's snapshot. It is named only when everything has held; see ``publish``."""
        if planned.state is None:
            await self._base_done.wait()
        else:
            await self._done[planned.state].wait()
            if state_of(self._plan, planned.state) is None:
                await self._base_done.wait()
        state = self._snapshots[state_of(self._plan, planned.state)]
        async with self._locked(planned.key, f"output {planned.name}"):
            kept = await in_thread(self._ledger.recall, "outputs", planned.key)
            stale = kept is not None and kept.at == self._old.outputs.get(position)
            found = kept.snapshot if kept is not None and not stale else None
            if found is None:
                found = await self._make_output(planned, state)
                found = await in_thread(self._ledger.keep, "outputs", planned.key, found, replace=stale)
                self._built_outputs.add(position)
            self._outputs[position] = found

    async def _make_output(self, planned: PlannedOutput, state: Snapshot) -> Snapshot:
        directory = self._slots.next_directory("out")
        of_step = state_of(self._plan, planned.state) is not None
        if not planned.memory or (of_step and state.memory is not None):
            return await self._committer.output_of(planned, state, directory)
        # Memory of a state without any: a fresh boot, so that no trace of the build is in the image.
        staged = await self._boot(state, initialise=False)
        try:
            return await self._committer.output_from(planned, staged)
        finally:
            await staged.close()

    def _refuse_memory_without_the_driver(self) -> None:
        wants = any(stage.memory for stage in self._plan.stages.values())
        if (wants or any(out.memory for out in self._plan.outputs)) and not self._shop.driver.caps.memory_snapshot:
            raise Unsupported(
                f"the driver {self._shop.driver.name} makes no memory snapshots here, and the recipe wants one",
                fix="say 'memory: false' in the outputs and start nothing, or choose another --driver",
            )

    # -- small things --------------------------------------------------------------------------------------

    def _where(self, step: str, kept: Snapshot | None) -> str:
        if kept is None:
            return "not needed"
        return f"cached, copied from {self._origins[step]}" if step in self._origins else "cached"

    def _why(self, step: str) -> str:
        if step in self._too_old:
            return self._too_old[step]
        inputs = self._plan.base.inputs if step == BASE else self._plan.stages[step].inputs
        return self._notes.why_missed(step, inputs)

    def _locked(
        self, key: StageKey, step: str, on_wait: Callable[[], Awaitable[None]] | None = None
    ) -> AbstractAsyncContextManager[None]:
        async def tell() -> None:
            self._told.note(step, "another build makes the same; waiting for its result")
            if on_wait is not None:
                await on_wait()

        return key_lock(self._shop.home.locks, key, tell)
