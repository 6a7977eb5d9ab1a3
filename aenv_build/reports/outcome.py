"""What a plan and a build's result look like on stdout: for people, or one JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NotRequired, TypedDict

import click

from aenv_build.cache.known import Known
from aenv_build.cache.ledger import BASE, Notes
from aenv_build.commands.cells import BuiltCell
from aenv_build.planning.plan import Plan
from aenv_build.reports.wording import base_words, size, step_words
from aenv_run.drivers.select import Selected
from aenv_run.paths import Home


def print_plans(
    plans: Sequence[Plan], known: Sequence[Known], home: Home, *, explain: bool, as_json: bool
) -> None:
    """What would run, and why; of a matrix, cell by cell."""
    cells = any(plan.source.cell.values for plan in plans)
    told = [_plan(plan, found, home) for plan, found in zip(plans, known, strict=True)]
    if as_json and cells:
        click.echo(json.dumps({"recipe": plans[0].source.recipe.name, "cells": told}))
    elif as_json:
        click.echo(json.dumps(told[0]))
    for plan, each in zip(plans, told, strict=True):
        if not as_json:
            if cells:
                click.echo(f"cell {plan.source.cell}")
            _print_rows(plan, each["stages"], explain=explain)


class _Row(TypedDict):
    step: str
    what: str
    parent: str | None
    key: str
    hit: bool
    why: str


class _Told(TypedDict):
    recipe: str
    cell: NotRequired[Mapping[str, str]]
    stages: list[_Row]
    outputs: list[dict[str, str | bool | None]]


def _plan(plan: Plan, known: Known, home: Home) -> _Told:
    notes = Notes.of(home, plan.source)
    rows = [(BASE, base_words(plan), "", known.base is not None, plan.base.inputs)]
    for stage in plan.stages.values():
        hit = stage.id in known.stages
        parent = "" if stage.is_base else stage.parent or BASE
        rows.append((stage.id, step_words(stage), parent, hit, stage.inputs))
    reasons = {
        step: _hit(known, step) if hit else f"miss, {known.too_old.get(step) or notes.why_missed(step, inputs)}"
        for step, _, _, hit, inputs in rows
    }
    no_work = {stage.id for stage in plan.stages.values() if not stage.makes_state and stage.step.verb != "verify"}
    reasons.update(dict.fromkeys(no_work, "context only"))
    stages = [
        _Row(step=step, what=what, parent=parent or None, key=inputs.key, hit=hit, why=reasons[step])
        for step, what, parent, hit, inputs in rows
    ]
    outputs: list[dict[str, str | bool | None]] = [
        {"name": out.name, "from": out.state, "memory": out.memory} for out in plan.outputs
    ]
    cell = plan.source.cell.values
    told = _Told(recipe=plan.source.recipe.name, stages=stages, outputs=outputs)
    return _Told(recipe=told["recipe"], cell=cell, stages=stages, outputs=outputs) if cell else told


def _hit(known: Known, step: str) -> str:
    return f"hit, in {known.origins[step]}" if step in known.origins else "hit"


def _print_rows(plan: Plan, rows: Sequence[_Row], *, explain: bool) -> None:
    width = max(len(row["step"]) for row in rows)
    for row in rows:
        after = f"  after {row['parent']}" if row["parent"] else ""
        why = row["why"] if explain else row["why"].partition(",")[0]
        click.echo(f"{row['step']:{width}}  {row['key'][:12]}  {why}  {row['what']}{after}")
    for out in plan.outputs:
        memory = " with memory" if out.memory else ""
        click.echo(f"-> {out.name} from {out.state or BASE}{memory}")


def print_result(cells: Sequence[BuiltCell], selected: Selected, *, as_json: bool) -> None:
    """The outputs with their versions, and what the build cost. Cells that failed are named in the JSON."""
    built = [(each.cell, each.result) for each in cells if each.result is not None]
    hits, misses = sum(result.hits for _, result in built), sum(result.misses for _, result in built)
    seconds = max([result.seconds for _, result in built], default=0.0)
    if as_json:
        outputs = [
            {
                **({"cell": cell.values} if cell.values else {}),
                "name": out.name,
                "version": out.version,
                "tags": list(out.tags),
                "snapshot_id": out.snapshot.id,
                "size_bytes": sum(blob.size_bytes for blob in out.snapshot.blobs()),
                "has_memory": out.snapshot.memory is not None,
                "fresh": out.fresh,
            }
            for cell, result in built
            for out in result.outputs
        ]
        failed = [
            {"cell": each.cell.values, "code": each.error.code, "message": each.error.message}
            for each in cells
            if each.error is not None
        ]
        summary = {"outputs": outputs, "hits": hits, "misses": misses, "seconds": round(seconds, 3)}
        summary |= {"failed": failed} if failed else {}
        click.echo(json.dumps({**summary, "driver": selected.driver.name, "why": selected.why}))
        return
    for _, result in built:
        for out in result.outputs:
            parts = f"disk{' and memory' if out.snapshot.memory else ''}"
            total = size(sum(blob.size_bytes for blob in out.snapshot.blobs()))
            click.echo(f"{out.name}:{out.version}  {out.snapshot.id}  {parts}, {total}")
    click.echo(f"{hits} cached, {misses} built, {seconds:.1f} s")
