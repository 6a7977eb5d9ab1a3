"""A repository in a bucket: built into by one home, started from by another, checked, never a secret shown."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from aenv_run.paths import Home
from tests.e2e.conftest import ROOT, environment, node_home
from tests.e2e.test_build import make_base
from tests.e2e.test_build import pytestmark as pytestmark
from tests.s3.server import CREDENTIALS, Server
from tests.s3.swift import SECRET, SWIFT

SECRETS = {CREDENTIALS["AWS_SECRET_ACCESS_KEY"], SECRET}
RECIPE = """
version: 1
name: small
base: {archive: root.tar}
machine: {memory: 256MiB, disk: 64MiB}
steps:
  - {id: text, write: {/srv/text: "of the first home\\n"}}
  - {id: state, run: "cp /srv/text /srv/copied"}
outputs: [{from: state, name: small, tags: [latest], memory: true}]
"""


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="aenv-e2e-", dir=tmp_path_factory.getbasetemp()) as name:
        make_base(Path(name) / "root.tar")
        (Path(name) / "recipe.yaml").write_text(RECIPE)
        yield Path(name)


def run(home: Home, url: str, *command: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
    """A command of a home whose repository is ``url``, which is used also where it can only be read."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={**environment(home), "AENV_REPOSITORY": url, "AENV_ALLOW_UNHELD": "on"},
        check=False,
    )
    assert code is None or done.returncode == code, (command, done)
    assert not any(secret in done.stdout + done.stderr for secret in SECRETS)
    return done


SERVERS = ["s3", pytest.param("swift", marks=pytest.mark.skipif(not SWIFT, reason="make soak starts Swift"))]


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Server:
    """moto's, or one that has no conditional writes."""
    found: Server = request.getfixturevalue(f"{request.param}_server")
    return found


def test_built_by_one_home_and_started_by_another(server: Server, folder: Path) -> None:
    prefix = uuid4().hex
    url = server.url(prefix)
    with node_home(folder) as first:
        built = run(first, "", "aenv_build.cli", str(folder / "recipe.yaml"), "--json", "--repository", url)
        again = run(first, "", "aenv_build.cli", str(folder / "recipe.yaml"), "--json", "--repository", url)
        ids = [json.loads(done.stdout)["outputs"][0]["snapshot_id"] for done in (built, again)]
        assert ids[0] == ids[1]
        assert not first.repository.exists()
    url = server.url(prefix, writers="many")  # the other home only reads where it cannot write safely
    with node_home(folder) as second:
        sandbox = run(second, url, "aenv_run.cli", "start", "small").stdout.strip()
        said = run(second, url, "aenv_run.cli", "exec", sandbox, "--", "cat", "/srv/copied")
        assert said.stdout == "of the first home\n"
        create = ("aenv_run.cli", "snapshot", "create", sandbox, "--name", "grown")
        if server.writers == "many":
            assert run(second, url, *create).stdout.strip() == "grown:1"
            assert "grown:1" in run(second, url, "aenv_run.cli", "catalog", "ls").stdout
            collected = json.loads(run(second, url, "aenv_run.cli", "gc", "--grace", "0s", "--json").stdout)
            assert collected["snapshots"] == 0 and collected["referenced"] >= 2 and len(collected["holders"]) == 1
        else:
            assert "writers=one" in run(second, url, *create, code=69).stderr
        assert json.loads(run(second, url, "aenv_run.cli", "check", "--deep", "--json").stdout)["problems"] == []
        refused = run(second, server.url("elsewhere"), "aenv_run.cli", "ls", code=65)
        assert "`aenv node stop`" in refused.stderr
        assert not any(secret in second.node_log.read_text() for secret in SECRETS)
        assert not second.repository.exists()


@pytest.mark.parametrize("reached", [True, False])
def test_doctor_says_whether_the_bucket_can_be_used(s3_server: Server, folder: Path, reached: bool) -> None:
    url = s3_server.url(uuid4().hex) if reached else "s3://bucket/p?region=x&endpoint=http://127.0.0.1:1"
    report = json.loads(run(Home(folder / "h"), url, "aenv_run.cli", "doctor", "--json", code=None).stdout)
    (check,) = [check for check in report["checks"] if check["name"] == "repository"]
    assert check["present"] is reached
    if reached:
        assert "0 snapshots, conditional writes work" in check["detail"]
    else:
        assert "127.0.0.1:1 cannot be reached for bucket bucket" in check["detail"] and "endpoint" in check["fix"]
