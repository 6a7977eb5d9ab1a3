"""`aenv network`, `aenv port-forward` and the network options of `aenv start`, as a user types them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from aenv_run import AsyncSandbox
from aenv_run.paths import Home
from tests.contracts.network_world import OTHER_WEB, WEB
from tests.e2e.conftest import ROOT, Aenv, environment
from tests.e2e.test_network import SERVE, Site, fetch, out, reaches, site_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str


async def aenv_of(site: Site, *arguments: str) -> Done:
    """On the host of the test's own, which a thread would not see."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "aenv_run.cli", *arguments),
        cwd=ROOT,
        env=environment(site.home),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await asyncio.wait_for(process.communicate(), 120)
    return Done(process.returncode or 0, stdout.decode(), stderr.decode())


async def started(site: Site, *options: str) -> AsyncSandbox:
    """A sandbox that `aenv start` made."""
    done = await aenv_of(site, "start", "tiny", *options)
    assert done.code == 0, done
    return await AsyncSandbox.connect(done.out.strip(), home=site.home)


async def shown(site: Site, *arguments: str) -> object:
    """What `aenv network --json` says."""
    done = await aenv_of(site, "network", "--json", *arguments)
    assert done.code == 0, done
    return json.loads(done.out)


async def test_start_says_what_it_may_reach_and_network_changes_it(home: Home) -> None:
    async with site_of(home) as site:
        one = await started(site, "--allow", f"{WEB}/32", "--allow", "*.example.net", "--deny", "192.0.2.0/24")
        policy = {"internet": True, "allow": [f"{WEB}/32", "*.example.net"], "deny": ["192.0.2.0/24"]}
        assert await shown(site, one.sandbox_id) == policy
        assert await reaches(one, WEB) and not await reaches(one, OTHER_WEB)

        text = await aenv_of(site, "network", one.sandbox_id, "--allow", f"{OTHER_WEB}/32")
        lines = ["internet  on", f"allow     {OTHER_WEB}/32", "deny      192.0.2.0/24"]
        assert text.out.splitlines() == lines, text
        assert await reaches(one, OTHER_WEB) and not await reaches(one, WEB)

        none = await aenv_of(site, "network", one.sandbox_id, "--allow", "none", "--deny", "none")
        assert none.out.splitlines() == ["internet  on", "allow     -", "deny      -"], none
        assert await reaches(one, WEB)
        assert await shown(site, one.sandbox_id, "--no-internet") == {"internet": False, "allow": [], "deny": []}
        assert not await reaches(one, WEB)

        assert (await aenv_of(site, "pause", one.sandbox_id)).code == 0
        assert await shown(site, one.sandbox_id, "--internet") == {"internet": True, "allow": [], "deny": []}
        assert (await aenv_of(site, "resume", one.sandbox_id)).code == 0
        one = await AsyncSandbox.connect(one.sandbox_id, home=site.home)  # its address is another one now
        assert await reaches(one, WEB)

        two = await started(site, "--no-internet")
        assert await shown(site, two.sandbox_id) == {"internet": False, "allow": [], "deny": []}
        assert not await reaches(two, WEB)


async def test_start_publishes_and_port_forward_refuses_what_is_no_port(home: Home) -> None:
    async with site_of(home) as site:
        path = site.home.root / "app.sock"
        one = await started(site, "--publish", f"unix:{path}:8000")
        await out(one, SERVE.format(text="served", port=8000))
        assert await fetch(str(path)) == "served"
        for ports in ("0", "x", "1:2:3", "70000", "9000:"):
            done = await aenv_of(site, "port-forward", one.sandbox_id, ports)
            assert done.code == 64 and "fix:" in done.err and "Traceback" not in done.err, (ports, done)


async def test_what_is_not_valid_is_refused_and_changes_nothing(home: Home, tmp_path: Path) -> None:
    async with site_of(home) as site:
        for options in (
            ("--allow", "not a domain"),
            ("--deny", "10.0.0.0/33"),
            ("--publish", "8000"),
            ("--publish", f"unix:{tmp_path}/s:0"),
        ):
            done = await aenv_of(site, "start", "tiny", *options)
            assert done.code == 64 and "error:" in done.err and "Traceback" not in done.err, (options, done)
        assert not await site.node.list()
        one = await started(site, "--deny", f"{WEB}/32")
        for wrong in ("not a domain", "none,", "10.0.0.0/33"):
            done = await aenv_of(site, "network", one.sandbox_id, "--allow", wrong)
            assert done.code == 64 and "Traceback" not in done.err, (wrong, done)
        assert await shown(site, one.sandbox_id) == {"internet": True, "allow": [], "deny": [f"{WEB}/32"]}
        assert await reaches(one, OTHER_WEB) and not await reaches(one, WEB)
        assert (await aenv_of(site, "network", "nosuchsandbox")).code == 66


def test_without_a_network_of_its_own_the_commands_say_so(home: Home, aenv: Aenv, tmp_path: Path) -> None:
    for options in (("--internet",), ("--allow", "example.org"), ("--publish", f"unix:{tmp_path}/s:80")):
        refused = aenv("start", "tiny", *options, code=69)
        assert "switched off" in refused.stderr and "fix:" in refused.stderr, refused
    sandbox_id = aenv("start", "tiny").stdout.strip()
    try:
        assert aenv("network", sandbox_id).stdout.splitlines() == ["internet  off", "allow     -", "deny      -"]
        for command in (("network", sandbox_id, "--internet"), ("port-forward", sandbox_id, "8000")):
            refused = aenv(*command, code=69)
            assert "Traceback" not in refused.stderr and "error:" in refused.stderr
    finally:
        aenv("rm", sandbox_id)
