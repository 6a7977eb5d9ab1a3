"""The job summary of a build: a table of its steps, the graph as a picture, what failed, what was made."""

from __future__ import annotations

import re

from aenv_build.reports.picture import Drawing, State, mermaid
from aenv_build.reports.record import BuildRecord, Recorder, StepRecord, StepState
from aenv_build.reports.wording import seconds
from aenv_run.printable import printable, printable_lines

_WORDS: dict[StepState, str] = {
    "waiting": "⚪ not run",
    "running": "⚪ not ended",
    "cached": "✅ cached",
    "not needed": "⚪ not needed",
    "done": "✅ built",
    "failed": "❌ failed",
    "stopped": "⚪ stopped",
}
_COLOURS: dict[StepState, State] = {"cached": "hit", "done": "done", "failed": "failed", "running": "miss"}


def summary(recorder: Recorder) -> str:
    """Markdown, ends with a newline. Nothing in it that others wrote is markup."""
    parts = [_of_build(build) for build in recorder.builds]
    if recorder.failed is not None:
        failed = recorder.failed
        where = f" at {_code(f'{failed.place.file}:{failed.place.line}')}" if failed.place else ""
        parts.append(f"**❌ {failed.code}**{where}\n\n{_fenced(failed.message)}\n")
        if failed.fix:
            parts.append(f"Fix: {_inline(failed.fix)}\n")
    return "\n".join(parts)


def _of_build(build: BuildRecord) -> str:
    started = build.started
    rows = "".join(_row(step) for step in build.steps.values())
    states: dict[str, State] = {
        step.stage.step: _COLOURS.get(step.state, "plain") for step in build.steps.values()
    }
    picture = mermaid((Drawing(started.recipe, started.stages, started.outputs), states))
    made = "".join(
        f"- {_code(f'{out.name}:{out.version}')}"
        f"{''.join(f' {_code(tag)}' for tag in out.tags)} = {_code(out.snapshot_id.short)}"
        f"{'' if out.fresh else ' (unchanged)'}\n"
        for out in build.outputs
    )
    spent, driver = seconds(build.milliseconds), _inline(started.driver)
    return (
        f"### aenv-build {_inline(build.title)}\n\n"
        f"{started.hits} of {started.total} cached, {spent}, driver {driver}\n\n"
        f"| Step | What | Result | Time |\n|---|---|---|---:|\n{rows}\n"
        f"{made}\n```mermaid\n{picture}```\n"
    )


def _row(step: StepRecord) -> str:
    spent = seconds(step.milliseconds) if step.state in {"done", "failed", "stopped"} else ""
    return f"| {_code(step.stage.step)} | {_code(step.stage.what)} | {_WORDS[step.state]} | {spent} |\n"


def _code(text: str) -> str:
    """As HTML code: a backtick ends nothing in it, and a bar no cell."""
    return f"<code>{_inline(text)}</code>"


def _inline(text: str) -> str:
    """Text that Markdown takes as it is: what marks up becomes a numeric entity."""
    return re.sub(r"[^\w ./=-]|_", lambda found: f"&#{ord(found[0])};", printable(text))


def _fenced(text: str) -> str:
    """A block whose fence is longer than any that the text has."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{printable_lines(text)}\n{fence}"
