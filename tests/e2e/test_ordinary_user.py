"""A user without any right: the whole life of a sandbox under gVisor, and its disk under another driver."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv_run.paths import Home
from tests.contracts.machines import need_runsc
from tests.ordinary_user import USER, run_as_user


@pytest.fixture
def users_home() -> Iterator[Path]:
    """A home that belongs to the user."""
    if os.geteuid() != 0:
        pytest.skip("to become another user needs root")
    path = Path(tempfile.mkdtemp(prefix="aenv-user-", dir="/var/tmp"))
    os.chown(path, USER, USER)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def step(name: str, home: Path, driver: str) -> str:
    guest = Home.default().guest().resolve()
    env = {"AENV_HOME": str(home), "HOME": str(home), "AENV_DRIVER": driver, "AENV_GUEST_DIR": str(guest)}
    done = run_as_user([sys.executable, "-m", "tests.e2e.ordinary_steps", name], env, needed=(guest,))
    log = home / "node.log"
    assert done.returncode == 0, (done.stdout, done.stderr, log.read_text() if log.exists() else "")
    return done.stdout


def test_an_ordinary_user_has_the_whole_life_of_a_sandbox(users_home: Path) -> None:
    need_runsc()
    said = step("life", users_home, "auto")
    assert "refused: sandboxes have no network of their own here" in said
    assert "gvisor restored" in said
    assert step("cold", users_home, "qemu").strip() == "qemu booted"
    assert step("cold", users_home, "gvisor").strip() == "gvisor booted"


@pytest.mark.long
def test_an_ordinary_user_captures_a_virtual_machine_again_and_again(users_home: Path) -> None:
    assert step("again", users_home, "qemu").strip() == "qemu"
