"""How mmdebstrap is run. The program is a stand-in: the real one needs a mirror and minutes."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from aenv_build.bases.debootstrap import alone, bootstrap
from aenv_build.language.recipe import Debootstrap
from aenv_run.errors import BaseUnavailable, MissingDependency
from aenv_run.types import Architecture

AMD64 = Architecture("amd64")
BASE = Debootstrap(suite="bookworm", packages=("zlib1g", "git", "git"))


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for a program called mmdebstrap, first on the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder / "mmdebstrap"


def write(program: Path, script: str) -> None:
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


async def test_arguments_and_reproducible_time(stand_in: Path, tmp_path: Path) -> None:
    write(stand_in, f'echo "$SOURCE_DATE_EPOCH" "$@" > {tmp_path}/said')
    await bootstrap(BASE, AMD64, tmp_path / "base.tar")
    said = (tmp_path / "said").read_text()
    assert "1735689600" in said and "--include=git,zlib1g" in said and "--variant=minbase" in said
    assert said.rstrip().endswith(f"bookworm {tmp_path}/base.tar"), "the mirror is the machine's choice"


async def test_failure_shows_its_last_lines(stand_in: Path, tmp_path: Path) -> None:
    write(stand_in, "echo E: no such suite >&2; exit 25")
    with pytest.raises(BaseUnavailable, match=r"exited with 25\):\n  \| E: no such suite"):
        await bootstrap(BASE, AMD64, tmp_path / "base.tar")


async def test_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependency, match="mmdebstrap is not installed"):
        await bootstrap(BASE, AMD64, tmp_path / "base.tar")


@pytest.mark.skipif(os.geteuid() != 0, reason="root mode mounts")
async def test_cancelled_in_the_middle_leaves_no_mount_and_no_process(stand_in: Path, tmp_path: Path) -> None:
    mount, mark = tmp_path / "mnt", f"31{os.getpid()}"
    mount.mkdir()
    write(stand_in, f"mount -t tmpfs none {mount} && touch {tmp_path}/mounted; setsid sleep {mark} & sleep {mark}")
    task = asyncio.create_task(bootstrap(BASE, AMD64, tmp_path / "base.tar"))
    while not (tmp_path / "mounted").exists():
        assert not task.done(), task
        await asyncio.sleep(0.02)
    assert str(mount) not in Path("/proc/self/mounts").read_text(), "it never shows on the host"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(100):
        if not [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in _read(path)]:
            return
        await asyncio.sleep(0.05)
    pytest.fail("a child of mmdebstrap lives on")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


#: A root made of bind mounts: the directory itself is no mount point, as in a chroot or a build service's root.
CHROOT = """
mount -t tmpfs tmpfs "$1" && mkdir "$1/root" && cd "$1/root" && mkdir proc tmp && mount -t proc proc proc
for name in bin lib lib32 lib64 libx32 sbin usr; do
  if [ -L /$name ]; then cp -P /$name .; elif [ -d /$name ]; then mkdir $name; mount --bind /$name $name; fi
done
shift; exec chroot . "$@"
"""


def test_runs_where_the_root_is_no_mount_point(tmp_path: Path) -> None:
    here = Path("/proc/self/mountinfo").read_text()
    inside = [*alone(here), "sh", "-ec", CHROOT, "sh", str(tmp_path)]
    show = [*inside, "cat", "/proc/self/mountinfo"]
    mountinfo = subprocess.run(show, capture_output=True, text=True, check=True)
    argv = alone(mountinfo.stdout)
    assert "unchanged" in argv and "private" in alone("25 1 8:1 / / rw - ext4 /dev/vda rw")
    done = subprocess.run([*inside, *argv, "echo", "ran"], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("ran\n", "", 0)
