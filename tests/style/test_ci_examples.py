"""The workflows to copy are well-formed, and what they run exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from aenv_build.commands.build_command import build_recipe
from aenv_run.cli.command import cli
from tests.style.source import ROOT

EXAMPLES = sorted((ROOT / "examples" / "ci").glob("*.yml"))


def read(path: Path) -> dict[str, object]:
    """The file, every key once, GitHub's `on` as it is written."""

    class Strict(yaml.SafeLoader):
        """No key twice, and words are text."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
            keys = [key.value for key, _ in node.value]
            assert len(keys) == len(set(keys)), f"{path.name}:{node.start_mark.line + 1}: a key stands twice"
            return dict(super().construct_mapping(node, deep))

    Strict.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if not tag.endswith(":bool") or first in "tTfF"]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    loaded = yaml.load(path.read_text(), Strict)
    assert isinstance(loaded, dict)
    return loaded


def commands(value: object) -> Iterator[str]:
    """Every line of a `run` or `script`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in {"run", "script"}:
                lines = inner if isinstance(inner, list) else [inner]
                yield from (line for text in lines for line in str(text).splitlines())
            else:
                yield from commands(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from commands(inner)


def test_there_are_examples() -> None:
    assert [path.name for path in EXAMPLES] == ["github.yml", "gitlab-ci.yml"]


def test_github_has_the_shape_of_a_workflow() -> None:
    workflow = read(ROOT / "examples/ci/github.yml")
    assert {"name", "on", "permissions", "jobs"} <= workflow.keys()
    jobs = workflow["jobs"]
    assert isinstance(jobs, dict)
    for job in jobs.values():
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step
            assert re.fullmatch(r"[\w-]+/[\w-]+(/[\w-]+)?@v\d+", step.get("uses", "a/b@v1")), step
            # What a branch or a user is called must not become part of a script.
            assert not re.search(r"\$\{\{ *github\.(head_ref|event|actor|ref_name)", step.get("run", "")), step


def test_gitlab_has_the_shape_of_a_pipeline() -> None:
    pipeline = read(ROOT / "examples/ci/gitlab-ci.yml")
    stages = pipeline["stages"]
    jobs = {name: job for name, job in pipeline.items() if isinstance(job, dict) and "script" in job}
    assert isinstance(stages, list) and [job["stage"] for job in jobs.values()] == stages
    assert all(job["extends"] in pipeline for job in jobs.values())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_what_they_run_exists(path: Path) -> None:
    text = path.read_text()
    ran = [shlex.split(line) for line in commands(read(path))]
    builds = [words[words.index("aenv-build") :] for words in ran if "aenv-build" in words]
    assert builds
    known = {option for parameter in build_recipe.params for option in parameter.opts}
    for words in builds:
        assert {word for word in words if word.startswith("-")} <= known, words
    for words in (words[words.index("aenv") + 1 :] for words in ran if "aenv" in words):
        command: click.Command | None = cli
        options: set[str] = set()
        for word in words:
            if isinstance(command, click.Group):
                command = command.get_command(click.Context(command), word)
                assert command is not None, words
                options = {option for parameter in command.params for option in parameter.opts}
            elif word.startswith("-"):
                assert word in options, words
    (recipes,) = re.findall(r"recipe: \[(.*)\]", text, re.IGNORECASE)
    for name in recipes.split(", "):
        assert (ROOT / "recipes" / f"{name}.yaml").is_file(), name
