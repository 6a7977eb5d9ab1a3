"""Disk and memory of one snapshot are of the same instant, whenever that is: no detach, no sync before it.

A guest writes a line, waits until it is on disk, and only then counts in memory. ``AENV_SNAPSHOTS`` is how many
snapshots are taken of it and restored (make soak: 50). Two are one of each kind: detached before, and not.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from aenv_run.drivers.protocol import Machine
from aenv_run.guest import Command, Guest
from tests.contracts.machines import Bench, prepare_capture, sh

SNAPSHOTS = int(os.environ.get("AENV_SNAPSHOTS", "2"))
#: /dev/shm is memory: "begun" is counted before a line is written, "done" after it was synced; both by appending:
#: a file that is written anew is empty for a moment.
LOOP = """echo $$ >/dev/shm/pid; i=0; while :; do i=$((i+1)); echo $i >>/dev/shm/begun;
echo $i | dd of=/log oflag=append conv=notrunc,fsync 2>/dev/null; echo $i >>/dev/shm/done; done"""
#: As a boot would: replay the journal, set the two totals of the superblock that no journal keeps, else nothing.
CHECK = """PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
e2fsck -fp "$0" >&2; test $? -le 1 && e2fsck -fn "$0" >&2 && debugfs -R 'cat /log' "$0" """
#: What it reads from now on comes from the disk and not from its cache.
STOP = "kill -STOP $(cat /dev/shm/pid); sync; echo 3 >/proc/sys/vm/drop_caches || true"


def lines_of(text: str) -> int:
    """How many lines the log has; they must be 1, 2, 3 ..., and whole."""
    found = text.split()
    assert found == [str(number) for number in range(1, len(found) + 1)], text[-400:]
    return len(found)


def on_disk(layers: tuple[Path, ...], scratch: Path) -> int:
    """The lines of the log on the disk alone; its file system must be clean once its journal is replayed."""
    below: Path | None = None
    for number, layer in enumerate(layers):  # in copies, which say in their headers what is below
        copy = scratch / f"{number}.qcow2"
        subprocess.run(["cp", "--sparse=always", layer, copy], check=True)
        copy.chmod(0o600)
        if below is not None:
            command = ["qemu-img", "rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b", below, copy]
            subprocess.run(command, check=True)
        below = copy
    assert below is not None
    raw = scratch / "disk.raw"
    subprocess.run(["qemu-img", "convert", "-f", "qcow2", "-O", "raw", below, raw], check=True)
    done = subprocess.run(["sh", "-c", CHECK, raw], capture_output=True, text=True, check=False)
    for path in scratch.iterdir():
        path.unlink()
    assert done.returncode == 0, done.stderr
    return lines_of(done.stdout)


async def in_memory(machine: Machine) -> tuple[int, int, int]:
    """done, the log's lines as the guest sees them, begun; read by its daemon, whatever its processes do."""
    async with Guest(machine.endpoint) as guest:
        texts = [(await guest.read_file(path)).decode() for path in ("/dev/shm/done", "/log", "/dev/shm/begun")]
    done, lines, begun = (lines_of(text) for text in texts)
    return done, lines, begun


@pytest.mark.long("gvisor-none")
async def test_a_line_that_is_on_disk_is_counted_in_memory_and_the_reverse(bench: Bench, tmp_path: Path) -> None:
    base = (*bench.disk, *bench.seed.disk)
    async with bench.child() as machine:
        freezes = await sh(machine, "test -d /sys/fs/cgroup/user && echo yes || true") == "yes"
        async with Guest(machine.endpoint) as guest, guest.start(Command(("/bin/sh", "-c", LOOP))):
            pass
        await sh(machine, "while [ ! -s /dev/shm/done ]; do sleep 0.05; done")
        seen = 0
        for number in range(SNAPSHOTS):
            detached = number % 2 == 0
            if detached:
                await prepare_capture(machine)
            capture = await machine.capture(bench.capture_directory(), memory=True)
            if detached:
                await sh(machine, "true")  # its processes go on
            lines_then = on_disk((*base, *capture.disk), tmp_path)
            assert lines_then >= seen
            seen = lines_then
            async with bench.child(bench.seed, capture) as child:
                if detached and freezes:  # its processes stand still until its first command
                    done, lines, begun = await in_memory(child)
                    assert done <= lines_then <= lines <= begun <= done + 1
                await sh(child, STOP)
                done, lines, begun = await in_memory(child)
                assert lines_then <= lines
                assert done <= lines <= begun <= done + 1
                after = await child.capture(bench.capture_directory(), memory=False)
            assert on_disk((*base, *capture.disk, *after.disk), tmp_path) == lines
            after.discard()
            capture.discard()
