"""``aenv-build graph``: what the picture has, and that no text of a recipe is markup of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aenv_build.cache.known import look_up
from aenv_build.cache.ledger import Ledger
from aenv_build.commands.graph_command import states_of
from aenv_build.reports.events import Place, PlannedName, PlannedStage
from aenv_build.reports.picture import Drawing, dot, drawing_of, mermaid
from aenv_run.errors import AenvError, StepFailed
from aenv_run.graphviz import svg
from tests.unit.node_site import Site
from tests.unit.pretend_build import plan_of, pretend_build

RECIPE = """\
version: 1
name: shop
base: {snapshot: tiny}
steps:
  - {id: deps, run: install}
  - {id: app, run: compile}
  - {id: where, workdir: /srv}
  - {id: side, needs: [deps], copy: {from: {step: app, path: /a}, to: /b}}
  - {id: tests, needs: [app, side], verify: check}
outputs:
  - {from: where, memory: true}
"""


def test_every_step_edge_and_output_is_there(site: Site, recipe: Path) -> None:
    drawing = drawing_of(plan_of(site, recipe))
    picture = mermaid((drawing, {"base": "hit", "app": "failed"}))
    lines = [line.strip() for line in picture.splitlines()]
    assert lines[:13] == [
        "flowchart TD",
        's0[("base<br/>snapshot tiny")]:::hit',
        's1["deps<br/>run install"]:::plain',
        's2["app<br/>run compile"]:::failed',
        's3["where<br/>workdir /srv"]:::plain',
        's4["side<br/>copy app:/a -#62; /b"]:::plain',
        's5{{"tests<br/>verify check"}}:::plain',
        "s0 --> s1",
        "s1 --> s2",
        "s2 --> s3",
        "s1 --> s4",
        "s2 -.-> s4",
        "s2 -.-> s5",
    ]
    assert lines[13:16] == ["s4 -.-> s5", 'o0(["shop #91;latest#93; with memory"]):::plain', "s3 ==> o0"]
    graphviz = dot((drawing, {}))
    assert '"deps" -> "app"' in graphviz and '"app" -> "tests" [style=dashed]' in graphviz
    assert '"where" -> "output 0" [style=bold]' in graphviz


async def test_colours_are_what_the_cache_has(site: Site, recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("copy: {from: {step: app, path: /a}, to: /b}", "run: more"))
    site.engine.outcomes["check"] = 1
    with pytest.raises(StepFailed):
        await pretend_build(site, recipe)
    plan = plan_of(site, recipe)
    known = look_up(plan, Ledger(site.tools.repository), site.tools.repository)
    states = states_of(plan, known)
    assert {"base": "hit", "deps": "hit", "app": "hit", "tests": "miss"}.items() <= states.items()
    assert "where" not in states


def test_cells_are_boxes_beside_each_other() -> None:
    drawings = [(Drawing("r", (stage("base", "b"),), (), f"python=3.{minor}"), {}) for minor in (11, 12)]
    picture, graphviz = mermaid(*drawings), dot(*drawings)
    assert 'subgraph g0["python=3.11"]' in picture and 'subgraph g1["python=3.12"]' in picture
    assert "g0s0" in picture and "g1s0" in picture and picture.count("classDef hit") == 1
    assert 'label="python=3.12"' in graphviz and '"1 base" [' in graphviz


def stage(step: str, what: str) -> PlannedStage:
    place = Place(file="r", line=1, column=1)
    return PlannedStage(step=step, verb="run", what=what, parent=None, key="k", place=place)


def test_text_is_no_markup() -> None:
    evil = '"]; click s0 "javascript:x" <img src=x> `` ### %% \\" ; end'
    names = (PlannedName(name=evil, from_step="base", memory=False, tags=()),)
    drawing = Drawing("r", (stage("base", evil),), names)
    (label,) = re.findall(r'^  s0\["(.*)"\]:::plain$', mermaid((drawing, {})), re.MULTILINE)
    assert not re.search(r'["`<>%\\\[\];]', re.sub(r"#\d+;|<br/>", "", label))
    for line in dot((drawing, {})).splitlines():
        assert len(re.findall(r'(?<!\\)(?:\\\\)*"', line)) % 2 == 0, line


async def test_svg_comes_from_graphviz_or_says_that_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AenvError, match="dot is not installed"):
        await svg("digraph {}")
    program = tmp_path / "dot"
    program.write_text('#!/bin/sh\nread text\necho "<svg>$1 $text</svg>"\n')
    program.chmod(0o755)
    assert await svg("digraph {}\n") == b"<svg>-Tsvg digraph {}</svg>\n"
