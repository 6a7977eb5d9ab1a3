"""docs/SPEC.md names tests; each must exist, or a promise would look kept."""

from __future__ import annotations

import re

import pytest

from tests.style.source import ROOT

NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "SPEC.md").read_text())))


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_named_test_exists(path: str, name: str) -> None:
    found = re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)
    assert found, f"docs/SPEC.md names {path}::{name}, which does not exist"


def test_every_promise_says_where_it_is_tested() -> None:
    rows = [line for line in (ROOT / "docs" / "SPEC.md").read_text().splitlines() if line.startswith("| ")]
    bare = [row for row in rows if not re.search(r"`tests/|pending|not run here|\| Test \|", row)]
    assert not bare, bare
