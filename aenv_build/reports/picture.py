"""The graph of a plan, as events tell it and as a picture: Mermaid for pages, DOT for graphviz."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from aenv_build.cache.ledger import BASE
from aenv_build.planning.plan import Plan
from aenv_build.planning.schedule import copied_from
from aenv_build.reports.events import Place, PlannedName, PlannedStage
from aenv_build.reports.wording import base_words, step_words

#: What is known of a stage: in the cache, to be done, done now, failed, or nothing at all.
State: TypeAlias = Literal["hit", "miss", "done", "failed", "plain"]
#: Fill, border, text. They read on a light and on a dark page.
COLOURS: dict[State, tuple[str, str, str]] = {
    "hit": ("#d7f0dd", "#1a7f37", "#0b3d1a"),
    "miss": ("#fdf0c4", "#9a6700", "#3d2a00"),
    "done": ("#d6e8fb", "#0969da", "#06305f"),
    "failed": ("#ffd9d6", "#cf222e", "#5c0a10"),
    "plain": ("#eef0f2", "#656d76", "#24292f"),
}


@dataclass(frozen=True)
class Drawing:
    """Stages in an order in which each follows what it needs, the base first, and the outputs."""

    recipe: str
    stages: tuple[PlannedStage, ...]
    outputs: tuple[PlannedName, ...]
    title: str = ""


def drawing_of(plan: Plan) -> Drawing:
    """The plan's graph, with the recipe's places."""
    document = plan.source.document

    def place(*where: str | int) -> Place:
        mark = document.mark(where)
        return Place(file=mark.file, line=mark.line, column=mark.column)

    stages = [
        PlannedStage(
            step=BASE, verb="base", what=base_words(plan), parent=None, key=plan.base.key, place=place("base")
        )
    ]
    for stage in plan.stages.values():
        after = dict.fromkeys((*stage.waits, *copied_from(stage)))
        stages.append(
            PlannedStage(
                step=stage.id,
                verb=stage.step.verb,
                what=step_words(stage),
                parent=None if stage.is_base else stage.parent or BASE,
                after=tuple(other for other in after if other != stage.parent),
                key=stage.key,
                place=place("steps", stage.index),
            )
        )
    outputs = tuple(
        PlannedName(name=out.name, from_step=out.state or BASE, memory=out.memory, tags=out.output.tags)
        for out in plan.outputs
    )
    return Drawing(plan.source.recipe.name, tuple(stages), outputs, str(plan.source.cell))


def output_key(number: int) -> str:
    """What stands for an output among the states; no step is called so."""
    return f"output {number}"


def mermaid(*drawn: tuple[Drawing, Mapping[str, State]]) -> str:
    """A Mermaid flowchart, as GitHub and GitLab draw it in a page. A verify is a hexagon, an output a stadium.

    Of several drawings, such as a matrix has, each is a box.
    """
    lines = ["flowchart TD"]
    for number, (drawing, states) in enumerate(drawn):
        inner = _mermaid_lines(drawing, states, f"g{number}" if len(drawn) > 1 else "")
        if len(drawn) > 1:
            inner = [
                f'  subgraph g{number}["{_entities(drawing.title)}"]',
                *(f"  {line}" for line in inner),
                "  end",
            ]
        lines += inner
    for state, (fill, border, text) in COLOURS.items():
        lines.append(f"  classDef {state} fill:{fill},stroke:{border},color:{text}")
    return "\n".join(lines) + "\n"


def _mermaid_lines(drawing: Drawing, states: Mapping[str, State], prefix: str) -> list[str]:
    numbers = {stage.step: f"{prefix}s{number}" for number, stage in enumerate(drawing.stages)}
    lines = []
    for stage in drawing.stages:
        opening, closing = _SHAPES.get(stage.verb, ('["', '"]'))
        label = f"{_entities(stage.step)}<br/>{_entities(stage.what)}"
        lines.append(f"  {numbers[stage.step]}{opening}{label}{closing}:::{states.get(stage.step, 'plain')}")
    for stage in drawing.stages:
        if stage.parent is not None:
            arrow = "-.->" if stage.verb == "verify" else "-->"
            lines.append(f"  {numbers[stage.parent]} {arrow} {numbers[stage.step]}")
        lines += [f"  {numbers[other]} -.-> {numbers[stage.step]}" for other in stage.after]
    for number, out in enumerate(drawing.outputs):
        state = states.get(output_key(number), "plain")
        lines.append(f'  {prefix}o{number}(["{_entities(_output_words(out))}"]):::{state}')
        lines.append(f"  {numbers[out.from_step]} ==> {prefix}o{number}")
    return lines


def dot(*drawn: tuple[Drawing, Mapping[str, State]]) -> str:
    """The same for Graphviz."""
    lines = [
        "digraph recipe {",
        '  node [shape=box, style="filled,rounded", fontname="sans-serif", fontsize=11]',
        '  edge [color="#656d76"]',
    ]
    for number, (drawing, states) in enumerate(drawn):
        inner = _dot_lines(drawing, states, f"{number} " if len(drawn) > 1 else "")
        if len(drawn) > 1:
            title = f"    label={_quoted(drawing.title)}"
            inner = [f"  subgraph cluster{number} {{", title, *(f"  {line}" for line in inner), "  }"]
        lines += inner
    return "\n".join([*lines, "}"]) + "\n"


def _dot_lines(drawing: Drawing, states: Mapping[str, State], prefix: str) -> list[str]:
    def node(step: str) -> str:
        return _quoted(prefix + step)

    lines = []
    for stage in drawing.stages:
        shape = ", shape=hexagon, style=filled" if stage.verb == "verify" else ""
        label = _quoted(f"{stage.step}\n{stage.what}")
        lines.append(f"  {node(stage.step)} [label={label}, {_dot_colours(states, stage.step)}{shape}]")
    for stage in drawing.stages:
        if stage.parent is not None:
            style = " [style=dashed]" if stage.verb == "verify" else ""
            lines.append(f"  {node(stage.parent)} -> {node(stage.step)}{style}")
        lines += [f"  {node(other)} -> {node(stage.step)} [style=dotted]" for other in stage.after]
    for number, out in enumerate(drawing.outputs):
        name, label = node(output_key(number)), _quoted(_output_words(out))
        colours = _dot_colours(states, output_key(number))
        lines.append(f"  {name} [label={label}, {colours}, shape=oval, style=filled]")
        lines.append(f"  {node(out.from_step)} -> {name} [style=bold]")
    return lines


def _dot_colours(states: Mapping[str, State], what: str) -> str:
    fill, border, text = COLOURS[states.get(what, "plain")]
    return f'fillcolor="{fill}", color="{border}", fontcolor="{text}"'


_SHAPES = {"verify": ('{{"', '"}}'), "base": ('[("', '")]')}


def _output_words(out: PlannedName) -> str:
    tags = f" [{', '.join(out.tags)}]" if out.tags else ""
    return f"{out.name}{tags}{' with memory' if out.memory else ''}"


def _entities(text: str) -> str:
    """For a quoted Mermaid label, which is HTML too: what could end it or mark it up becomes a numeric entity."""
    return re.sub(r"[^\w ./:=+-]", lambda found: f"#{ord(found[0])};", text)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
