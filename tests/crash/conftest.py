"""Fixtures of the crash tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory_place() -> Iterator[Path]:
    """A directory on another file system than ``tmp_path``, in memory, where there is one."""
    parent = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="aenv-crash-", dir=parent) as own:
        yield Path(own)
