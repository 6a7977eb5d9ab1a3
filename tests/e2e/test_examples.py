"""The small examples run as they are, on the tiny snapshot."""

from __future__ import annotations

import subprocess
import sys

import pytest

from aenv_run import Sandbox
from aenv_run.paths import Home
from tests.e2e.conftest import ROOT, environment


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("quickstart.py", "exit code 3"),
        ("fork.py", "the parent still reads 'parent'"),
        ("pause_resume.py", "it counts on"),
    ],
)
def test_example(home: Home, script: str, says: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), "tiny"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(home),
        check=False,
    )
    assert done.returncode == 0 and says in done.stdout and not done.stderr, done
    assert not Sandbox.list(home=home)
