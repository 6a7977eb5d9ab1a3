"""What a recipe is made of: fragments that it includes, and the cells of its matrix."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from aenv_build.language.document import parse_document
from aenv_build.language.fragments import MAX_DEPTH, MAX_FRAGMENTS
from aenv_build.language.load import load, load_cells
from aenv_build.language.matrix import cells_of
from aenv_build.planning.keys import HostFacts
from aenv_build.planning.plan import make_plan
from aenv_run.errors import InvalidInput, RecipeError
from aenv_run.types import Architecture, Digest

FACTS = HostFacts(Architecture("amd64"), Digest("sha256:" + "0" * 64))
HEAD = "version: 1\nname: n\nbase: {debootstrap: {suite: bookworm}}\n"


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "recipe.yaml"


# -- include -------------------------------------------------------------------------------------------------


def test_fragments_come_first_and_what_includes_wins(tmp_path: Path) -> None:
    recipe = write(
        tmp_path,
        {
            "recipe.yaml": HEAD
            + "include: [parts/python.yaml]\nvars: {b: own}\nenv: {E: own}\nsteps: [{run: last}]\n",
            "parts/python.yaml": "include: ../tools.yaml\nvars: {a: x, b: y}\nenv: {E: p, F: p}\n"
            "steps:\n  - {id: py, run: 'python {{ vars.a }} {{ vars.b }} {{ vars.c }}'}\n",
            "tools.yaml": "version: 1\nvars: {a: t, c: t}\n"
            "steps:\n  - {id: tools, run: &words apt}\n  - run: *words\n",
        },
    )
    found = load(recipe, {"c": "set"}).recipe
    assert [(step.id, step.run and step.run.command) for step in found.steps] == [
        ("tools", "apt"),
        ("run-2", "apt"),
        ("py", "python x own set"),
        ("run-4", "last"),
    ]
    assert found.env == {"E": "own", "F": "p"}


def test_a_fragment_that_is_reached_twice_counts_once(tmp_path: Path) -> None:
    recipe = write(
        tmp_path,
        {
            "recipe.yaml": HEAD + "include: [a.yaml, b.yaml]\n",
            "a.yaml": "include: [common.yaml]\n",
            "b.yaml": "include: [common.yaml]\n",
            "common.yaml": "steps: [{id: once, run: x}]\n",
        },
    )
    assert [step.id for step in load(recipe).recipe.steps] == ["once"]


def test_paths_in_a_fragment_are_relative_to_it(tmp_path: Path) -> None:
    recipe = write(
        tmp_path,
        {
            "recipe.yaml": HEAD + "include: [parts/f.yaml]\nsteps: [{id: own, copy: {from: data, to: /b}}]\n",
            "parts/f.yaml": "steps: [{id: theirs, copy: {from: data, to: /a}}]\n",
            "parts/data": "of the fragment",
            "data": "of the recipe",
        },
    )
    stages = make_plan(load(recipe), FACTS).stages
    roots = [stages[step].files for step in ("theirs", "own")]
    assert [files and files.root for files in roots] == [tmp_path / "parts/data", tmp_path / "data"]


def test_every_file_counts_in_the_digest_of_the_recipe(tmp_path: Path) -> None:
    recipe = write(tmp_path, {"recipe.yaml": HEAD + "include: [f.yaml]\n", "f.yaml": "env: {A: a}\n"})
    first = load(recipe).digest
    write(tmp_path, {"f.yaml": "env: {A: b}\n"})
    assert load(recipe).digest != first


def test_a_fragment_elsewhere_is_read_only_if_its_folder_is_allowed(tmp_path: Path) -> None:
    recipe = write(
        tmp_path / "in",
        {"recipe.yaml": HEAD + "include: [../out/f.yaml]\n", "../out/f.yaml": "steps: [{run: x}]\n"},
    )
    link = write(tmp_path / "in", {"recipe.yaml": HEAD + "include: [link.yaml]\n"})
    (tmp_path / "in/link.yaml").symlink_to(tmp_path / "out/f.yaml")
    with pytest.raises(RecipeError, match="outside the recipe's folder"):
        load(link)
    recipe = write(tmp_path / "in", {"recipe.yaml": HEAD + "include: [../out/f.yaml]\n"})
    with pytest.raises(RecipeError, match=r"recipe\.yaml:4:11: '\.\./out/f\.yaml' is outside"):
        load(recipe)
    assert load_cells(recipe, roots=[tmp_path / "out"])[0].recipe.steps[0].id == "run-1"


def test_depth_and_number_of_fragments_are_bounded(tmp_path: Path) -> None:
    deep = {f"f{n}.yaml": f"include: [f{n + 1}.yaml]\n" for n in range(MAX_DEPTH + 1)}
    recipe = write(tmp_path, {"recipe.yaml": HEAD + "include: [f0.yaml]\n", **deep})
    with pytest.raises(RecipeError, match="deeper than 8 levels"):
        load(recipe)
    many = {f"m{n}.yaml": "env: {A: a}\n" for n in range(MAX_FRAGMENTS + 1)}
    recipe = write(tmp_path, {"recipe.yaml": HEAD + f"include: [{', '.join(many)}]\n", **many})
    with pytest.raises(RecipeError, match="at most 64 fragments"):
        load(recipe)


# -- matrix --------------------------------------------------------------------------------------------------


def cells(matrix: str) -> list[str]:
    return [str(cell) for cell in cells_of(parse_document(f"version: 1\nmatrix:\n{matrix}".encode(), "r.yaml"))]


def test_values_are_text_as_written() -> None:
    assert cells("  python: [3.10, 3.11]\n  debug: [yes]\n") == ["python=3.10,debug=yes", "python=3.11,debug=yes"]


def test_exclude_and_include_as_github_actions_have_them() -> None:
    """The example of their documentation's rules: what adds, what overwrites, what makes a cell of its own."""
    found = cells(
        """
  fruit: [apple, pear]
  animal: [cat, dog]
  include:
    - {color: green}
    - {color: pink, animal: cat}
    - {fruit: apple, shape: circle}
    - {fruit: banana}
    - {fruit: banana, animal: cat}
"""
    )
    assert found == [
        "fruit=apple,animal=cat,color=pink,shape=circle",
        "fruit=apple,animal=dog,color=green,shape=circle",
        "fruit=pear,animal=cat,color=pink",
        "fruit=pear,animal=dog,color=green",
        "fruit=banana",
        "fruit=banana,animal=cat",
    ]
    assert cells("  a: [1, 2]\n  b: [3, 4]\n  exclude:\n  - {a: 1}\n  - {a: 2, b: 3}\n") == ["a=2,b=4"]
    assert cells("  include:\n  - {a: x}\n  - {a: y}\n") == ["a=x", "a=y"]


