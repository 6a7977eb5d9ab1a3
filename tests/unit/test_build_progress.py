"""What people and machines see of a build."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from rich.console import Console

from aenv_build.commands.command import command
from aenv_build.reports import events
from aenv_build.reports.live_tree import LiveTree
from aenv_build.reports.progress import JsonLines, PlainLines
from aenv_build.reports.wording import seconds, size
from aenv_run.errors import NotFound
from aenv_run.types import SnapshotId

SNAPSHOT = SnapshotId("ab" * 32)
STORY: list[events.BuildEvent] = [
    events.BuildStarted(recipe="r", total=3, hits=1, driver="qemu", why="it works"),
    events.StageHit(step="base", position=1, what="archive a", why="cached", snapshot_id=SNAPSHOT),
    events.StageStarted(step="a", position=2, what="run a", why="changed: run"),
    events.StageOutput(step="a", text="[red]not markup"),
    events.StageFinished(step="a", position=2, what="run a", milliseconds=3210, snapshot_id=SNAPSHOT),
    events.StageFailed(step="b", position=3, what="verify b", message="no"),
    events.OutputPublished(name="r", version="4", tags=("latest",), snapshot_id=SNAPSHOT, fresh=True),
]


def test_plain_lines() -> None:
    out = io.StringIO()
    sink = PlainLines(out, explain=True)
    for event in STORY:
        sink(event)
    assert out.getvalue().splitlines() == [
        "r: 3 stages, 1 cached; driver qemu: it works",
        "[1/3] base  archive a  cached",
        "[2/3] a  run a …  (changed: run)",
        "  a | [red]not markup",
        "[2/3] a  run a  done in 3.2 s",
        "[3/3] b  verify b  FAILED",
        "r:4 [latest] = abababababab",
    ]


def test_json_lines() -> None:
    out = io.StringIO()
    for event in STORY:
        JsonLines(out)(event)
    parsed = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [event["event"] for event in parsed][:3] == ["build_started", "stage_hit", "stage_started"]
    assert parsed[3] == {"event": "stage_output", "step": "a", "text": "[red]not markup"}


def test_live_tree_keeps_finished_stages_and_drops_output() -> None:
    out = io.StringIO()
    with LiveTree(Console(file=out, force_terminal=True, width=80)) as tree:
        for event in STORY:
            tree(event)
    text = out.getvalue()
    assert "done in 3.2 s" in text and "verify b  FAILED" in text and "r:4" in text


def test_units() -> None:
    assert [seconds(ms) for ms in (40, 3_249, 99_949, 100_000, 125_400)] == [
        "0.0 s", "3.2 s", "99.9 s", "1 min 40 s", "2 min 05 s",
    ]  # fmt: skip
    assert [size(value) for value in (5, 2048, 3 << 20, 5 << 30)] == ["5 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]


def test_help_has_examples_and_exit_codes() -> None:
    for arguments in ([], ["--help"], ["build", "--help"]):
        text = CliRunner().invoke(command, arguments).output
        assert "aenv-build recipe.yaml --plan --explain" in text and "130 interrupted" in text


def test_the_word_build_may_be_left_out(tmp_path: Path) -> None:
    for arguments in (["none.yaml", "--plan"], ["--plan", "none.yaml"], ["build", "--plan", "none.yaml"]):
        with pytest.raises(NotFound, match=r"none\.yaml: no such recipe"):
            CliRunner().invoke(command, arguments, catch_exceptions=False)


@pytest.mark.parametrize(
    ("words", "incomplete", "offered"),
    [([], "bu", "build"), ([], "", "file"), ([], "--pl", "--plan"), (["r.yaml"], "--ex", "--explain")],
)
def test_completion_knows_the_plain_form(words: list[str], incomplete: str, offered: str) -> None:
    found = ShellComplete(command, {}, "aenv-build", "X").get_completions(words, incomplete)
    assert offered in [item.value for item in found] + [item.type for item in found]
