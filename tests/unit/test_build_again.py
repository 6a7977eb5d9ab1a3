"""When a step runs again: another try of one that failed, and a result that is too old."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta
from pathlib import Path
from xml.etree import ElementTree

import pytest

from aenv_build.cache.known import Freshness, parse_since
from aenv_build.reports.events import StageHit, StageRetried, StageStarted
from aenv_build.reports.junit_report import JunitReport
from aenv_build.reports.progress import PlainLines
from aenv_run.check import check
from aenv_run.errors import InvalidInput, SandboxDead, StepFailed
from aenv_run.types import StageKey
from tests.unit.build_site import HEAD, BuildSite

KEY = StageKey("0" * 64)
RECIPE = HEAD + "steps:\n  - {id: fetch, run: fetch, retry: 2}\n  - {id: work, run: work}\n"


# -- retry ---------------------------------------------------------------------------------------------------


async def test_a_step_is_tried_again_on_a_fresh_machine(tmp_path: Path) -> None:
    site = BuildSite.make(tmp_path)
    site.engine.first_outcomes["fetch"] = [7, "deadline_exceeded"]
    await site.build(RECIPE, retry_wait_s=0.0)
    assert site.commands == ["fetch", "fetch", "fetch", "work"]
    disks = site.engine.disks[:3]
    assert len(disks) == 3 and len(set(disks)) == 1, "each try starts from the same state"
    tries = [event for event in site.told if isinstance(event, StageRetried)]
    assert [(event.attempt, event.of) for event in tries] == [(1, 3), (2, 3)]
    assert "exited with 7" in tries[0].message and site.clean()

    log, report = PlainLines(io.StringIO()), JunitReport(tmp_path / "r.xml")
    for event in site.told:
        report(event)
    shown = [line for event in tries for line in log.lines(event)]
    assert shown[0] == "  fetch: attempt 1 of 3: step 'fetch' (run) exited with 7; its last output:"
    (case,) = [c for c in ElementTree.parse(tmp_path / "r.xml").iter("testcase") if c.get("name") == "fetch"]
    assert len(case.findall("flakyFailure")) == 2 and case.find("failure") is None


async def test_the_last_try_decides(tmp_path: Path) -> None:
    site = BuildSite.make(tmp_path)
    site.engine.outcomes["fetch"] = 7
    with pytest.raises(StepFailed, match="exited with 7"):
        await site.build(RECIPE, retry_wait_s=0.0)
    assert site.commands == ["fetch"] * 3 and site.clean()
    report = JunitReport(tmp_path / "r.xml")
    for event in site.told:
        report(event)
    site.commands.clear()
    with pytest.raises(StepFailed):
        await site.build(RECIPE.replace(", retry: 2", ""), retries=1, retry_wait_s=0.0)
    assert site.commands == ["fetch"] * 2, "--retry is for steps that do not say it"
    with pytest.raises(StepFailed):
        await site.build(RECIPE.replace("retry: 2", "retry: 0"), retries=1, retry_wait_s=0.0)
    assert site.commands == ["fetch"] * 3


async def test_a_machine_that_dies_is_not_tried_again(tmp_path: Path) -> None:
    site = BuildSite.make(tmp_path)
    site.engine.deadly.add("fetch")
    with pytest.raises(SandboxDead, match="its process ended"):
        await site.build(RECIPE, retry_wait_s=0.0)
    assert site.commands == ["fetch"] and not any(isinstance(event, StageRetried) for event in site.told)


# -- ttl, --since --------------------------------------------------------------------------------------------

AGING = (
    HEAD
    + """
steps:
  - {id: before, run: before}
  - {id: index, run: index, ttl: 7d}
  - {id: use, run: use}
  - {id: check, verify: check}
  - {id: aside, needs: [before], run: aside}