def test_each_cell_is_a_recipe_of_its_own(tmp_path: Path) -> None:
    text = (
        "version: 1\nname: py\nmatrix: {python: ['3.11', '3.12'], os: [bookworm, trixie]}\n"
        "base: {debootstrap: {suite: '{{ matrix.os }}'}}\n"
        "steps: [{id: same, run: x}, {run: 'i {{ matrix.python }}'}]\n"
        "outputs: [{tags: ['{{ matrix.os }}-{{ matrix.python }}']}]\n"
    )
    recipe = write(tmp_path, {"recipe.yaml": text})
    sources = load_cells(recipe)
    assert [source.recipe.outputs[0].tags[0] for source in sources] == [
        "bookworm-3.11", "trixie-3.11", "bookworm-3.12", "trixie-3.12",
    ]  # fmt: skip
    plans = [make_plan(source, FACTS) for source in sources]
    assert plans[0].stages["same"].key == plans[2].stages["same"].key != plans[1].stages["same"].key
    assert len({plan.stages["run-2"].key for plan in plans}) == 4

    some = load_cells(recipe, wanted=["python=3.12,os=trixie", "os=bookworm"])
    assert [str(source.cell) for source in some] == [
        "python=3.11,os=bookworm", "python=3.12,os=bookworm", "python=3.12,os=trixie",
    ]  # fmt: skip
    with pytest.raises(InvalidInput, match=r"--cell python=3\.13: .* has no such cell \(did you mean"):
        load_cells(recipe, wanted=["python=3.13"])
    with pytest.raises(InvalidInput, match="write NAME=VALUE"):
        load_cells(recipe, wanted=["python"])


def test_cells_of_a_large_recipe_are_counted_before_they_are_made(tmp_path: Path) -> None:
    axis = f"matrix: {{a: [{', '.join(f'v{n}' for n in range(256))}]}}\n"
    env = "env:\n" + "".join(f"  V{n}: x\n" for n in range(5000))
    with pytest.raises(RecipeError, match=r"recipe\.yaml:4:9: 256 cells of \d+ values are more than 1000000"):
        load_cells(write(tmp_path, {"recipe.yaml": HEAD + axis + env}))


def test_all_texts_together_are_bounded(tmp_path: Path) -> None:
    env = "env:\n" + "".join(f"  V{n}: '{{{{ vars.long }}}}'\n" for n in range(1000))
    recipe = write(tmp_path, {"recipe.yaml": HEAD + f"vars: {{long: {'x' * 100_000}}}\n" + env})
    tracemalloc.start()
    try:
        with pytest.raises(RecipeError, match=r"recipe\.yaml:\d+:\d+: template: the texts .* 32 MiB together"):
            load(recipe)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_a_value_of_some_cells_may_have_a_default(tmp_path: Path) -> None:
    text = HEAD + "matrix: {a: [x, y], include: [{a: x, extra: E}]}\n"
    text += "outputs: [{name: 'n-{{ matrix.a }}'}]\nenv: {V: '{{ matrix.extra|default(\"none\") }}'}\n"
    assert [source.recipe.env["V"] for source in load_cells(write(tmp_path, {"recipe.yaml": text}))] == [
        "E",
        "none",
    ]
