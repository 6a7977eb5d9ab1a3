"""Building the cells of a matrix: each is a build of its own, and what they have in common runs once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from aenv_build.language.matrix import Cell
from aenv_build.planning.plan import Plan
from aenv_build.reports import events
from aenv_build.running.execute import build
from aenv_build.running.workshop import BuildResult, Workshop
from aenv_run.errors import AenvError


@dataclass(frozen=True)
class BuiltCell:
    """What became of a cell: its result, or the error that ended it."""

    cell: Cell
    result: BuildResult | None
    error: AenvError | None = None


async def build_cells(plans: Sequence[Plan], workshop: Workshop) -> tuple[BuiltCell, ...]:
    """Build all, side by side. A cell that fails ends no other: their outputs get their names.

    Of a step that several cells share, one runs and the others wait for its key (``locks.py``).
    """
    if len(plans) == 1 and not plans[0].source.cell.values:
        return (BuiltCell(Cell(), await build(plans[0], workshop)),)
    at_once = max(1, workshop.parallel)
    shared = replace(workshop, machines=asyncio.Semaphore(at_once))
    turns = asyncio.Semaphore(at_once)

    async def one(plan: Plan) -> BuiltCell:
        cell = plan.source.cell

        def sink(event: events.BuildEvent) -> None:
            workshop.sink(event.model_copy(update={"cell": str(cell)}))

        async with turns:
            try:
                return BuiltCell(cell, await build(plan, replace(shared, sink=sink)))
            except AenvError as error:
                return BuiltCell(cell, None, error)

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(plan)) for plan in plans]
    built = tuple(task.result() for task in tasks)
    results = [each.result for each in built if each.result is not None]
    if len(results) == len(built):
        hits, misses = sum(result.hits for result in results), sum(result.misses for result in results)
        spent_ms = round((time.monotonic() - began) * 1000)
        workshop.sink(events.BuildFinished(hits=hits, misses=misses, milliseconds=spent_ms))
    return built


def require_all(cells: Sequence[BuiltCell]) -> None:
    """Raise for the cells that failed; the error is of the first one's kind."""
    failed = [(each.cell, each.error) for each in cells if each.error is not None]
    if not failed:
        return
    first = failed[0][1]
    parts = [f"cell {cell}: {error.message}" for cell, error in failed]
    head = f"{len(failed)} of {len(cells)} cells failed:\n" if len(cells) > 1 else ""
    raise type(first)(head + "\n".join(parts), fix=first.fix)
