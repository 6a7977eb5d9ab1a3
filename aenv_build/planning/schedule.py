"""Which stages must run, and which goes on in its parent's machine. Pure: decided before anything starts."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from aenv_build.language.verbs import FromStep
from aenv_build.planning.plan import Plan, Stage


@dataclass(frozen=True)
class Schedule:
    """``needed``: the stages to run. ``heirs``: by state parent, the stage that takes over its live machine."""

    needed: frozenset[str]
    heirs: dict[str, str]
    base_needed: bool


def state_parent(plan: Plan, stage: Stage) -> str | None:
    """The nearest stage above that makes a state: steps that change the context only have none of their own."""
    parent = stage.parent
    while parent is not None and not plan.stages[parent].makes_state:
        parent = plan.stages[parent].parent
    return parent


def state_of(plan: Plan, step: str | None) -> str | None:
    """The stage whose snapshot is the state after ``step``; None is the base."""
    if step is None or plan.stages[step].makes_state:
        return step
    return state_parent(plan, plan.stages[step])


def make_schedule(plan: Plan, hits: AbstractSet[str], outputs_missing: AbstractSet[int]) -> Schedule:
    """Start from what is wanted (missing verifies, outputs, leaves) and add what each stands on, if missing.

    A missing stage between two hits is not run: nothing needs it.
    """
    states = [stage for stage in plan.stages.values() if stage.makes_state]
    parents = {state_parent(plan, stage) for stage in states}
    parents |= {state_of(plan, source) for stage in states for source in copied_from(stage)}
    wanted: list[str | None] = [state_of(plan, plan.outputs[position].state) for position in outputs_missing]
    for stage in plan.stages.values():
        leaf = stage.makes_state and stage.id not in parents
        if stage.step.verb == "verify" or leaf:
            wanted.append(stage.id)
    needed: set[str] = set()
    base_needed = False
    while wanted:
        step = wanted.pop()
        if step is None:
            base_needed = True
            continue
        if step in needed or step in hits:
            continue
        needed.add(step)
        stage = plan.stages[step]
        if not stage.is_base:
            wanted.append(state_parent(plan, stage))
        wanted += [state_of(plan, source) for source in copied_from(stage)]
    return Schedule(frozenset(needed), _heirs(plan, needed), base_needed)


def copied_from(stage: Stage) -> tuple[str, ...]:
    """The steps whose files this one copies."""
    copy = stage.step.copy_
    return (copy.from_.step,) if copy is not None and isinstance(copy.from_, FromStep) else ()


def copied_paths(plan: Plan, state: str, needed: AbstractSet[str]) -> set[str]:
    """The paths of that state which steps that will run copy."""
    copies = [plan.stages[step].step.copy_ for step in needed]
    sources = [copy.from_ for copy in copies if copy is not None and isinstance(copy.from_, FromStep)]
    return {source.path for source in sources if state_of(plan, source.step) == state}


def _heirs(plan: Plan, needed: set[str]) -> dict[str, str]:
    """The first child that can start as soon as its parent is done: it never keeps a machine waiting.

    Not across a memory image (children restore from it, all alike) and not for a step that makes one (it
    starts from a fresh boot, so that uptime and leftovers of the build are in no image).
    """
    heirs: dict[str, str] = {}
    for stage in plan.stages.values():
        parent = state_parent(plan, stage)
        if parent is None or parent not in needed or stage.id not in needed or parent in heirs:
            continue
        if plan.stages[parent].is_base:  # no machine made it
            continue
        fetches = bool(copied_from(stage))
        if stage.makes_state and not stage.memory and not fetches and not needed.intersection(stage.waits):
            heirs[parent] = stage.id
    return heirs
