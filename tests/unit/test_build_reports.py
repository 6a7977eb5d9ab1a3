"""What CI gets of a build: an event stream, a JUnit report, GitHub's log and summary, a picture of the graph."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pydantic import TypeAdapter

from aenv_build.reports import events
from aenv_build.reports.ending import Telling, place_in
from aenv_build.reports.github import GithubLines
from aenv_build.reports.junit_report import JunitReport
from aenv_build.reports.progress import JsonLines
from aenv_build.reports.record import Recorder
from aenv_build.reports.workflow_commands import command, harmless
from aenv_build.running.execute import build
from aenv_run.errors import AenvError, StepFailed
from tests.unit.node_site import Site
from tests.unit.pretend_build import plan_of, pretend_build, workshop

RECIPE = """\
version: 1
name: shop
base: {snapshot: tiny}
steps:
  - {id: deps, run: install}
  - {id: who, user: app}
  - {id: app, needs: [deps], run: compile}
  - {id: side, needs: [deps], run: "::add-mask::side"}
  - {id: tests, needs: [app], verify: check}
outputs:
  - {from: app, memory: true}
"""
READER: TypeAdapter[events.BuildEvent] = TypeAdapter(events.BuildEvent)


async def run(site: Site, recipe: Path, *sinks: events.Sink) -> None:
    """As the command does it: whatever ends the build is told."""
    telling = Telling(*sinks)
    with telling.to_the_end():
        await build(plan_of(site, recipe), workshop(site, telling))


# -- events ------------------------------------------------------------------------------------------------


async def test_every_line_of_a_build_is_an_event_of_the_schema(site: Site, recipe: Path) -> None:
    out = io.StringIO()
    await run(site, recipe, JsonLines(out))
    site.engine.outcomes["check"] = 3
    recipe.write_text(RECIPE.replace("verify: check", "verify: {run: check, exit_code: 1}"))
    with pytest.raises(StepFailed):
        await run(site, recipe, JsonLines(out))
    lines = out.getvalue().splitlines()
    told = [READER.validate_json(line, strict=True) for line in lines]
    assert [event.model_dump_json() for event in told] == lines
    firsts = [event for event in told if isinstance(event, events.BuildStarted)]
    assert [(first.version, first.total, first.hits) for first in firsts] == [(1, 5, 1), (1, 5, 4)]
    assert told[0] is firsts[0] and isinstance(told[-1], events.BuildFailed)
    assert {event.event for event in told} == {  # all there are, but notes of other builds and retries
        kind["properties"]["event"]["const"]
        for name, kind in READER.json_schema()["$defs"].items()
        if "event" in kind["properties"] and name not in {"StageNote", "StageRetried"}
    }


async def test_the_first_event_has_the_graph_with_its_places(site: Site, recipe: Path) -> None:
    told: list[events.BuildEvent] = []
    await run(site, recipe, told.append)
    first = told[0]
    assert isinstance(first, events.BuildStarted)
    assert [(stage.step, stage.verb, stage.parent, stage.place.line) for stage in first.stages] == [
        ("base", "base", None, 3),
        ("deps", "run", "base", 5),
        ("who", "user", "deps", 6),
        ("app", "run", "deps", 7),
        ("side", "run", "deps", 8),
        ("tests", "verify", "app", 9),
    ]
    assert [(out.name, out.from_step, out.memory) for out in first.outputs] == [("shop", "app", True)]


async def test_a_failure_has_its_place(site: Site, recipe: Path) -> None:
    told: list[events.BuildEvent] = []
    site.engine.outcomes["compile"] = 2
    with pytest.raises(StepFailed):
        await run(site, recipe, told.append)
    last = told[-1]
    assert isinstance(last, events.BuildFailed) and last.place is not None
    assert (last.code, last.exit_code, last.place.line) == ("step_failed", 1, 7)
    assert place_in("a/b.yaml:3:7: no") == events.Place(file="a/b.yaml", line=3, column=7)
    assert place_in("step 'x' failed: a:1:2: no") is None


# -- JUnit -------------------------------------------------------------------------------------------------


def cases(path: Path) -> dict[str, ElementTree.Element]:
    return {case.get("name", ""): case for case in ElementTree.parse(path).iter("testcase")}


def verdicts(path: Path) -> dict[str, str]:
    """The tag that says how each ended: failure, error or skipped; else passed."""
    tags = ("failure", "error", "skipped")
    return {
        name: next((tag for tag in tags if case.find(tag) is not None), "passed")
        for name, case in cases(path).items()
    }


async def test_junit_of_a_build_and_of_a_cached_one(site: Site, recipe: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.xml"
    for _ in range(2):
        await run(site, recipe, JunitReport(path))
        assert verdicts(path) == dict.fromkeys(["base", "deps", "app", "side", "tests"], "passed")
    tests = cases(path)["tests"]
    assert (tests.get("classname"), tests.get("line"), tests.get("time")) == ("shop.verify", "9", "0.000")
    assert "cached" in (tests.findtext("system-out") or "")
    assert [path.name for path in tmp_path.glob("*.xml*")] == ["out.xml"]


async def test_junit_of_a_failed_verify(site: Site, recipe: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.xml"
    recipe.write_text(RECIPE.replace("needs: [app], verify", "needs: [app, side], verify"))
    site.engine.outcomes["check"] = 3
    with pytest.raises(StepFailed):
        await run(site, recipe, JunitReport(path))
    assert verdicts(path)["tests"] == "failure" and verdicts(path)["app"] == "passed"
    failure = cases(path)["tests"].find("failure")
    assert failure is not None and "exited with 3, not 0" in str(failure.get("message"))
    assert "said by check" in str(failure.text)
    root = ElementTree.parse(path).getroot()
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("5", "1", "0")


async def test_junit_of_a_machine_that_dies_and_of_what_it_leaves_undone(
    site: Site, recipe: Path, tmp_path: Path
) -> None:
    path = tmp_path / "out.xml"
    site.engine.fail_launches.add(0)
    with pytest.raises(AenvError):
        await run(site, recipe, JunitReport(path))
    assert verdicts(path) == {
        "base": "passed",
        "deps": "error",
        "app": "skipped",
        "side": "skipped",
        "tests": "skipped",
    }


async def test_junit_of_an_interrupted_build(site: Site, recipe: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.xml"
    site.engine.command_gate = asyncio.Event()
    begun = asyncio.Event()

    def watch(event: events.BuildEvent) -> None:
        if isinstance(event, events.StageStarted):
            begun.set()

    task = asyncio.create_task(run(site, recipe, JunitReport(path), watch))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (verdicts(path)["deps"], verdicts(path)["tests"]) == ("error", "skipped")


def test_junit_of_what_has_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "out.xml"
    telling = Telling(JunitReport(path))
    with pytest.raises(AenvError), telling.to_the_end():
        raise AenvError("recipe.yaml:4:2: unknown key \x1b[31m", fix="write it right")
    error = cases(path)["build"].find("error")
    assert error is not None and "unknown key" in str(error.get("message")) and "\x1b" not in path.read_text()
    assert cases(path)["build"].get("line") == "4"


def test_junit_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(AenvError, match="JUnit"):
        JunitReport(tmp_path / "none" / "out.xml").check()


# -- GitHub ------------------------------------------------------------------------------------------------


def obeyed(log: str) -> Iterator[tuple[str, str]]:
    """Name and data of each command that the runner would obey: as its source reads a line, stops kept to."""
    stopped = ""
    for line in log.splitlines():
        found = re.match(r"\s*::([^ :]+)(?: [^:]*(?:::?[^:]+)*?)?::(.*)", line)
        old = re.search(r"##\[([^ \]]+)[^\]]*\](.*)", line)
        name, data = (found[1], found[2]) if found else (old[1], old[2]) if old else ("", "")
        if stopped:
            stopped = "" if name == stopped else stopped
        elif name:
            stopped = data if name == "stop-commands" else ""
            yield name, data


EVIL = ("::set-env name=PATH::/evil", "  ::add-mask::x", "text ##[add-path]/evil", "\u034f::set-output name=a::b")


async def test_github_log(site: Site, recipe: Path, tmp_path: Path) -> None:
    out, summary = io.StringIO(), tmp_path / "summary"
    summary.write_text("before\n")
    site.engine.outcomes["check"] = 3
    environment = {"GITHUB_WORKSPACE": str(tmp_path), "GITHUB_STEP_SUMMARY": str(summary)}
    with pytest.raises(StepFailed):
        await run(site, recipe, GithubLines(out, environment))
    log = out.getvalue()
    names = [name for name, _ in obeyed(log)]
    assert names.count("group") == names.count("endgroup") == names.count("stop-commands") == 4
    assert names[-1] == "error" and set(names) == {"group", "endgroup", "stop-commands", "error"}
    assert "::error file=shop.yaml,line=9,col=5,title=aenv-build%3A step_failed::step 'tests' (verify)" in log
    assert "  tests | said by check" in log
    text = summary.read_text()
    assert text.startswith("before\n### aenv-build shop\n") and "```mermaid\nflowchart TD\n" in text
    assert "| <code>tests</code> | <code>verify check</code> | ❌ failed |" in text
    assert "| <code>app</code> | <code>run compile</code> | ✅ built |" in text


def started(*steps: str) -> events.BuildStarted:
    place = events.Place(file="r.yaml", line=1, column=1)
    stages = tuple(
        events.PlannedStage(step=step, verb="run", what="run x", parent=None, key="k", place=place)
        for step in steps
    )
    return events.BuildStarted(recipe="r", total=2, hits=0, driver="d", why="w", stages=stages)


def test_no_text_of_others_commands_the_runner(tmp_path: Path) -> None:
    out, summary = io.StringIO(), tmp_path / "summary"
    sink = GithubLines(out, {"GITHUB_STEP_SUMMARY": str(summary)}, token=lambda: "secret")
    sink(started("a"))
    for text in EVIL:
        sink(events.StageStarted(step="a", position=1, what=text, why=text))
        sink(events.StageOutput(step="a", text=text))
        sink(events.StageNote(step="a", text=text))
        sink(events.StageHit(step="other", position=1, what=text, why=text))
        sink(events.StageFailed(step="a", position=1, what=text, message=text))
    message = "\n".join(EVIL)
    sink(events.BuildFailed(code="step_failed", exit_code=1, message=message, fix=message))
    names = {name for name, _ in obeyed(out.getvalue())}
    assert names == {"group", "stop-commands", "endgroup", "error"}
    # Not even where nothing told the runner to stop.
    assert not list(obeyed(harmless(message)))
    assert not list(obeyed("\n".join(harmless(f"error: {line}") for line in EVIL)))
    json_lines = io.StringIO()
    JsonLines(json_lines)(events.StageOutput(step="a", text=EVIL[2]))
    assert not list(obeyed(json_lines.getvalue())) and json.loads(json_lines.getvalue())["text"] == EVIL[2]
    # Nor is it markup of the summary: its lines stand in the fence.
    assert summary.read_text().count("```") == 4


def test_steps_that_run_at_once_have_a_group_each() -> None:
    out = io.StringIO()
    sink = GithubLines(out, {}, token=lambda: "t")
    sink(started("a", "b"))
    for step in ("a", "b"):
        sink(events.StageStarted(step=step, position=1, what="run x", why=""))
    for step in ("b", "a", "b"):
        sink(events.StageOutput(step=step, text=f"of {step}"))
    sink(events.StageFinished(step="b", position=2, what="run x", milliseconds=5))
    sink(events.StageHit(step="c", position=3, what="run c", why="cached"))
    sink(events.StageOutput(step="a", text="more of a"))
    sink(events.StageFinished(step="a", position=1, what="run x", milliseconds=7))
    lines = [line.strip() for line in out.getvalue().splitlines()[1:]]
    assert lines == [
        "::group::a: run x", "::stop-commands::t", "[1/2] a  run x …", "a | of a", "a | more of a",
        "[1/2] a  run x  done in 0.0 s", "::t::", "::endgroup::", "[3/2] c  run c  cached",
        "::group::b: run x (ran beside the one before)", "::stop-commands::t", "[1/2] b  run x …", "b | of b",
        "b | of b", "[2/2] b  run x  done in 0.0 s", "::t::", "::endgroup::",
    ]  # fmt: skip


def test_commands_are_escaped() -> None:
    assert command("error", "a\nb%", file="x:y,z", line="3") == "::error file=x%3Ay%2Cz,line=3::a%0Ab%25"


# -- the record --------------------------------------------------------------------------------------------


async def test_a_record_of_two_builds(site: Site, recipe: Path) -> None:
    recorder = Recorder()
    for _ in range(2):
        await pretend_build(site, recipe, [recorder])
    states = [[step.state for step in build.steps.values()] for build in recorder.builds]
    assert states == [["cached", "done", "done", "done", "done"], ["cached"] * 5]
    assert [out.name for build in recorder.builds for out in build.outputs] == ["shop", "shop"]
