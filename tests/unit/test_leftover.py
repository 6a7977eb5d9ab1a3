"""Engines that nobody has a record of, found by where they work."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

from aenv_run.drivers.leftover import end_engines

SLEEP = ["sleep", "600"]


def test_what_works_in_a_directory_is_ended_and_nothing_else(tmp_path: Path) -> None:
    directory, beside = tmp_path / "machine", tmp_path / "beside"
    for place in (directory, beside, directory / "below"):
        place.mkdir()
    engine = subprocess.Popen(SLEEP, cwd=directory, start_new_session=True)
    others = [
        subprocess.Popen(SLEEP, cwd=place, start_new_session=True) for place in (beside, directory / "below")
    ]
    pid, terminal = pty.fork()
    if pid == 0:  # a person who looks around
        os.chdir(directory)
        os.execvp("sh", ["sh", "-c", "echo here; exec sleep 600"])
    try:
        os.read(terminal, 100)
        link = tmp_path / "link"
        link.symlink_to(directory)
        assert end_engines(link)  # however the path is written
        assert engine.wait(5) == -9
        assert all(other.poll() is None for other in others)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        assert not end_engines(directory)
        assert not end_engines(tmp_path / "absent")
    finally:
        for other in (engine, *others):
            other.kill()
            other.wait()
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(terminal)
