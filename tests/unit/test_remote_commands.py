"""Commands for a server say what they say on its own machine. docs/remote.md has the table."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import click
import httpx
import pytest

from aenv_run.api.node_calls import host
from aenv_run.api.node_calls.node import is_passed
from aenv_run.cli.arguments import (
    Completer,
    complete_name,
    complete_reference,
    complete_sandbox,
    complete_snapshot,
)
from aenv_run.cli.command import cli
from aenv_run.host_commands import COMMANDS
from aenv_run.node_api import Service, make_app
from aenv_run.paths import Home
from tests.unit.remote_site import Commands, RemoteSite, remote_site

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteSite]:
    with remote_site(tmp_path_factory.mktemp("r")) as found:
        yield found


@pytest.fixture
def aenv(
    remote: RemoteSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Commands]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    yield Commands(remote, monkeypatch, capsys, tmp_path / "own")
    remote.clear()


def test_a_sandbox_lives_its_life_on_a_server(aenv: Commands) -> None:
    made = json.loads(aenv.there("start", "tiny", "--metadata", "a=1", "--json")[0])
    sandbox = made["sandbox_id"]
    assert made["metadata"] == {"a": "1"}
    (row,) = aenv.same("ls")  # type: ignore[misc]
    assert row["sandbox_id"] == sandbox
    assert aenv.there("pause", sandbox[:6])[0].strip() == sandbox
    assert aenv.there("pause", sandbox, code=65)[1] == aenv.here("pause", sandbox, code=65)[1]
    assert aenv.there("resume", sandbox)[0].strip() == sandbox
    children = json.loads(aenv.there("fork", sandbox, "-n", "3", "--json")[0])
    assert [child["index"] for child in children] == [0, 1, 2] and not any(child["error"] for child in children)
    aenv.there("timeout", sandbox, "1h")
    made = json.loads(aenv.there("snapshot", "create", sandbox, "--name", "made", "--json")[0])
    assert (made["name"], made["version"]) == ("made", 1)
    assert aenv.same("catalog", "show", "made:1")
    aenv.same("network", sandbox)
    again = aenv.there("reset", sandbox)[0].strip()
    assert len(aenv.there("rm", "--all")[0].split()) == 4 and again
    assert aenv.same("ls") == []
    missing = aenv.there("rm", "snothere", code=66)[1]
    assert missing == aenv.here("rm", "snothere", code=66)[1] and "there is no sandbox" in missing
    aenv.there("catalog", "rm", "made:1")


def test_pools_and_the_node(aenv: Commands) -> None:
    aenv.there("pool", "set", "tiny:1", "--high", "1")
    (pool,) = json.loads(aenv.there("pool", "ls", "--json")[0])
    assert pool["reference"] == "tiny:1" and pool["high"] == 1
    aenv.there("pool", "rm", "tiny:1")
    assert aenv.same("pool", "ls") == []
    found = aenv.same("node", "status")
    assert isinstance(found, dict) and found["running"] and found["home"] == str(aenv.remote.site.home.root)
    assert "on the server itself" in aenv.there("node", "stop", code=69)[1]


@pytest.mark.parametrize(
    "argv",
    ["catalog ls", "catalog show tiny:1", "catalog search tiny", "catalog graph tiny", "catalog history tiny",
     "catalog diff tiny:1 tiny:latest --no-files",
     "catalog retain tiny --keep 1 --dry-run", "catalog label tiny:1",
     "catalog verify tiny:1", "du", "du tiny:1", "check", "check --deep", "check --repair", "gc --dry-run",
     "pack --dry-run", "cache show", "cache prefetch tiny", "cache prune --all"],
)  # fmt: skip
def test_what_reads_says_the_same(aenv: Commands, argv: str) -> None:
    aenv.same(*argv.split())


def test_doctor_is_of_the_servers_machine(aenv: Commands) -> None:
    here, there = (json.loads(one("doctor", "--json", code=None)[0]) for one in (aenv.here, aenv.there))
    assert there["home"] == here["home"] == str(aenv.remote.site.home.root)
    assert [row["driver"] for row in there["drivers"]] == [row["driver"] for row in here["drivers"]]
    assert aenv.remote.address.url in aenv.there("doctor", code=None)[0]


def test_the_catalog_is_changed_on_the_server(aenv: Commands, tmp_path: Path) -> None:
    aenv.there("catalog", "tag", "tiny:1", "stable")
    aenv.there("catalog", "promote", "tiny:1", "--to", "prod", "--json")
    aenv.there("catalog", "label", "tiny:1", "suite=nightly")
    assert "stable" in str(aenv.same("catalog", "ls"))
    assert aenv.same("catalog", "label", "tiny:1") == {
        "name": "tiny",
        "version": 1,
        "labels": {"suite": "nightly"},
    }
    aenv.same("catalog", "history", "tiny")
    aenv.there("catalog", "tag", "tiny:1", "stable", "--delete")
    aenv.there("catalog", "keygen", str(tmp_path / "ci"), "-W")
    aenv.there("catalog", "sign", "tiny:1", "--key", str(tmp_path / "ci"))
    (row,) = aenv.same("catalog", "verify", "tiny:1", "--key", str(tmp_path / "ci.pub"))  # type: ignore[misc]
    assert row["valid"] is True
    aenv.there("catalog", "label", "tiny:1", "--delete", "suite")
    aenv.there("catalog", "rollback", "tiny", "prod", code=None)


def test_a_snapshot_crosses_in_both_directions(aenv: Commands, tmp_path: Path) -> None:
    aenv.there("catalog", "export", "tiny:1", str(tmp_path / "out"))
    assert (tmp_path / "out" / "index.json").exists()
    done = json.loads(aenv.there("catalog", "import", str(tmp_path / "out"), "--name", "copy", "--json")[0])
    assert (done["name"], done["version"]) == ("copy", 1)
    shown = aenv.same("catalog", "show", "copy:1")
    assert isinstance(shown, dict) and "tiny:1" in shown["names"]
    aenv.there("catalog", "rm", "copy:1")
    assert not (tmp_path / "own" / "repository").exists()


def test_templates_are_the_servers(aenv: Commands, tmp_path: Path) -> None:
    assert "tiny" in str(aenv.same("template", "list"))
    aenv.there("template", "tag", "tiny:1", "nightly")
    assert "nightly" in str(aenv.same("catalog", "ls"))
    aenv.there("template", "tag", "tiny", "nightly", "--delete")
    assert "Build succeeded" in aenv.there("template", "watch", "tiny")[1]
    assert aenv.there("template", "delete", "none", code=66)
    assert aenv.there("pull", "not an image", code=64)[1] == aenv.here("pull", "not an image", code=64)[1]
    (tmp_path / "Dockerfile").write_text("FROM debian:12\n")
    assert "keeps the repository" in aenv.there("build", str(tmp_path / "Dockerfile"), code=69)[1]


def test_garbage_is_collected_on_the_server(aenv: Commands) -> None:
    made = json.loads(aenv.there("start", "tiny", "--json")[0])
    left = json.loads(aenv.there("snapshot", "create", made["sandbox_id"], "--json")[0])["snapshot_id"]
    aenv.there("rm", made["sandbox_id"])
    held = json.loads(aenv.there("gc", "--dry-run", "--grace", "0s", "--json")[0])
    done = json.loads(aenv.there("gc", "--grace", "0s", "--json")[0])
    assert held["dry_run"] and not done["dry_run"] and held["snapshots"] == done["snapshots"] >= 1
    assert "freed" in aenv.there("gc")[0]
    assert aenv.there("catalog", "show", left, code=66)
    assert aenv.there("gc", "--grace", "soon", code=64)[1] == aenv.here("gc", "--grace", "soon", code=64)[1]


def test_what_is_of_one_machine_alone_is_refused(aenv: Commands) -> None:
    assert "port-forward" in aenv.there("start", "tiny", "--publish", "unix:/x/y:80", code=69)[1]
    assert aenv.same("ls") == []


def test_commands_need_the_right_key(aenv: Commands) -> None:
    aenv.there("ls")
    aenv.patch.setenv("AENV_API_KEY", "x" * 40)
    for argv in (["ls"], ["catalog", "ls"], ["doctor"], ["check"], ["start", "tiny"]):
        assert "does not take this API key" in aenv._run(tuple(argv), 77)[1]


def test_a_server_that_is_not_there_is_said_so(aenv: Commands) -> None:
    aenv.there("ls")
    aenv.patch.setenv("AENV_API_URL", "http://127.0.0.1:1")
    for argv in (["ls"], ["doctor"], ["auth", "--key", "k" * 40, "http://127.0.0.1:1"], ["start", "tiny"]):
        assert "cannot be reached" in aenv._run(tuple(argv), 75)[1]


def test_local_means_this_machine(aenv: Commands) -> None:
    aenv.there("start", "tiny")
    assert json.loads(aenv.there("--local", "ls", "--json")[0]) == []


def test_auth_keeps_what_the_server_took(aenv: Commands) -> None:
    address = aenv.remote.address
    for name in ("AENV_HOME", "AENV_API_URL", "AENV_API_KEY"):
        aenv.patch.delenv(name, raising=False)
    assert "this machine" in aenv._run(("auth", "--show"), 0)[0]
    assert "does not take" in aenv._run(("auth", address.url, "--key", "x" * 40), 77)[1]
    assert not (aenv.own.parent / "config" / "aenv" / "credentials").exists()
    said = aenv._run(("auth", address.url, "--key", address.api_key), 0)
    assert address.url in said[1] and address.api_key not in said[0] + said[1]
    shown = aenv._run(("auth", "--show", "--json"), 0)[0]
    assert json.loads(shown)["url"] == address.url and address.api_key not in shown
    assert json.loads(aenv._run(("node", "status", "--json"), 0)[0])["home"] == str(aenv.remote.site.home.root)
    aenv._run(("auth", "--logout"), 0)
    assert "this machine" in aenv._run(("auth", "--show"), 0)[0]
    aenv._run(("auth", "--show", "--logout"), 64)
    aenv._run(("auth", address.url), 64)  # no terminal, no key


def test_names_are_completed_by_the_server_or_in_silence_not_at_all(aenv: Commands) -> None:
    made = json.loads(aenv.there("start", "tiny", "--json")[0])["sandbox_id"]

    def completed(complete: Completer, typed: str) -> list[str]:
        found = complete(click.Context(cli), click.Argument(["id"]), typed)
        return [item.value for item in found]

    aenv.captured.readouterr()
    assert completed(complete_sandbox, made[:3]) == [made] and completed(complete_sandbox, "x") == []
    assert "tiny:1" in completed(complete_reference, "ti") and completed(complete_name, "ti") == ["tiny"]
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections and says nothing
        aenv.patch.setenv("AENV_API_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert completed(complete_sandbox, "") == []
    aenv.patch.setenv("AENV_API_URL", "http://127.0.0.1:1")
    assert completed(complete_snapshot, "") == []
    aenv.patch.delenv("AENV_API_KEY")
    assert completed(complete_sandbox, "") == []
    assert aenv.captured.readouterr() == ("", "")


async def test_a_client_that_hangs_up_interrupts_what_the_server_runs(tmp_path: Path) -> None:
    url = ""
    async with aclosing(host._run(["serve", "--port", "0"], Home(tmp_path))) as lines:
        async for line in lines:
            if line.says and line.says.startswith("serving "):
                url = line.says.removeprefix("serving ")
                break
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(f"{url}/health")


def test_clients_need_nothing_of_linux(remote: RemoteSite, tmp_path: Path) -> None:
    address = remote.address
    also = ("connect", "cp", "upload", "download", "port-forward", "pool set", "snapshot create", "catalog diff")
    commands = [
        "--help",
        f"auth {address.url} --key {address.api_key}",
        "start tiny",
        "ls",
        "catalog ls",
        "cache show",
        *(f"{' '.join(command)} --help" for command in COMMANDS),
        *(f"{command} --help" for command in also),
    ]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AENV_")}
    environment = kept | {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "c"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/unit/pretend_macos.py"), " ; ".join(commands)],
        capture_output=True, text=True, env=environment, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "SNAPSHOT" in done.stdout and "tiny:1" in done.stdout and "on demand" in done.stdout
    assert done.stdout.count("Usage") >= len(COMMANDS) + len(also) + 1
    remote.clear()


def test_everything_that_clients_ask_a_node_is_passed_on(tmp_path: Path) -> None:
    import asyncio

    async def routes() -> list[tuple[str, str]]:
        app = make_app(Service(Home(tmp_path), lambda: None))
        return [(m, r.path) for r in app.routes for m in sorted(r.methods - {"HEAD"})]  # type: ignore[attr-defined]

    for method, path in asyncio.run(routes()):
        target = path.replace("{sandbox_id}", "s4f0").replace("{reference}", "tiny:1")
        assert is_passed(method, target) is (path not in ("/shutdown", "/health")), (method, path)


@pytest.mark.parametrize(
    "path", ["/shutdown", "/sandboxes/../shutdown", "/sandboxes/s4f/x", "//driver", "/driver/"]
)
def test_nothing_else_is_passed_on(path: str) -> None:
    assert not is_passed("POST", path) and not is_passed("GET", path)
