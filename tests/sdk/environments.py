"""Where E2B's clients are: ``scripts/setup`` makes an environment for each below build/sdks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SDKS = Path(os.environ.get("AENV_SDKS_DIR", ROOT / "build" / "sdks"))
PYTHONS = ("2.20.0", "2.45.0", "2.63.0")


def python(name: str) -> Path:
    """The interpreter of an environment."""
    return present(SDKS / name / "bin" / "python")


def node() -> Path:
    """Node, with the packages beside it."""
    return present(SDKS / "js" / "node")


def present(path: Path) -> Path:
    """Skip where this checkout was not set up."""
    if not path.exists():
        pytest.skip(f"{path.name} of build/sdks is missing: scripts/setup makes it (AENV_SDKS_DIR: elsewhere)")
    return path
