"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.node_site import Site, make_site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A home with ``tiny:1`` and a pretended engine."""
    made = make_site(tmp_path / "home", tmp_path / "seed")
    yield made
    for machine in list(made.engine.machines.values()):
        machine.end("the test is over")


@pytest.fixture
def recipe(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The ``RECIPE`` of the test's module, as a file."""
    path = tmp_path / "shop.yaml"
    path.write_text(request.module.RECIPE)
    return path
