"""Child processes end as groups, within their limits, whatever happens to the caller."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aenv_run import process
from aenv_run.errors import AenvError, CommandTimeout, MissingDependency


async def gone(pid: int) -> bool:
    for _ in range(200):
        if process.read_start_ticks(pid) is None:
            return True
        await asyncio.sleep(0.01)
    return False


async def written_pid(path: Path) -> int:
    for _ in range(500):
        if path.exists() and (text := path.read_text().strip()):
            return int(text)
        await asyncio.sleep(0.01)
    raise AssertionError("the child never wrote its pid")


async def test_run_returns_the_exit_code_and_both_streams() -> None:
    done = await process.run(["sh", "-c", "cat; echo err >&2; exit 3"], timeout_s=10, stdin=b"in" * 100_000)
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"in" * 100_000, b"err\n")
    assert (await process.run(["sh", "-c", "kill -9 $$"], timeout_s=10)).exit_code == -signal.SIGKILL


async def test_run_does_not_mind_a_child_that_ignores_its_input() -> None:
    assert (await process.run(["true"], timeout_s=10, stdin=b"x" * (1 << 20))).exit_code == 0


@pytest.mark.parametrize("how", ["timeout", "limit", "cancel"])
async def test_the_whole_group_ends(tmp_path: Path, how: str) -> None:
    pid_file = tmp_path / "pid"
    noise = "yes" if how == "limit" else "sleep 60"
    argv = ["sh", "-c", f"sleep 60 & echo $! >{pid_file}; {noise}"]
    task = asyncio.create_task(process.run(argv, timeout_s=0.5 if how == "timeout" else 60, limit_bytes=100_000))
    pid = await written_pid(pid_file)
    if how == "cancel":
        task.cancel()
    with pytest.raises({"timeout": CommandTimeout, "limit": AenvError, "cancel": asyncio.CancelledError}[how]):
        await task
    assert await gone(pid)


async def test_a_leader_that_ended_leaves_nobody(tmp_path: Path) -> None:
    with pytest.raises(CommandTimeout):
        await process.run(["sh", "-c", f"sleep 60 & echo $! >{tmp_path}/pid"], timeout_s=0.5)
    assert await gone(await written_pid(tmp_path / "pid"))


@pytest.mark.timeout(30)
async def test_a_cancellation_during_the_start_ends_the_group(tmp_path: Path) -> None:
    for index in range(8):
        pid_file = tmp_path / f"pid{index}"
        argv = ["sh", "-c", f"sleep 60 & echo $! >{pid_file}; wait"]
        task = asyncio.create_task(process.run(argv, timeout_s=60))
        for _ in range(index):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if pid_file.exists() and (text := pid_file.read_text().strip()):
            assert await gone(int(text))


async def test_a_missing_program_is_named_with_its_fix() -> None:
    with pytest.raises(MissingDependency, match="no-such-program"):
        await process.run(["no-such-program"], timeout_s=1)
    with pytest.raises(MissingDependency) as error:
        await process.check(["no-such-program"], what="x", fix="apt install it", timeout_s=1)
    assert error.value.fix == "apt install it"


async def test_check_says_what_failed_with_the_last_lines() -> None:
    with pytest.raises(AenvError, match=r"(?s)cannot frob: sh exited with 2: .*line 20") as error:
        await process.check(["sh", "-c", "seq -f 'line %g' 20 >&2; exit 2"], what="cannot frob", timeout_s=10)
    assert "line 5\n" not in error.value.message


async def test_a_spawned_child_is_waited_for_and_killed_with_its_group(tmp_path: Path) -> None:
    child = await process.spawn(
        ["sh", "-c", f"echo hello; sleep 60 & echo $! >{tmp_path}/pid; wait"],
        log=tmp_path / "log",
        ephemeral=False,
    )
    other = await written_pid(tmp_path / "pid")
    assert child.alive
    assert not process.is_alive(child.pid, child.start_ticks + 1)
    waiting = asyncio.create_task(child.wait())
    await asyncio.sleep(0)
    for _ in range(2):
        child.kill_group()
    assert await waiting == -signal.SIGKILL
    assert await gone(other)
    assert not child.alive
    assert (tmp_path / "log").read_text() == "hello\n"


async def test_a_bounded_child_cannot_fill_the_disk(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = await process.spawn(
        ["sh", "-c", "sleep 0.2; echo first; yes 2>/dev/null; echo last"], log=log, ephemeral=False, bounded=True
    )
    await asyncio.wait_for(child.wait(), 10)  # `yes` cannot write and gives up
    assert not log.exists()
    child.drain(log)
    child.close()
    assert log.read_text().startswith("first\n")
    assert log.stat().st_size <= 65536


async def test_the_output_of_an_adopted_child_can_be_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = await process.spawn(["sh", "-c", "echo hello; sleep 60"], log=log, ephemeral=False, bounded=True)
    adopted = process.Child.adopt(child.pid, child.start_ticks)
    for _ in range(500):
        adopted.drain(log)
        if log.read_text():
            break
        await asyncio.sleep(0.01)
    assert log.read_text() == "hello\n"
    adopted.kill_group()
    assert await adopted.wait() is None
    assert await child.wait() == -signal.SIGKILL
    adopted.close()
    child.close()


async def test_an_ephemeral_child_ends_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import asyncio, pathlib\n"
        "from aenv_run import process\n"
        f"log = pathlib.Path({str(tmp_path / 'log')!r})\n"
        "print(asyncio.run(process.spawn(['sleep', '60'], log=log, ephemeral=True)).pid)\n"
    )
    done = await process.run([sys.executable, "-c", script], timeout_s=30, env=os.environ)
    assert done.exit_code == 0, done.stderr
    assert await gone(int(done.stdout))


@pytest.mark.parametrize(
    ("script", "ending"),
    [("exit 3", " with exit code 3"), ("kill -SEGV $$", " by SIGSEGV"), ("exit 0", " with exit code 0")],
)
async def test_how_a_child_ended_is_said(tmp_path: Path, script: str, ending: str) -> None:
    child = await process.spawn(["sh", "-c", f"sleep 0.2; {script}"], log=tmp_path / "log", ephemeral=True)
    assert child.how_it_ended() == ""
    await child.wait()
    assert child.how_it_ended() == ending


async def test_a_process_is_watched_to_its_end_and_only_if_it_is_the_one_meant() -> None:
    child = subprocess.Popen(["sleep", "60"])  # noqa: ASYNC220 - its pid counts, as the node's does
    try:
        while b"60" not in Path(f"/proc/{child.pid}/cmdline").read_bytes():  # noqa: ASYNC110 - the kernel is late
            await asyncio.sleep(0.001)
        running = process.Watch(child.pid, "60")
        assert not await running.ended_within(0.01)
        child.kill()
        assert await running.ended_within(30)  # not yet waited for: its files are gone all the same
        running.close()
        running.close()
    finally:
        child.kill()
        child.wait()
    for pid, word in ((os.getpid(), "of another program"), (child.pid, "60"), (0, ""), (1 << 62, "")):
        other = process.Watch(pid, word)
        assert await other.ended_within(0)
        other.close()
