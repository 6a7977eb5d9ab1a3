"""What is wrong with a template is told at the recipe's line, in words of the recipe."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from aenv_build.language.load import load
from aenv_run.errors import RecipeError

HEAD = "version: 1\nname: n\nbase: {archive: a.tar}\nvars: {python: '3.11', items: kept}\n"
#: Words of Jinja2 or Python that tell the author of a recipe nothing.
INTERNALS = re.compile(
    r"jinja|object|built-in|method at|dict |operand type|NoneType|'str'|'int'|token|print statement|__\w+__' of|"
    r"statement block|generator|callable|argument|Security|Undefined",
    re.IGNORECASE,
)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ }}", "a value is missing before '}}'"),
        ("{{ vars.python", "a '{{', '{% if %}' or '{% for %}' is not closed"),
        ("{{ vars. }}", "a name is missing after '.'"),
        ("{{ vars.python | }}", "'}}' stands where a name should"),
        ("{{ 'a }}", "has no meaning here"),
        ("{{ 1 2 }}", "stands where '}}' should"),
        ("{{ (1 }}", "'}' stands where ')' should"),
        ("{% if vars.python %}x", "a '{{', '{% if %}' or '{% for %}' is not closed"),
        ("{% for x in [1] %}x{% endfi %}", "'{% endfi %}' is not for recipes; there are if, elif, else and for"),
        ("{% whatever %}", "'{% whatever %}' is not for recipes"),
        ("{% %}", "a word such as if or for is missing after '{%'"),
        ("{% else %}", "'{% else %}' is not for recipes"),
        ("{# x", "'{#' is not closed by '#}'"),
        ("{% raw %}x", "'{% raw %}' is not for recipes"),
        ("{% for 1 in [1] %}{% endfor %}", "a loop needs a name of its own"),
        ("{% include 'x' %}", "'include' is not for recipes"),
        ("{% set a = 1 %}", "'set' is not for recipes"),
        ("{{ vars.pyhton }}", "no var is called 'pyhton'; did you mean 'python'?"),
        ("{{ matrix.os }}", "no matrix value is called 'os'; declare it under 'matrix:'"),
        ("{{ python }}", "'python' is nothing here; write vars.python or matrix.python, or quotes around a text"),
        ("{{ vars.python.split('.')[7] }}", "a list has no item 7"),
        ("{{ vars.python.nothing }}", "a text has no 'nothing'"),
        ("{{ ''.__class__ }}", "a text has no '__class__'"),
        ("{% if vars.gone %}x{% endif %}", "no var is called 'gone'"),
        ("{{ vars.python|upcase }}", "there is no filter 'upcase' in recipes; valid here"),
        ("{% if false %}{{ vars.python|upcase }}{% endif %}", "there is no filter 'upcase'"),
        ("{{ 1 is evenly }}", "there is no test 'evenly' in recipes"),
        ("{{ vars.python - 1 }}", "these values do not go together"),
        ("{{ vars.python < 1 }}", "these values do not go together"),
        ("{{ vars.python + 1 }}", "the operator + takes small numbers only"),
        ("{{ 1|length }}", "these values do not go together"),
        ("{{ vars.python|join(1, 2, 3) }}", "these values do not go together"),
        ("{{ vars.python.split(nothing=1) }}", "these values do not go together"),
        ("{{ 1 / 0 }}", "a division by zero"),
        ("{{ vars.python.upper }}", "a method needs its brackets"),
        ("{{ [vars.python.upper] }}", "a method needs its brackets"),
        ("{{ vars.python|unique }}", "this is no text"),
        ("{{ range(2) }}", "this is no text"),
        ("{{ vars.python.encode() }}", "this call"),
        ("{{ 2 ** 9 }}", "the operator ** takes small numbers only"),
        ("{{ range(5000)|list }}", "a range has at most 1000 numbers"),
        (
            "{% for a in range(1000) %}{{ vars.python }}" + "z" * 400 + "{% endfor %}",
            "256 KiB",
        ),
        ("{{ " + "(" * 400 + "1" + ")" * 400 + " }}", ""),
    ],
)
def test_every_kind_of_mistake(tmp_path: Path, template: str, message: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(HEAD + f"env:\n  A: {json.dumps(template)}\n")
    with pytest.raises(RecipeError) as raised:
        load(path)
    said = str(raised.value).removeprefix(str(path))
    assert said.startswith(":6:6: template: ") and message in said, said
    assert not INTERNALS.search(said), said


def test_at_the_line_of_a_block(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(HEAD + "steps:\n- run: |\n    echo\n    echo {{ vars.python - 1 }}\n")
    with pytest.raises(RecipeError, match=r"r\.yaml:8:1: template: these values"):
        load(path)


def test_a_var_may_have_the_name_of_a_method(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(HEAD + "env: {A: '{{ vars.items }} {{ vars[\"items\"] }}'}\n")
    assert load(path).recipe.env == {"A": "kept kept"}
