"""A matrix: what cells have in common runs once, each cell is named, and one that fails ends no other."""

from __future__ import annotations

import io
from pathlib import Path
from xml.etree import ElementTree

import pytest

from aenv_build.commands.cells import require_all
from aenv_build.reports.events import StageFinished
from aenv_build.reports.github import GithubLines
from aenv_build.reports.junit_report import JunitReport
from aenv_build.reports.record import Recorder
from aenv_run.catalog import Catalog
from aenv_run.errors import StepFailed
from tests.unit.build_site import HEAD, BuildSite

MATRIX = (
    HEAD.replace("made", "made-{{ matrix.python }}")
    + "matrix: {python: ['3.11', '3.12', '3.13']}\nsteps:\n  - {id: tools, run: tools}\n"
    "  - {id: py, run: 'python {{ matrix.python }}'}\n  - {id: more, run: more}\n"
)


async def test_steps_that_cells_share_run_once(tmp_path: Path) -> None:
    site = BuildSite.make(tmp_path)
    cells = await site.cells(MATRIX)
    require_all(cells)
    names = [(str(each.cell), each.result.outputs[0].name) for each in cells if each.result]
    assert names == [(f"python={v}", f"made-{v}") for v in ("3.11", "3.12", "3.13")]
    ran = site.commands
    assert ran.count("tools") == 1 and ran.count("more") == 3 and len(ran) == 7
    finished = [event for event in site.told if isinstance(event, StageFinished) and event.step == "py"]
    assert sorted(str(event.cell) for event in finished) == ["python=3.11", "python=3.12", "python=3.13"]
    assert site.clean()

    before = list(site.commands)
    again = await site.cells(MATRIX.replace("'3.13'", "'3.14'"))
    assert [each.result.misses for each in again if each.result] == [0, 0, 2]
    assert site.commands[len(before) :] == ["python 3.14", "more"]


async def test_without_the_cache_all_runs_again_and_shared_steps_still_once(tmp_path: Path) -> None:
    site = BuildSite.make(tmp_path)
    await site.cells(MATRIX)
    for _ in range(2):
        site.commands.clear()
        cells = await site.cells(MATRIX, fresh=True)
        require_all(cells)
        assert sorted(set(site.commands)) == ["more", "python 3.11", "python 3.12", "python 3.13", "tools"]
        assert site.commands.count("tools") == 1 and len(site.commands) == 7
    site.commands.clear()
    await site.cells(MATRIX)
    assert site.commands == [] and site.clean()


async def test_a_cell_that_fails_ends_no_other(tmp_path: Path) -> None:
    site = BuildSite.make(tmp_path)
    site.engine.outcomes["python 3.12"] = 3
    cells = await site.cells(MATRIX)
    assert [each.error is None for each in cells] == [True, False, True]
    with pytest.raises(
        StepFailed, match=r"^1 of 3 cells failed:\ncell python=3\.12: step 'py' \(run\) exited with 3"
    ):
        require_all(cells)
    names = {entry.name for entry in Catalog(site.repository).entries()}
    assert names == {"tiny", "made-3.11", "made-3.13"} and site.clean()


async def test_reports_keep_cells_apart(tmp_path: Path) -> None:
    """Events of cells that run at once are interleaved; no report mixes them up, and only the whole is the end."""
    site = BuildSite.make(tmp_path)
    await site.cells(MATRIX)
    junit, recorder, log = JunitReport(tmp_path / "r.xml"), Recorder(), io.StringIO()
    github = GithubLines(log, {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")})
    for event in site.told:
        for sink in (junit, recorder, github):
            sink(event)
    suites = ElementTree.parse(tmp_path / "r.xml").getroot()
    assert sorted(suite.get("name", "") for suite in suites) == [
        f"made-{v} (python={v})" for v in ("3.11", "3.12", "3.13")
    ]
    assert {suite.get("tests") for suite in suites} == {"4"} and suites.get("failures") == "0"
    assert {step.state for build in recorder.builds for step in build.steps.values()} <= {"done", "cached"}
    assert (tmp_path / "summary.md").read_text().count("### aenv-build") == 3
    assert site.told[-1].event == "build_finished" and site.told[-1].cell is None
    assert "python=3.12: [3/4] py" in log.getvalue()
