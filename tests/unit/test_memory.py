"""Dirty pages of a live process, found two ways and streamed over a copy of their base."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv_run import memory
from aenv_run.errors import AenvError, SandboxDead
from aenv_run.memory import PAGE, Run

PAGES = 4096
WRITTEN = [0, 1, 2, 7, 100, 101, 4095]
CHILD = f"""
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
ram = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
for page in range(50, 90):
    ram[page * {PAGE}]                     # only read
for page in {WRITTEN}:
    ram[page * {PAGE} : page * {PAGE} + 4] = b"page" if page != 7 else bytes(4)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base"
    with path.open("wb") as file:
        file.truncate(PAGES * PAGE)
        file.seek(60 * PAGE)
        file.write(b"base" * PAGE)
    path.chmod(0o444)
    return path


@pytest.fixture
def pid(base: Path) -> Iterator[int]:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(base)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin and child.stdout
    assert child.stdout.readline() == b"ready\n"
    yield child.pid
    child.stdin.close()
    child.stdout.close()
    child.wait(10)


def pages_of(runs: list[Run]) -> list[int]:
    return [page for run in runs for page in range(run.offset // PAGE, (run.offset + run.length) // PAGE)]


def test_only_written_pages_are_dirty_and_both_ways_agree(base: Path, pid: int) -> None:
    mapping = memory.find_mapping(pid, base)
    runs = memory.dirty_runs(mapping)
    assert pages_of(runs) == WRITTEN
    assert runs[0] == Run(0, 3 * PAGE)
    descriptor = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY)
    try:
        assert memory._parse_pagemap(descriptor, mapping) == runs
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("skip_zeros", [False, True])
def test_base_and_dirty_pages_make_the_whole(base: Path, pid: int, tmp_path: Path, skip_zeros: bool) -> None:
    target = tmp_path / "ram"
    memory.copy_sparse(base, target)
    mapping = memory.find_mapping(pid, base)
    with target.open("r+b") as file:
        count = memory.PageReader().stream(
            mapping, memory.dirty_runs(mapping), file.fileno(), skip_zeros=skip_zeros
        )
    assert count == len(WRITTEN) * PAGE
    expected = bytearray(base.read_bytes())
    for page in WRITTEN:
        expected[page * PAGE : page * PAGE + 4] = b"page" if page != 7 else bytes(4)
    assert target.read_bytes() == expected
    assert base.stat().st_size == PAGES * PAGE


def test_a_copy_keeps_the_holes(base: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    memory.copy_sparse(base, target)
    assert target.read_bytes() == base.read_bytes()
    assert target.stat().st_blocks * 512 < 1 << 20
    with pytest.raises(FileExistsError):
        memory.copy_sparse(base, target)


def test_a_process_without_the_mapping_is_an_error(tmp_path: Path, base: Path) -> None:
    with pytest.raises(AenvError, match="not mapped"):
        memory.find_mapping(os.getpid(), base)
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(SandboxDead):
        memory.find_mapping(gone.pid, base)


def test_batches_fit_the_buffer_and_the_system_call() -> None:
    runs = [Run(index * 2 * PAGE, PAGE) for index in range(3000)] + [Run(1 << 30, 3 * memory.BUFFER_BYTES + PAGE)]
    batches = list(memory._batches(runs))
    assert all(len(batch) <= memory.MAX_IOVECS for batch in batches)
    assert all(sum(run.length for run in batch) <= memory.BUFFER_BYTES for batch in batches)
    merged: list[Run] = []
    for batch in batches:
        for run in batch:
            memory._append(merged, run.offset, run.offset + run.length)
    assert merged == runs
