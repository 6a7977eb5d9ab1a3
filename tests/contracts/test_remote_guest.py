"""What commands do in a sandbox, through a server: its proxy on a real socket, and the real daemon behind it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pexpect
import pytest

from aenv_run import Sandbox
from tests.contracts.envd_daemon import daemon
from tests.unit.remote_site import Commands, RemoteSite, remote_site

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def remote(binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteSite]:
    with daemon(binary) as base, remote_site(tmp_path_factory.mktemp("r"), daemon=base) as found:
        yield found


@pytest.fixture(scope="module")
def sandbox(remote: RemoteSite) -> str:
    """The one that there is."""
    return Sandbox.create("tiny", server=remote.address, timeout=3600).sandbox_id


@pytest.fixture
def aenv(
    remote: RemoteSite,
    sandbox: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Commands:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return Commands(remote, monkeypatch, capsys, tmp_path / "own")


def environment(remote: RemoteSite, own: Path) -> dict[str, str]:
    """Of a client that is a process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AENV_")}
    return kept | {
        "AENV_HOME": str(own),
        "AENV_API_URL": remote.address.url,
        "AENV_API_KEY": remote.address.api_key,
        "PYTHONPATH": str(ROOT),
        "TERM": "xterm",
    }


def run(remote: RemoteSite, own: Path, *argv: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "aenv_run.cli", *argv]
    return subprocess.run(command, input=stdin, capture_output=True, env=environment(remote, own), timeout=120)


def test_exec_passes_output_input_and_exit_code_on(remote: RemoteSite, sandbox: str, tmp_path: Path) -> None:
    done = run(remote, tmp_path, "exec", sandbox, "--", "sh", "-c", "echo out; echo no >&2; exit 9")
    assert (done.returncode, done.stdout, done.stderr) == (9, b"out\n", b"no\n")
    data = os.urandom(3 << 20)
    done = run(remote, tmp_path, "exec", "-i", sandbox[:6], "--", "cat", stdin=data)
    assert done.returncode == 0 and done.stdout == data
    done = run(remote, tmp_path, "exec", sandbox, "--timeout", "1", "--", "sleep", "60")
    assert done.returncode == 124
    done = run(remote, tmp_path, "exec", sandbox, "--", "/nonesuch")
    assert done.returncode == 127


def test_a_shell_is_opened_and_follows_the_window(remote: RemoteSite, sandbox: str, tmp_path: Path) -> None:
    argv = ["-m", "aenv_run.cli", "connect", sandbox]
    child = pexpect.spawn(
        sys.executable, argv, env=environment(remote, tmp_path), dimensions=(30, 100), timeout=60
    )
    child.expect("[#$] ")
    child.sendline("echo si''ze; stty size")
    child.expect("size\r\n30 100\r\n")
    child.setwinsize(40, 120)
    child.sendline("until stty size | grep -q '40 120'; do :; done; echo new''size")
    child.expect("newsize\r\n")
    child.sendline("exit 7")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 7


