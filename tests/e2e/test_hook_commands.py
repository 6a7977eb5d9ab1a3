"""Hooks on the command line: given to a snapshot, shown, run, failed, left out."""

from __future__ import annotations

import json

from tests.e2e.conftest import Aenv

LOG = 'echo "$AENV_HOOK $AENV_START $AENV_SANDBOX_ID $FROM_IMAGE $(pwd) $(hostname)" >>/dev/shm/log'


def states(aenv: Aenv) -> dict[str, str]:
    """Of every sandbox that is left, by id."""
    return {info["sandbox_id"]: info["state"] for info in json.loads(aenv("ls", "-a", "--json").stdout)}


def test_hooks_of_a_snapshot_run_in_what_is_restored_from_it(aenv: Aenv) -> None:
    seed = aenv("start", "tiny").stdout.strip()
    create = ("snapshot", "create", seed, "--name", "hooked")
    before = LOG.replace("$AENV_START", "$AENV_BEFORE")
    aenv(*create, "--on-restore", LOG, "--on-fork", LOG, "--on-pause", f"{before}; test ! -e /dev/shm/busy")
    aenv("rm", seed)
    shown = aenv("catalog", "show", "hooked").stdout
    assert "on_fork" in shown and LOG in shown
    manifest = json.loads(aenv("catalog", "show", "hooked", "--json").stdout)
    assert LOG in json.dumps(manifest).replace('\\"', '"')
    one = aenv("start", "hooked").stdout.strip()
    child = aenv("fork", one).stdout.strip()
    try:
        aenv("exec", child, "--", "touch", "/dev/shm/busy")
        assert "the hook on_pause of sandbox" in aenv("pause", child, code=1).stderr
        assert states(aenv)[child] == "running"
        aenv("exec", child, "--", "rm", "/dev/shm/busy")
        aenv("pause", child)
        aenv("resume", child)
        log = aenv("exec", child, "--", "cat", "/dev/shm/log").stdout.splitlines()
        assert log == [
            f"on_restore launch {one} yes /srv {one}",
            f"on_fork fork {child} yes /srv {child}",
            f"on_restore fork {child} yes /srv {child}",
            f"on_pause pause {child} yes /srv {child}",
            f"on_pause pause {child} yes /srv {child}",
            f"on_restore resume {child} yes /srv {child}",
        ]
    finally:
        aenv("rm", one, child)


def test_a_hook_that_fails_says_why_and_leaves_a_way_in(aenv: Aenv) -> None:
    one = aenv("start", "tiny").stdout.strip()
    for name, hook in (("failing", "echo because >&2; exit 3"), ("strange", "no-such-program")):
        aenv("snapshot", "create", one, "--name", name, "--on-restore", hook)
    aenv("rm", one)
    before = states(aenv)
    failed = aenv("start", "failing", code=1)
    assert (
        "exited with 3" in failed.stderr and "\n  | because\n" in failed.stderr and "--no-hooks" in failed.stderr
    )
    assert not failed.stdout and states(aenv) == before
    assert "not found" in aenv("start", "strange", code=1).stderr
    one = aenv("start", "failing", "--no-hooks").stdout.strip()
    aenv("pause", one)
    aenv("resume", one, code=1)
    assert states(aenv)[one] == "paused"
    aenv("resume", one, "--no-hooks")
    assert aenv("exec", one, "--", "echo", "in").stdout == "in\n"
    aenv("rm", one)
