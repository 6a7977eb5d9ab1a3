"""What the README shows is true as it stands there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import click
import pytest

from aenv_build.language.load import load
from aenv_build.planning.keys import HostFacts
from aenv_build.planning.plan import make_plan
from aenv_run.cli.command import cli
from aenv_run.types import Architecture, Digest
from tests.style.source import ROOT

README = (ROOT / "README.md").read_text()
FACTS = HostFacts(Architecture("amd64"), Digest("sha256:" + "0" * 64))


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where somebody who follows the README stands: the files that it writes, and its recipe."""
    (files,) = [block for block in blocks("sh") if "<<" in block]
    subprocess.run(["sh", "-euc", files], cwd=tmp_path, check=True)
    (recipe,) = blocks("yaml")
    (tmp_path / "recipe.yaml").write_text(recipe)
    return tmp_path


def test_the_recipe_plans_with_the_files_that_are_shown(folder: Path) -> None:
    plan = make_plan(load(folder / "recipe.yaml"), FACTS)
    assert list(plan.stages) == ["source", "bug"]
    assert [(out.name, out.memory) for out in plan.outputs] == [("calc", True)]


def test_the_program_fails_its_test_and_one_of_the_fixes_passes_it(folder: Path) -> None:
    (python,) = blocks("python")
    compile(python, "README.md", "exec")
    (fixes,) = re.findall(r"^FIXES = (\[.*\])$", python, re.MULTILINE)
    check = "from test_calc import test_add; test_add()"

    def passes() -> bool:
        # -B: a .pyc of the same second and size would be taken for the new file's.
        return subprocess.run(["python3", "-B", "-c", check], cwd=folder / "calc", check=False).returncode == 0

    assert not passes()
    results = []
    for fix in re.findall(r'"(.*?)"', fixes):
        (folder / "calc/calc.py").write_text(f"def add(a, b):\n    return {fix}\n")
        results.append(passes())
    assert results == [True, False]


def test_programs_that_the_example_runs_are_in_its_recipe() -> None:
    (python,), (recipe,) = blocks("python"), blocks("yaml")
    for program in re.findall(r"\b(git|patch|make|gcc|curl)\b", python):
        assert program in recipe, f"the recipe installs no {program}"


def test_the_commands_exist() -> None:
    for block in blocks("sh"):
        for words in re.findall(r"\baenv ([a-z]+)(?: ([a-z]+))?", block):
            command = cli.get_command(click.Context(cli), words[0])
            assert command is not None, words
            if isinstance(command, click.Group):
                assert words[1] in command.commands, words


def test_documents_that_are_named_exist() -> None:
    for target in re.findall(r"\]\((docs/[^)#]*)\)", README):
        assert (ROOT / target).exists(), target
