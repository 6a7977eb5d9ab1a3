"""What test_ordinary_user.py runs as an ordinary user, in a process of its own."""

from __future__ import annotations

import asyncio
import os
import sys

from aenv_run import Sandbox
from aenv_run.doctor import examine
from aenv_run.drivers.protocol import DriverName
from aenv_run.errors import AenvError, Unsupported
from aenv_run.node_client import NodeClient
from aenv_run.paths import Home
from tests.e2e.tiny import make_tiny

WRITE = "echo kept >/srv/mine; busybox chown 1234:5678 /srv/mine; mkdir /srv/d; busybox rmdir /root"
READ = "busybox stat -c '%u %g' /srv/mine; cat /srv/mine; ls /"
KEPT = "1234 5678\nkept\n"


def said(sandbox: Sandbox, command: str) -> str:
    """What it prints; it must succeed."""
    result = sandbox.commands.run(command)
    assert result.exit_code == 0, result
    return result.stdout


def life(home: Home) -> None:
    """Start, exec, pause, resume, fork 2, snapshot."""
    report = asyncio.run(examine(home))
    assert report.chosen == DriverName.GVISOR and "level " in report.why, report.why
    scratch = home.root / "scratch"
    scratch.mkdir()
    asyncio.run(make_tiny(home, scratch))
    with Sandbox.create("tiny:1", home=home) as sandbox:
        said(sandbox, WRITE)
        said(sandbox, "sleep 1000 >/dev/null 2>&1 & echo $! >/srv/pid")
        sandbox.pause()
        sandbox.resume()
        assert said(sandbox, READ).startswith(KEPT)
        said(sandbox, "kill -0 $(cat /srv/pid)")
        children = sandbox.fork(2)
        for child in children:
            assert not isinstance(child, AenvError), child
            said(child, "kill -0 $(cat /srv/pid); echo child >/srv/mine")
            child.kill()
        assert said(sandbox, "cat /srv/mine") == "kept\n"
        sandbox.snapshot("made")
        try:
            Sandbox.create("tiny:1", internet=True, home=home)
        except Unsupported as error:
            print("refused:", error.message)
    with Sandbox.create("made:1", home=home) as sandbox:
        assert said(sandbox, READ).startswith(KEPT)
        print(sandbox.get_info().driver, sandbox.get_info().origin)


def again(home: Home) -> None:
    """Capture one machine again and again: what it sealed before is closed to its own user."""
    scratch = home.root / "scratch"
    scratch.mkdir()
    asyncio.run(make_tiny(home, scratch))
    with Sandbox.create("tiny:1", home=home) as sandbox:
        for number in range(3):
            said(sandbox, f"echo {number} >>/srv/count")
            (child,) = sandbox.fork(1)
            assert not isinstance(child, AenvError), child
            assert said(child, "cat /srv/count").split() == [str(one) for one in range(number + 1)]
            child.kill()
        sandbox.snapshot("made")
        print(sandbox.get_info().driver)


def cold(home: Home) -> None:
    """The disk alone, under the driver that the environment names."""
    with Sandbox.create("made:1", cold=True, home=home) as sandbox:
        found = said(sandbox, READ)
        assert found.startswith(KEPT) and "root" not in found.split(), found
        said(sandbox, "test ! -e /tmp/.aenv-keep; test -d /srv/d")
        print(sandbox.get_info().driver, sandbox.get_info().origin)


def main(step: str) -> None:
    """Run one step and end its node."""
    home = Home.default()
    assert os.geteuid() != 0
    try:
        {"life": life, "again": again, "cold": cold}[step](home)
    finally:
        asyncio.run(NodeClient(home).shutdown(kill=True))


if __name__ == "__main__":
    main(sys.argv[1])
