"""A build's scratch directory goes with the build, also when the builder was killed."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aenv_run.scratch import scratch
from tests.crash.calls import watched


def test_removed_at_the_end_and_alive_ones_are_left(tmp_path: Path) -> None:
    with scratch(tmp_path / "s") as first, scratch(tmp_path / "s") as second:
        (second / "file").write_text("x")
        assert first.is_dir() and second.is_dir() and first != second
    assert not list((tmp_path / "s").iterdir())


def test_what_a_killed_builder_left_is_swept(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys; from aenv_run.scratch import scratch\n"
        "with scratch(pathlib.Path(sys.argv[1])) as d: (d / 'f').write_text('x'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    with scratch(tmp_path) as mine:
        assert list(tmp_path.iterdir()) == [mine]


@pytest.mark.parametrize("at", [1, 2])
def test_a_sweeper_between_a_directory_and_its_lock_costs_another(tmp_path: Path, at: int) -> None:
    """Of several builds that begin in one home each sweeps first, at any moment of another's beginning."""
    tmp_path.joinpath("staging").mkdir()

    def swept() -> None:
        for directory in (tmp_path / "staging").iterdir():
            directory.rmdir()

    with watched({os.open, fcntl.flock}, at, swept), scratch(tmp_path / "staging") as directory:
        assert directory.is_dir()
