"""Commands and the SDK for a server, over real machines. tests/unit and tests/contracts have the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from aenv_run import Sandbox
from aenv_run.cli.command import run
from aenv_run.credentials import ServerAddress
from aenv_run.paths import Home
from tests.e2e.test_serve import serving


def test_a_machine_of_a_server(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, back = tmp_path / "source", tmp_path / "back"
    source.mkdir()
    (source / "file").write_text("content\n")
    with serving(home) as served:
        address = ServerAddress.parse(served.url, served.key)
        monkeypatch.setenv("AENV_API_URL", served.url)
        monkeypatch.setenv("AENV_API_KEY", served.key)
        with Sandbox.create("tiny", envs={"SEED": "7"}, server=address) as made:
            assert made.commands.run("echo $SEED > /tmp/kept; echo ran").stdout == "ran\n"
            assert run(["upload", made.sandbox_id, str(source), "/srv/"]) == 0
            made.pause()
            made.resume()
            (child,) = made.fork()
            assert isinstance(child, Sandbox)
            with child:
                assert child.commands.run("cat /tmp/kept").stdout == "7\n"
                assert run(["download", child.sandbox_id, "/srv/source", str(back)]) == 0
        assert (back / "file").read_text() == "content\n"
        assert made.sandbox_id not in {info.sandbox_id for info in Sandbox.list(server=address)}
