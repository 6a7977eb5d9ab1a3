"""Bad recipes: each ``recipes/NAME.yaml`` gives exactly the message in ``recipes/NAME.expected``."""

from __future__ import annotations

from pathlib import Path

import pytest

from aenv_build.language.load import load
from aenv_build.planning.graph import check_network
from aenv_build.planning.keys import HostFacts
from aenv_build.planning.lent import Lent
from aenv_build.planning.plan import make_plan
from aenv_run.errors import AenvError
from aenv_run.types import Architecture, Digest

FOLDER = Path(__file__).parent / "recipes"
FACTS = HostFacts(Architecture("amd64"), Digest("sha256:" + "0" * 64))


def outcome(path: Path) -> str:
    """The error's text with the recipe's folder left out."""
    try:
        source = load(path)
        make_plan(source, FACTS)
        check_network(source, Lent())
    except AenvError as error:
        return f"{error}\n".replace(f"{path.parent}/", "").replace(str(path.parent.absolute()), "FOLDER")
    return "no error\n"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_bad_recipe(path: Path) -> None:
    expected = path.with_suffix(".expected").read_text()
    assert outcome(path) == expected
    assert expected.startswith((f"{path.name}:", "fragments/")), "the message starts with file:line:column"
