"""Every ready recipe is one to trust: it plans, says what it is for, and proves that it works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aenv_build.language.load import load
from aenv_build.planning.keys import HostFacts
from aenv_build.planning.plan import make_plan
from aenv_build.planning.schedule import state_of
from aenv_run.types import Architecture, Digest

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
FACTS = HostFacts(Architecture("amd64"), Digest("sha256:" + "0" * 64))


def test_there_are_at_least_ten() -> None:
    assert len(RECIPES) >= 10


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_plans_and_proves_what_it_names(path: Path) -> None:
    source = load(path)
    plan = make_plan(source, FACTS)
    assert source.recipe.name == path.stem and [out.name for out in plan.outputs] == [path.stem]
    verified = {stage.parent for stage in plan.stages.values() if stage.step.verb == "verify"}
    for out in plan.outputs:
        # The very state that gets the name was judged, not one before it.
        assert state_of(plan, out.state) in {state_of(plan, parent) for parent in verified}, out.name
        assert out.labels and out.output.tags and out.memory


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_says_what_it_is_for(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert re.fullmatch(r"# [A-Z].{20,110}[.]", first), first


def test_the_readme_lists_them() -> None:
    table = (ROOT / "README.md").read_text().split("## Ready recipes")[1].split("\n## ")[0]
    assert re.findall(r"^\| \[`(.+?)`\]\(recipes/(.+?)\.yaml\) \|", table, re.MULTILINE) == [
        (path.stem, path.stem) for path in RECIPES
    ]
