"""What a plan and a build's result look like on stdout: for people, or one JSON object."""

from __future__ import annotations

import json

import click

from aenv_build.execute import BuildResult, Known
from aenv_build.ledger import BASE, Notes
from aenv_build.plan import Plan
from aenv_build.wording import base_words, size, step_words
from aenv_run.drivers.select import Selected
from aenv_run.paths import Home


def print_plan(plan: Plan, known: Known, home: Home, *, explain: bool, as_json: bool) -> None:
    """What would run, and why."""
    notes = Notes(home.cache / "explain", plan.source.recipe.name)
    rows = [(BASE, base_words(plan), "", known.base is not None, plan.base.inputs)]
    for stage in plan.stages.values():
        hit = stage.id in known.stages
        rows.append((stage.id, step_words(stage), stage.parent or BASE, hit, stage.inputs))
    reasons = {
        step: "hit" if hit else f"miss, {notes.why_missed(step, inputs)}" for step, _, _, hit, inputs in rows
    }
    no_work = {stage.id for stage in plan.stages.values() if not stage.makes_state and stage.step.verb != "verify"}
    reasons.update(dict.fromkeys(no_work, "context only"))
    if as_json:
        stages = [
            {
                "step": step,
                "what": what,
                "parent": parent or None,
                "key": inputs.key,
                "hit": hit,
                "why": reasons[step],
            }
            for step, what, parent, hit, inputs in rows
        ]
        outputs = [{"name": out.name, "from": out.state, "memory": out.memory} for out in plan.outputs]
        click.echo(json.dumps({"recipe": plan.source.recipe.name, "stages": stages, "outputs": outputs}))
        return
    width = max(len(step) for step, *_ in rows)
    for step, what, parent, _, inputs in rows:
        after = f"  after {parent}" if parent else ""
        why = f"  {reasons[step] if explain else reasons[step].partition(',')[0]}"
        click.echo(f"{step:{width}}  {inputs.key[:12]}{why}  {what}{after}")
    for out in plan.outputs:
        memory = " with memory" if out.memory else ""
        click.echo(f"-> {out.name} from {out.state or BASE}{memory}")


def print_result(result: BuildResult, selected: Selected, *, as_json: bool) -> None:
    """The outputs with their versions, and what the build cost."""
    if as_json:
        outputs = [
            {
                "name": out.name,
                "version": out.version,
                "tags": list(out.tags),
                "snapshot_id": out.snapshot.id,
                "size_bytes": sum(blob.size_bytes for blob in out.snapshot.blobs()),
                "has_memory": out.snapshot.memory is not None,
                "fresh": out.fresh,
            }
            for out in result.outputs
        ]
        summary = {
            "outputs": outputs,
            "hits": result.hits,
            "misses": result.misses,
            "seconds": round(result.seconds, 3),
        }
        click.echo(json.dumps({**summary, "driver": selected.driver.name, "why": selected.why}))
        return
    for out in result.outputs:
        parts = f"disk{' and memory' if out.snapshot.memory else ''}"
        total = size(sum(blob.size_bytes for blob in out.snapshot.blobs()))
        click.echo(f"{out.name}:{out.version}  {out.snapshot.id}  {parts}, {total}")
    click.echo(f"{result.hits} cached, {result.misses} built, {result.seconds:.1f} s")