def test_the_sdk_takes_a_server(remote: RemoteSite, sandbox: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = Sandbox.connect(sandbox, server=remote.address)
    assert there.commands.run("echo $((6*7))").stdout == "42\n"
    assert [info.sandbox_id for info in Sandbox.list(server=remote.address)] == [sandbox]
    monkeypatch.setenv("AENV_API_URL", remote.address.url)
    monkeypatch.setenv("AENV_API_KEY", remote.address.api_key)
    by_environment = Sandbox.connect(sandbox)
    assert by_environment.is_running() and by_environment.get_info().sandbox_id == sandbox
    assert [info.sandbox_id for info in Sandbox.list(server=remote.address.url)] == [sandbox]


def test_files_go_in_and_out(aenv: Commands, sandbox: str, tmp_path: Path) -> None:
    there = tmp_path / "there"  # the daemon of these tests has this machine's files
    there.mkdir()
    tree = tmp_path / "tree"
    (tree / "sub" / "empty").mkdir(parents=True)
    (tree / ".hidden").write_text("h")
    (tree / "sub" / "large").write_bytes(os.urandom(2 << 20))
    done = json.loads(aenv.there("upload", sandbox, str(tree), f"{there}/", "--json")[0])
    assert done == {"files": 2, "size_bytes": (2 << 20) + 1, "path": f"{there}/tree"}
    assert (there / "tree" / "sub" / "empty").is_dir() and (there / "tree" / ".hidden").read_text() == "h"
    (tree / "one").write_text("1")
    assert (
        aenv.there("upload", sandbox, str(tree / "one"), f"{there}/as")[0]
        == f"uploaded 1 file (1 B) to {there}/as\n"
    )
    done = json.loads(aenv.there("download", sandbox, f"{there}/tree", str(tmp_path / "back"), "--json")[0])
    assert done["files"] == 2
    assert (tmp_path / "back" / "sub" / "large").read_bytes() == (tree / "sub" / "large").read_bytes()
    assert (tmp_path / "back" / "sub" / "empty").is_dir()
    again = ("download", sandbox, f"{there}/tree", str(tmp_path / "back"))
    assert "back/tree" in aenv.there(*again)[0]  # into a directory that is here: it keeps its name
    (tmp_path / "back" / "tree" / "sub" / "large").write_bytes(b"mine")
    assert "--force" in aenv.there(*again, code=65)[1]
    assert (tmp_path / "back" / "tree" / "sub" / "large").read_bytes() == b"mine"
    aenv.there(*again, "--force")
    assert (tmp_path / "back" / "tree" / "sub" / "large").stat().st_size == 2 << 20
    assert not list(tmp_path.glob(".aenv-*"))
    aenv.there("cp", str(tree), f"{sandbox}:{there}/cp")
    aenv.there("cp", f"{sandbox}:{there}/cp", str(tmp_path / "cp-back"))
    assert (tmp_path / "cp-back" / "one").read_text() == "1"


def test_what_is_in_the_way_of_a_transfer(aenv: Commands, sandbox: str, tmp_path: Path) -> None:
    tree, there = tmp_path / "tree", tmp_path / "there"
    tree.mkdir()
    there.mkdir()
    (tree / "file").write_text("new")
    assert "absolute" in aenv.there("upload", sandbox, str(tree), "relative", code=64)[1]
    assert "--user" in aenv.there("upload", sandbox, str(tree), "/x", "--user", "root", code=64)[1]
    assert "does not exist" in aenv.there("upload", sandbox, str(tmp_path / "none"), "/x", code=66)[1]
    (tree / "link").symlink_to("file")
    assert "link" in aenv.there("upload", sandbox, str(tree), f"{there}/x", code=64)[1]
    assert not (there / "x").exists()
    target = tmp_path / "out"
    assert "link" in aenv.there("download", sandbox, str(tree), str(target), code=64)[1]
    (tree / "link").unlink()
    assert "does not exist" in aenv.there("download", sandbox, str(tree), str(tmp_path / "no" / "out"), code=66)[1]
    assert aenv.there("download", sandbox, f"{there}/none", code=66)
    aenv.there("download", sandbox, f"{tree}/file", str(target))
    target.write_text("mine")
    assert "--force" in aenv.there("download", sandbox, f"{tree}/file", str(target), code=65)[1]
    assert target.read_text() == "mine"
    aenv.there("download", sandbox, f"{tree}/file", str(target), "--force")
    assert target.read_text() == "new"
    assert "no directory" in aenv.there("download", sandbox, str(tree), str(target), "--force", code=65)[1]
    aenv.there("download", sandbox, str(tree), f"{tmp_path}/made/", code=66)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "tree" / "file").mkdir(parents=True)
    assert (
        "is a directory" in aenv.there("download", sandbox, str(tree), f"{tmp_path}/made/", "--force", code=65)[1]
    )
    assert not list(tmp_path.glob("**/.aenv-*"))


@contextmanager
def echo() -> Iterator[int]:
    """A service that greets, and says back what it is told; its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"hello ")
                got = b""
                while data := connection.recv(65536):
                    got += data
                connection.sendall(got)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_a_port_is_brought_here(remote: RemoteSite, sandbox: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        local = free.getsockname()[1]
    with echo() as port:
        command = [sys.executable, "-m", "aenv_run.cli", "port-forward", sandbox, f"{local}:{port}"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment(remote, tmp_path)) as forward:
            assert forward.stderr is not None
            try:
                assert f"127.0.0.1:{local}".encode() in forward.stderr.readline()
                data = os.urandom(1 << 20)
                with socket.create_connection(("127.0.0.1", local), timeout=60) as connection:
                    assert connection.recv(6) == b"hello "  # the service speaks first
                    connection.sendall(data)
                    connection.shutdown(socket.SHUT_WR)  # one direction ends, the other goes on
                    got = b""
                    while part := connection.recv(65536):
                        got += part
                assert got == data
            finally:
                forward.terminate()
                forward.wait(30)
