"""The exit codes that docs/recipe.md lists are those that a build ends with.

130, of a build that is stopped, is that of tests/e2e/test_build.py::test_interrupt_leaves_nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aenv_build.bases import make_base_disk
from aenv_build.commands.command import command
from aenv_build.reports import events
from aenv_run.errors import AenvError, BaseUnavailable, NoSpace, all_errors
from aenv_run.types import Architecture
from tests.unit.node_site import Site
from tests.unit.pretend_build import plan_of, pretend_build

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "recipe.md").read_text()
HEAD = "version: 1\nname: codes\nbase: {snapshot: tiny}\n"
STEPS = HEAD + "steps:\n  - {id: a, run: work}\n"


def documented() -> set[int]:
    table = DOCUMENT.split("| Exit code | Meaning |")[1].split("\n\n")[0]
    return {int(code) for row in re.findall(r"^\| ([0-9, ]+) \|", table, re.MULTILINE) for code in row.split(",")}


def code_of_command(*arguments: str | Path, home: Path) -> int:
    """Of the error that ends it; ``main`` exits with that."""
    with pytest.raises(AenvError) as caught:
        command([*map(str, arguments), "--home", str(home)], standalone_mode=False)
    return caught.value.exit_code


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def test_each_documented_code_is_that_of_an_error_and_is_tested_here() -> None:
    assert documented() - {0} <= {cls.exit_code for cls in all_errors()}
    assert documented() == {0, 1, 64, 66, 68, 69, 71, 72, 73, 130}


def test_wrong_words_and_what_does_not_exist(tmp_path: Path) -> None:
    home = tmp_path / "home"
    recipe = write(tmp_path, STEPS)
    assert code_of_command(recipe, home=home) == 66  # the base's snapshot
    assert code_of_command(tmp_path / "none.yaml", home=home) == 66
    assert code_of_command(write(tmp_path, STEPS + "step: []\n"), home=home) == 64
    argv = [sys.executable, "-m", "aenv_build.cli", str(recipe), "--no-such-option"]
    assert subprocess.run(argv, cwd=ROOT, capture_output=True, check=False).returncode == 64


def test_the_variable_of_the_node_chooses_the_engine_of_a_build_too(tmp_path: Path) -> None:
    recipe = write(tmp_path, HEAD.replace("snapshot: tiny", "empty: true"))
    argv = [sys.executable, "-m", "aenv_build.cli", str(recipe), "--home", str(tmp_path / "home")]
    environment = {**os.environ, "AENV_DRIVER": "nothing"}
    ended = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, check=False, text=True)
    assert ended.returncode == 64 and "no driver is called 'nothing'" in ended.stderr


async def test_built_and_failed(site: Site, tmp_path: Path) -> None:
    recipe = write(tmp_path, STEPS)
    site.engine.outcomes["work"] = 7
    assert await code_of(site, recipe) == 1
    site.engine.outcomes["work"] = 0
    assert await code_of(site, recipe) == 0
    recipe = write(tmp_path, STEPS.replace("run: work", "verify: work"))
    site.engine.outcomes["work"] = 7
    assert await code_of(site, recipe) == 1


async def test_machines(site: Site, tmp_path: Path) -> None:
    recipe = write(tmp_path, STEPS)
    site.engine.fail_launches.add(0)
    assert await code_of(site, recipe) == 71

    def die(event: events.BuildEvent) -> None:
        if isinstance(event, events.StageOutput):
            for machine in site.engine.machines.values():
                machine.end("signal 9")

    assert await code_of(site, recipe, die) == 72
    site.engine.fail_capture = NoSpace("no room")
    assert await code_of(site, recipe) == 73


async def code_of(site: Site, recipe: Path, *sinks: events.Sink) -> int:
    try:
        await pretend_build(site, recipe, sinks)
    except AenvError as error:
        return error.exit_code
    return 0


async def test_a_driver_that_cannot(site: Site, tmp_path: Path) -> None:
    recipe = write(tmp_path, STEPS + "outputs: [{memory: true}]\n")
    site.engine.caps = type(site.engine.caps)(
        memory_snapshot=False, live_capture=False, shares_memory=False, native_speed=False
    )
    assert await code_of(site, recipe) == 69


async def test_no_base(site: Site, tmp_path: Path) -> None:
    """An archive that is none."""
    (tmp_path / "root.tar").write_bytes(b"no archive" * 1000)
    plan = plan_of(site, write(tmp_path, HEAD.replace("{snapshot: tiny}", "{archive: root.tar}")))
    (tmp_path / "scratch").mkdir()
    with pytest.raises(BaseUnavailable) as caught:
        await make_base_disk(plan, Architecture("amd64"), tmp_path / "scratch")
    assert caught.value.exit_code == 68
