"""A name is removed and another home collects garbage, while sandboxes run from the snapshot and are paused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from aenv_run.paths import Home
from tests.e2e.conftest import ROOT, Aenv, environment


def test_sandboxes_outlive_the_name_and_free_the_bytes_when_they_end(
    aenv: Aenv, home: Home, tmp_path: Path
) -> None:
    def gc() -> dict[str, object]:
        """As another machine that shares the repository does it."""
        done = subprocess.run(
            [sys.executable, "-m", "aenv_run.cli", "gc", "--grace", "0s", "--json"],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=ROOT,
            env={**environment(home), "AENV_HOME": str(tmp_path), "AENV_REPOSITORY": str(home.repository)},
            check=True,
        )
        found: dict[str, object] = json.loads(done.stdout)
        return found

    first = aenv("start", "tiny").stdout.strip()
    aenv("exec", first, "--", "sh", "-c", "echo kept > /srv/file")
    assert aenv("snapshot", "create", first, "--name", "gone").stdout.strip() == "gone:1"
    aenv("rm", first)
    running, paused = (aenv("start", "gone:1").stdout.strip() for _ in range(2))
    aenv("pause", paused)
    snapshot_id = json.loads(aenv("catalog", "show", "gone:1", "--json").stdout)["snapshot_id"]
    aenv("catalog", "rm", "gone:1")
    kept = json.dumps(gc()["kept"])
    assert snapshot_id in kept and (running in kept or paused in kept)
    child = aenv("fork", running, "-n", "1").stdout.strip()
    aenv("resume", paused)
    fresh = aenv("reset", running).stdout.strip()
    for sandbox in (child, paused, fresh):
        assert aenv("exec", sandbox, "--", "cat", "/srv/file").stdout == "kept\n"
    gc()
    assert aenv("exec", child, "--", "cat", "/srv/file").stdout == "kept\n"
    aenv("rm", child, paused, fresh)
    end_s = time.monotonic() + 30
    while snapshot_id in json.dumps(gc()["kept"]):
        assert time.monotonic() < end_s
    assert not os.path.lexists(home.repository / "snapshots" / snapshot_id[:2] / snapshot_id)
    assert "whole" in aenv("check", "--deep").stdout