outputs: [{from: use, name: used}, {from: aside, name: aside}]
"""
)


def steps(site: BuildSite, kind: type) -> dict[str, str]:
    return {event.step: event.why for event in site.told if isinstance(event, kind)}


async def test_a_result_that_is_too_old_is_made_again_with_all_that_stands_on_it(tmp_path: Path) -> None:
    site = BuildSite.make(tmp_path)
    first = await site.build(AGING)
    now = datetime.now(UTC)
    site.commands.clear()
    same = await site.build(AGING, clock=lambda: now + timedelta(days=6))
    assert site.commands == [] and same.misses == 0

    site.told.clear()
    later = await site.build(AGING, clock=lambda: now + timedelta(days=8))
    assert sorted(site.commands) == ["check", "index", "use"]
    assert steps(site, StageStarted) == {
        "index": "older than 7d",
        "use": "the state it starts from is made again",
        "check": "the state it starts from is made again",
    }
    assert set(steps(site, StageHit)) == {"base", "before", "aside"}
    before, after = ([out.snapshot.id for out in each.outputs] for each in (first, later))
    assert before[0] != after[0] and before[1] == after[1]
    site.commands.clear()
    assert (await site.build(AGING, clock=lambda: now + timedelta(days=9))).misses == 0


async def test_a_build_that_failed_between_does_not_leave_old_states_in_use(tmp_path: Path) -> None:
    site = BuildSite.make(tmp_path)
    await site.build(AGING)
    later = datetime.now(UTC) + timedelta(days=8)
    site.engine.first_outcomes["use"] = [1]
    with pytest.raises(StepFailed):
        await site.build(AGING, clock=lambda: later)
    site.commands.clear()
    site.told.clear()
    await site.build(AGING, clock=lambda: later + timedelta(minutes=1))
    assert sorted(site.commands) == ["check", "use"]
    assert steps(site, StageStarted)["use"] == "the state it starts from was made again"


async def test_since_makes_everything_of_before_anew(tmp_path: Path) -> None:
    site = BuildSite.make(tmp_path)
    await site.build(AGING)
    site.commands.clear()
    await site.build(AGING, since=datetime.now(UTC))
    assert sorted(site.commands) == ["aside", "before", "check", "index", "use"]
    site.commands.clear()
    assert (await site.build(AGING, since=datetime.now(UTC) - timedelta(days=1))).misses == 0


async def test_salt_is_another_key_and_a_ttl_is_not(tmp_path: Path) -> None:
    site = BuildSite.make(tmp_path)
    (plain,), (salted,), (aging,) = (
        site.plans(HEAD + f"steps: [{{id: a, run: x{more}}}]\n")
        for more in ("", ", salt: '1'", ", ttl: 1h, retry: 1")
    )
    assert plain.stages["a"].key == aging.stages["a"].key != salted.stages["a"].key


def test_dates() -> None:
    assert parse_since("2026-11-30") == datetime(2026, 11, 30, tzinfo=UTC)
    assert parse_since("2026-11-30T12:30:00+02:00") == datetime(2026, 11, 30, 10, 30, tzinfo=UTC)
    week = parse_since("7d")
    assert week is not None and abs(datetime.now(UTC) - week - timedelta(days=7)) < timedelta(minutes=1)
    with pytest.raises(InvalidInput, match="not a date"):
        parse_since("yesterday")
    assert Freshness(datetime.now(UTC)).too_old(KEY, None, datetime(1970, 1, 1, tzinfo=UTC)) == ""


# -- a result that is not whole ------------------------------------------------------------------------------


async def test_a_result_that_lacks_a_file_is_built_again(tmp_path: Path) -> None:
    site = BuildSite.make(tmp_path)
    recipe = HEAD + "steps:\n  - {id: fetch, run: fetch}\n  - {id: work, run: work}\n"
    first = await site.build(recipe)
    lost = first.outputs[0].snapshot.disk[-1]
    (site.home.repository / site.repository.blob_key(lost.digest)).unlink()
    assert [problem.kind for problem in check(site.repository).problems] == ["missing_blob"]
    site.commands.clear()
    again = await site.build(recipe)
    assert site.commands == ["work"], "only the step whose result it was"
    for blob in again.outputs[0].snapshot.blobs():
        site.repository.require_blob(blob)
    site.commands.clear()
    await site.build(recipe)
    assert not site.commands and site.clean()
