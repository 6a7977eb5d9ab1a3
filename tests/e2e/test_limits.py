"""What happens at each limit: plain results where the guest meets it, typed errors where the node does."""

from __future__ import annotations

import time

import pytest

from aenv_run import Sandbox
from aenv_run.errors import InvalidInput, TimeOver
from aenv_run.lifecycle import State
from aenv_run.paths import Home

#: As much as the kernel grants at all, more than is free, and every page of it is written.
MOST = "busybox awk '/MemTotal/ {print int($2 * 0.95)}' /proc/meminfo"
TOO_MUCH = f"exec dd if=/dev/zero of=/dev/null count=1 bs=$({MOST})K"


def only_qemu(sandbox: Sandbox) -> None:
    """gVisor's limits are the host's, on the sandbox as a whole: tests/contracts/test_gvisor_machine.py."""
    if sandbox.get_info().driver != "qemu":
        pytest.skip("the guest's own kernel keeps this limit: AENV_DRIVER=qemu")


def test_out_of_memory_kills_a_process_and_not_the_sandbox(sandbox: Sandbox) -> None:
    only_qemu(sandbox)
    result = sandbox.commands.run(TOO_MUCH, timeout=120)
    assert result.error == "signal: killed" and result.exit_code != 0, result
    assert sandbox.commands.run("echo fine").stdout == "fine\n" and sandbox.is_running()


def test_a_full_disk_is_enospc(sandbox: Sandbox) -> None:
    result = sandbox.commands.run("dd if=/dev/zero of=/srv/big bs=1M count=500", timeout=120)
    assert result.exit_code == 1 and "No space left on device" in result.stderr
    sandbox.commands.run("rm /srv/big; sync")
    assert sandbox.commands.run("echo x >/srv/small && cat /srv/small").stdout == "x\n"


def test_too_many_processes_is_eagain(sandbox: Sandbox) -> None:
    only_qemu(sandbox)
    script = "echo 200 >/proc/sys/kernel/threads-max; i=0; while [ $i -lt 400 ]; do sleep 60 & i=$((i+1)); done"
    result = sandbox.commands.run(script, timeout=120)
    assert result.exit_code != 0 and "Resource temporarily unavailable" in result.stderr, result
    sandbox.commands.run(["/bin/busybox", "killall", "sleep"])
    assert sandbox.commands.run("echo fine").stdout == "fine\n"


def test_time_over_has_an_error_of_its_own(home: Home) -> None:
    with Sandbox.create("tiny", home=home, max_seconds=4) as sandbox:
        started_s = time.monotonic()
        with pytest.raises(TimeOver, match="4 s"):
            sandbox.commands.run("sleep 60")
        assert 2 < time.monotonic() - started_s < 20
        info = sandbox.get_info()
        assert (info.state, info.ended_by) == (State.DEAD, "time_over") and "time over" in info.reason
        for use in (sandbox.pause, lambda: sandbox.files.read("/etc/passwd")):
            with pytest.raises(TimeOver):
                use()


def test_a_machine_of_another_size_needs_a_cold_start(home: Home) -> None:
    with pytest.raises(InvalidInput, match="memory_mib"):
        Sandbox.create("tiny", home=home, memory_mib=256)
    with Sandbox.create("tiny", home=home, cold=True, memory_mib=256) as sandbox:
        total_kib = int(sandbox.commands.run("busybox awk '/MemTotal/ {print $2}' /proc/meminfo").stdout)
        assert total_kib > 200 << 10 and sandbox.get_info().machine.memory_mib == 256
