"""The recipe language: documents, rendering, loading, the schema."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from aenv_build.language.document import MAX_BYTES, parse_document
from aenv_build.language.load import load
from aenv_run.errors import InvalidInput, NotFound, RecipeError

REPOSITORY = Path(__file__).parents[2]
HEAD = "version: 1\nname: n\nbase: {archive: a.tar}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def test_text_stays_as_written_under_vars_and_env(tmp_path: Path) -> None:
    text = (
        HEAD + "vars: {python: 3.10, on: true}\nenv: {PORT: 0080, DEBUG: yes, EMPTY: , P: '{{ vars.python }}'}\n"
    )
    recipe = load(write(tmp_path, text)).recipe
    assert recipe.vars == {"python": "3.10", "on": "true"}
    assert recipe.env == {"PORT": "0080", "DEBUG": "yes", "EMPTY": "", "P": "3.10"}


def test_var_override_and_default_ids(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD + "vars: {x: a}\nsteps:\n- run: 'echo {{ vars.x }}'\n- {workdir: /srv}\n")
    recipe = load(path, {"x": "b"}).recipe
    assert [step.id for step in recipe.steps] == ["run-1", "workdir-2"]
    assert recipe.steps[0].run is not None and recipe.steps[0].run.command == "echo b"
    with pytest.raises(InvalidInput, match=r"--var z.*valid here: x"):
        load(path, {"z": "b"})


def test_anchors_and_merge_keys(tmp_path: Path) -> None:
    text = HEAD + "steps:\n- {run: &r {command: a, user: u}}\n- run: {<<: *r, command: b}\n"
    steps = load(write(tmp_path, text)).recipe.steps
    assert steps[1].run is not None and (steps[1].run.command, steps[1].run.user) == ("b", "u")


def test_sizes_and_durations(tmp_path: Path) -> None:
    text = HEAD + "machine: {memory: 1GiB, disk: 65536KiB}\nsteps: [{run: a, timeout: 2h}, {run: a, timeout: 5}]\n"
    recipe = load(write(tmp_path, text)).recipe
    assert (recipe.machine.memory, recipe.machine.disk) == (1024, 64)
    assert [step.timeout for step in recipe.steps] == [7200, 5]


def test_missing_file() -> None:
    with pytest.raises(NotFound, match="no such recipe"):
        load(Path("/nonexistent/recipe.yaml"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"#" * (MAX_BYTES + 1), "larger than 1024 KiB"),
        (b"a: \xff", "1:1: not UTF-8"),
        (b"[" * 5000, "nested deeper"),
        (b"- a", "is a mapping"),
        (b'a: "\\ud800"', "1:4: a NUL or half of a surrogate pair"),
        (b'a: [b, "x\\0"]', "1:8: a NUL or half"),
        (b'"\\udfff": a', "1:1: a NUL or half of a surrogate pair"),
        (b"a: 1\na: 2\n", "2:1: the key 'a' stands here twice"),
        (b"a: !!python/object:os.system x", "YAML tag"),
        (b"a: &x [*x]", "nested deeper|undefined alias|recursive"),
    ],
)
def test_bounded_documents(data: bytes, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_document(data, "r.yaml")


def test_alias_bomb_stops_early() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(RecipeError, match="expands to more than 50000 values"):
        parse_document("\n".join(lines).encode(), "r.yaml")
    merges = ["a0: &a0 {x: 1}"]
    merges += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 9)]
    with pytest.raises(RecipeError, match="expands to more than"):
        parse_document("\n".join(merges).encode(), "r.yaml")


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**9 }}",
        "{{ 'a' * 3000000000 }}",
        "{{ ().__class__.__mro__ }}",
        "{{ '\\ud800' }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ 'x'|center(3000000000) }}",
        "{{ 'x'.ljust(3000000000) }}",
        "{{ 'x'['ljust'](3000000000) }}",
        "{{ '{:>3000000000}'.format(1) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%999999999d'|format(1) }}",
        "{{ 'x'|indent(3000000000) }}",
        "{{ lipsum(100000) }}",
        "{{ range(100000)|join('x') }}",
        "{{ range(1000)|join(vars.long) }}",
        "{{ vars.long|replace('x', vars.long) }}",
        "{{ vars.long + vars.long + vars.long }}",
        "{{ " + " ~ ".join(["vars.long"] * 100) + " }}",
        "{% for a in range(1000) %}{{ vars.long }}{% endfor %}",
        "{% for a in range(9) %}{% for b in range(9) %}x{% endfor %}{% endfor %}",
        "{% set x = 'a' %}",
        "{% macro m() %}x{% endmacro %}",
    ],
)
def test_templates_make_no_gigabyte_from_a_word(tmp_path: Path, template: str) -> None:
    text = HEAD + f"vars: {{long: {'x' * 100_000}}}\nenv:\n  A: {json.dumps(template)}\n"
    tracemalloc.start()
    try:
        with pytest.raises(RecipeError, match=r"recipe.yaml:6:.*template"):
            load(write(tmp_path, text))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ vars.a|upper }}-{{ vars.a.split('.')[0] }}", "X.Y-x"),
        ("{% if vars.a == 'x.y' %}yes{% else %}no{% endif %}", "yes"),
        ("{% for n in range(3) %}{{ n + 1 }},{% endfor %}", "1,2,3,"),
        ("{{ vars.a ~ '/' ~ vars.a|replace('.', '_') }}", "x.y/x_y"),
        ("{{ ['a', 'b']|join('-') }}{{ 7 % 4 * 2 }}", "a-b6"),
        ("{{ 'plain'[:2] if 1 < 2 }}", "pl"),
    ],
)
def test_templates_do_what_recipes_need(tmp_path: Path, template: str, expected: str) -> None:
    text = HEAD + f"vars: {{a: x.y}}\nenv: {{A: {json.dumps(template)}}}\n"
    assert load(write(tmp_path, text)).recipe.env == {"A": expected}


def test_schema_knows_the_short_forms() -> None:
    step = json.loads((REPOSITORY / "schemas" / "recipe.schema.json").read_text())["$defs"]["Step"]
    assert {"type": "string"} in step["properties"]["run"]["anyOf"] and "required" not in step


def test_a_command_is_not_an_empty_list(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r":4:15: .*must be text \(run by the shell\) or a list"):
        load(write(tmp_path, HEAD + "steps: [{run: []}]\n"))


@pytest.mark.parametrize("path", sorted((REPOSITORY / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_ready_recipes_load(path: Path) -> None:
    assert load(path).recipe.version == 1
