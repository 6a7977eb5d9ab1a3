"""E2B's clients, as their registries have them: what a user calls, against a server with real sandboxes."""

from __future__ import annotations

import os
import shutil

import pytest

from aenv_run.drivers.protocol import DriverName
from tests.e2e.conftest import node_home
from tests.e2e.warm_python import need
from tests.sdk.environments import SDKS, present
from tests.sdk.runs import EVERY, served, title

#: Builds are what takes longest, and the same calls in all versions from 2.20 on.
BUILDS = "^Template|built template"
#: Each version, each mode. `python -m tests.sdk.table` and AENV_SDK_EVERY=1 try all of it.
FEW = (("2.63.0", "sync", BUILDS), ("2.20.0", "async"), ("2.45.0", "sync", BUILDS), ("js", ""))


@pytest.mark.timeout(3600)
def test_every_method_of_every_client(tmp_path_factory: pytest.TempPathFactory) -> None:
    need(DriverName.GVISOR)
    present(SDKS)
    folder = tmp_path_factory.mktemp("sdk")
    with node_home(folder) as home, served(folder, home) as server:
        outcomes = server.run_all(EVERY if os.environ.get("AENV_SDK_EVERY") else FEW)
        example = server.example("e2b_fork.py", "base")
        log = (folder / "serve.log").read_text()
    shutil.rmtree(folder)
    failed = [
        f"{client}: {one.method}: {one.detail}"
        for client, found in outcomes.items()
        for one in found
        if one.ok is False
    ]
    assert not failed, "\n".join([*failed, log[-4000:]])
    assert example.splitlines()[-1] == "{'a - b': 0, 'a + b': 1, 'b + b': 0}" and "AssertionError: -1" in example
    newest, oldest, javascript = (
        {one.method: one.ok for one in outcomes[title(*client[:2])]} for client in (FEW[0], FEW[1], FEW[3])
    )
    assert all(newest.values()) and newest.keys() <= oldest.keys(), "the newest client has all methods"
    assert javascript.keys() == oldest.keys(), "the clients' cases have the same names"
