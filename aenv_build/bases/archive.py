"""Base from an archive of a root file system."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from aenv_run import process
from aenv_run.errors import BaseUnavailable, Unsupported

SCRIPT = Path(__file__).parent / "unpack" / "__main__.py"
MAX_ENTRIES = 2_000_000
UNPACK_TIMEOUT_S = 1800.0


async def unpack_archive(archive: Path, tree: Path, *, disk_mib: int) -> None:
    """Unpack into the new directory ``tree``; bounded by the disk it must fit on."""
    if os.geteuid() != 0:
        raise Unsupported(
            "a base with its files' owners can only be unpacked by root",
            fix="run the build with sudo, or start from a snapshot",
        )
    tree.mkdir(mode=0o755)
    argv = [
        sys.executable,
        "-I",
        str(SCRIPT),
        str(archive),
        str(tree),
        str(disk_mib << 20),
        str(MAX_ENTRIES),
        "1",
    ]
    done = await process.run(argv, timeout_s=UNPACK_TIMEOUT_S)
    if done.exit_code != 0:
        reason = done.stderr.decode(errors="replace").strip().splitlines()
        raise BaseUnavailable(
            f"cannot unpack {archive}: {reason[-1] if reason else f'the child ended with {done.exit_code}'}",
            fix="give a complete tar archive of a root file system (.tar, .tar.gz, .tar.xz, .tar.zst)",
        )
