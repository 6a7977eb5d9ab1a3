"""A file system that is soon full, for tests of what then happens."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_file_system(place: Path, size_bytes: int, *, files: int | None = None) -> Iterator[Path]:
    """A new directory ``place`` on a file system of its own that holds so many bytes and files.

    Skips the test where nothing can be mounted.
    """
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root: run the tests as root")
    place.mkdir()
    options = f"mode=700,size={size_bytes}" + (f",nr_inodes={files}" if files is not None else "")
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "aenv-test", place], capture_output=True, text=True
    )
    if made.returncode != 0:
        place.rmdir()
        pytest.skip(f"no mount here: {made.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)
        place.rmdir()


def fill(place: Path) -> Path:
    """Take all the room of the file system of ``place``; the file that takes it."""
    with suppress(OSError), (place / "filler").open("wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass
    return place / "filler"
