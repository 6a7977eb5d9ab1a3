"""The SDK on real machines."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from aenv_run import AsyncSandbox, Sandbox
from aenv_run.errors import AenvError, CommandFailed, CommandTimeout, Conflict, NotFound, SandboxDead
from aenv_run.lifecycle import State
from aenv_run.paths import Home

COUNT = "n=0; while :; do n=$((n+1)); echo $n >/dev/shm/n; sleep 0.1; done"


def test_commands(sandbox: Sandbox) -> None:
    result = sandbox.commands.run("echo out; echo err >&2; pwd; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n/srv\n", "err\n")
    with pytest.raises(CommandFailed, match="exited with 3"):
        sandbox.commands.run("exit 3", check=True)
    assert sandbox.commands.run(["/bin/echo", "a b", "$HOME"]).stdout == "a b $HOME\n"
    env = sandbox.commands.run("env", envs={"MINE": "1"}).stdout
    for line in ("MINE=1", "FROM_IMAGE=yes", "E2B_SANDBOX=true", f"AENV_SANDBOX_ID={sandbox.sandbox_id}"):
        assert line in env.splitlines()
    assert sandbox.commands.run("hostname").stdout.strip() == sandbox.sandbox_id
    assert abs(int(sandbox.commands.run("date +%s").stdout) - time.time()) < 5
    seen: list[str] = []
    sandbox.commands.run("echo one; echo two", on_stdout=seen.append)
    assert "".join(seen) == "one\ntwo\n"
    with pytest.raises(CommandTimeout):
        sandbox.commands.run("sleep 60", timeout=0.5)


def test_background_commands(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("read line; echo got $line; exit 4", background=True, stdin=True)
    assert handle.pid in [process.pid for process in sandbox.commands.list()]
    handle.send_stdin("hello\n")
    result = handle.wait()
    assert (result.stdout, result.exit_code) == ("got hello\n", 4)
    sleeper = sandbox.commands.run("sleep 600", background=True, timeout=None)
    assert sandbox.commands.kill(sleeper.pid) and sleeper.wait().error == "signal: killed"
    assert not sandbox.commands.kill(sleeper.pid)


def test_files(sandbox: Sandbox, tmp_path: Path) -> None:
    files = sandbox.files
    files.write("/srv/a/b.txt", "häl\0lo")
    assert files.read("/srv/a/b.txt") == "häl\0lo"
    big = bytes(range(256)) * 8192
    files.write("/srv/big", big)
    assert files.read("/srv/big", "bytes") == big and files.get_info("/srv/big").size_bytes == len(big)
    (tmp_path / "local").write_bytes(b"from the host")
    files.write("/srv/local", tmp_path / "local")
    assert files.read("/srv/local") == "from the host"
    assert [entry.name for entry in files.list("/srv/a")] == ["b.txt"]
    assert files.make_dir("/srv/dir") and not files.make_dir("/srv/dir")
    files.rename("/srv/local", "/srv/dir/moved")
    assert files.exists("/srv/dir/moved") and not files.exists("/srv/local")
    files.remove("/srv/dir")
    with pytest.raises(NotFound):
        files.read("/srv/dir/moved")


def test_pause_and_resume(sandbox: Sandbox, home: Home) -> None:
    counter = sandbox.commands.run(COUNT, background=True, timeout=None)
    sandbox.files.write("/srv/disk", "on disk")
    time.sleep(0.5)
    before = int(sandbox.files.read("/dev/shm/n"))
    sandbox.pause()
    assert sandbox.get_info().state is State.PAUSED and not sandbox.is_running()
    with pytest.raises(Conflict, match="paused"):
        sandbox.commands.run("true")
    same = Sandbox.connect(sandbox.sandbox_id[:8], home=home)  # resumes it
    assert same.is_running() and same.files.read("/srv/disk") == "on disk"
    time.sleep(0.5)
    assert int(same.files.read("/dev/shm/n")) > before
    assert counter.pid in [process.pid for process in same.commands.list()]
    assert abs(int(same.commands.run("date +%s").stdout) - time.time()) < 5
    assert sandbox.commands.run("echo old handle").stdout == "old handle\n"


async def test_fork_isolates(home: Home) -> None:
    async with await AsyncSandbox.create("tiny", home=home) as parent:
        await parent.files.write("/srv/who", "parent")
        await parent.files.write("/dev/shm/who", "parent")
        children = await parent.fork(2)
        identities = set()
        for number, child in enumerate(children):
            assert not isinstance(child, AenvError)
            assert await child.files.read("/srv/who") == await child.files.read("/dev/shm/who") == "parent"
            await child.files.write("/srv/who", f"child {number}")
            await child.files.write("/dev/shm/who", f"child {number}")
            read = (
                "cat /proc/sys/kernel/random/boot_id /etc/machine-id; hostname; "
                "dd if=/dev/urandom bs=16 count=1 2>/dev/null | busybox md5sum"
            )
            identities |= set((await child.commands.run(read)).stdout.split()) - {"-"}
        assert len(identities) == 8
        assert await parent.files.read("/srv/who") == await parent.files.read("/dev/shm/who") == "parent"
        assert [await child.files.read("/srv/who") for child in children if isinstance(child, AsyncSandbox)] == [
            "child 0",
            "child 1",
        ]
        await asyncio.gather(*(child.kill() for child in children if isinstance(child, AsyncSandbox)))


def test_fork_each_gives_children_that_answer(sandbox: Sandbox) -> None:
    ids = []
    for child in sandbox.fork_each(3):
        assert isinstance(child, Sandbox)
        ids.append(child.commands.run("hostname").stdout.strip())
        assert ids[-1] == child.sandbox_id
        child.kill()
    assert len(set(ids)) == 3


def test_snapshot_of_a_resumed_sandbox_starts_from_memory_and_from_disk(sandbox: Sandbox, home: Home) -> None:
    sandbox.files.write("/srv/one", "1")
    sandbox.pause()
    sandbox.resume()
    sandbox.files.write("/srv/two", "2")
    sandbox.files.write("/dev/shm/three", "3")
    reply = sandbox.snapshot("kept", tags=["latest"])
    assert (reply.name, reply.version) == ("kept", 1)
    with Sandbox.create(reply.snapshot_id, home=home) as warm:
        assert warm.commands.run("cat /srv/one /srv/two /dev/shm/three").stdout == "123"
    with Sandbox.create("kept:latest", cold=True, home=home) as cold:
        assert cold.get_info().origin == "booted"
        assert cold.commands.run("cat /srv/one /srv/two; test -e /dev/shm/three").exit_code == 1
    assert sandbox.files.read("/srv/two") == "2"


def test_a_timeout_ends_it(home: Home) -> None:
    sandbox = Sandbox.create("tiny", timeout=300, home=home)
    sandbox.set_timeout(0.5)
    deadline = time.monotonic() + 20
    while sandbox.is_running() and time.monotonic() < deadline:
        time.sleep(0.1)
    with pytest.raises((NotFound, SandboxDead)):
        sandbox.commands.run("true")
    while Sandbox.list(home=home) and time.monotonic() < deadline:
        time.sleep(0.1)  # its end takes a moment, and whoever kills it meanwhile waits for it
    assert not sandbox.kill()
