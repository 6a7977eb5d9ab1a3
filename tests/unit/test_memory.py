"""Dirty pages of a live process over a base and layers, found two ways; files made of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv_run import memory
from aenv_run.errors import AenvError, SandboxDead
from aenv_run.memory import PAGE
from aenv_run.memory_files import copy_sparse, flatten, whole_of
from aenv_run.memory_layers import Run, coalesce, finish_layer

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
    mapping = memory.find_mapping(pid, whole_of(base, ()))
    runs = memory.dirty_runs(mapping)
    assert pages_of(runs) == WRITTEN
    assert runs[0] == Run(0, 3 * PAGE)
    descriptor = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY)
    try:
        assert memory._parse_pagemap(descriptor, mapping) == runs
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("room", [1, 100, memory.SCAN_REGIONS])
def test_many_regions_are_found_once_and_in_order(base: Path, room: int) -> None:
    scattered = list(range(0, PAGES, 3))  # more than the kernel buffers
    script = CHILD.replace(str(WRITTEN), f"range(0, {PAGES}, 3)")
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(base)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin and child.stdout
    assert child.stdout.readline() == b"ready\n"
    mapping = memory.find_mapping(child.pid, whole_of(base, ()))
    descriptor = os.open(f"/proc/{child.pid}/pagemap", os.O_RDONLY)
    try:
        assert pages_of(memory._scan(descriptor, mapping, room)) == scattered
        assert pages_of(memory._parse_pagemap(descriptor, mapping)) == scattered
    finally:
        os.close(descriptor)
        child.stdin.close()
        child.stdout.close()
        child.wait(10)


def changed(base: Path) -> bytes:
    expected = bytearray(base.read_bytes())
    for page in WRITTEN:
        expected[page * PAGE : page * PAGE + 4] = b"page" if page != 7 else bytes(4)
    return bytes(expected)


def capture_layer(pid: int, below: list[Path], target: Path, ready_bytes: int) -> None:
    mapping = memory.find_mapping(pid, whole_of(below[0], below[1:]))
    runs = coalesce(memory.dirty_runs(mapping))
    file = memory.ReadyFile(target, ready_bytes)
    memory.PageReader().pack(mapping, runs, file)
    finish_layer(file.descriptor, PAGES * PAGE, runs)
    file.close()


@pytest.mark.parametrize("ready_pages", [0, 3, 8])
def test_a_layer_holds_what_was_written_and_little_more(
    base: Path, pid: int, tmp_path: Path, ready_pages: int
) -> None:
    layer = tmp_path / "ram.1"
    capture_layer(pid, [base], layer, ready_pages * PAGE)
    flat = tmp_path / "flat"
    flatten(base, [layer], flat)
    assert flat.read_bytes() == changed(base)
    assert layer.stat().st_size < (len(WRITTEN) + 8) * PAGE
    assert base.stat().st_size == PAGES * PAGE


def test_over_nothing_zeros_stay_holes(tmp_path: Path) -> None:
    base = tmp_path / "zeros"
    with base.open("wb") as file:
        file.truncate(PAGES * PAGE)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(base)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin and child.stdout
    assert child.stdout.readline() == b"ready\n"
    target = tmp_path / "ram"
    with target.open("xb") as file:
        file.truncate(PAGES * PAGE)
        mapping = memory.find_mapping(child.pid, whole_of(base, ()))
        memory.PageReader().stream(mapping, memory.dirty_runs(mapping), file.fileno())
    child.stdin.close()
    child.stdout.close()
    child.wait(10)
    assert target.read_bytes() == changed(base)
    assert target.stat().st_blocks * 512 <= len(WRITTEN) * memory.GRANULE


def test_a_copy_keeps_the_holes(base: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    copy_sparse(base, target)
    assert target.read_bytes() == base.read_bytes()
    assert target.stat().st_blocks * 512 < 1 << 20
    with pytest.raises(FileExistsError):
        copy_sparse(base, target)


def test_a_process_without_the_mapping_is_an_error(tmp_path: Path, base: Path) -> None:
    whole = whole_of(base, ())
    with pytest.raises(AenvError, match="not mapped"):
        memory.find_mapping(os.getpid(), whole)
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(SandboxDead):
        memory.find_mapping(gone.pid, whole)


def test_batches_fit_the_buffer_and_the_system_call() -> None:
    runs = [Run(index * 2 * PAGE, PAGE) for index in range(3000)] + [Run(1 << 30, 3 * memory.BUFFER_BYTES + PAGE)]
    batches = list(memory._batches(runs))
    assert all(len(batch) <= memory.MAX_IOVECS for batch in batches)
    assert all(sum(run.length for run in batch) <= memory.BUFFER_BYTES for batch in batches)
    assert [run for batch in batches for run in batch][:3000] == runs[:3000]
    assert sum(run.length for batch in batches for run in batch) == sum(run.length for run in runs)
