"""Programs of this checkout, run as an ordinary user. What that user may not reach is opened in a namespace."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from aenv_run import process

USER = 65534
ROOT = Path(__file__).parents[1]
#: Where the programs are; a file in a directory that is closed to others is out of the user's reach.
NEEDED = (ROOT, Path(sys.prefix), Path(sys.base_prefix))
SCRIPT = """
set -e
hold=$1; shift
mount -t tmpfs -o mode=755 tmpfs "$hold"
number=0
for path in $NEEDED; do number=$((number+1)); mkdir "$hold/$number"; mount --bind "$path" "$hold/$number"; done
for path in $CLOSED; do mount -t tmpfs -o mode=755 tmpfs "$path"; done
number=0
for path in $NEEDED; do
  number=$((number+1))
  [ -d "$path" ] || { mkdir -p "$path"; mount --bind "$hold/$number" "$path"; }
done
exec setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all -- "$@"
"""


def _closed(paths: Sequence[Path]) -> list[Path]:
    """The highest directories on the way that others may not enter."""
    found: list[Path] = []
    for path in paths:
        for parent in reversed(path.resolve().parents):
            if not parent.stat().st_mode & 0o001:
                if parent not in found:
                    found.append(parent)
                break
    return found


def propagation() -> str:
    """For `unshare --mount`: a chroot's root need not be a mount point, and then its own cannot be changed."""
    return "unchanged" if process.in_chroot(Path("/proc/self/mountinfo").read_text()) else "private"


def run_as_user(
    argv: Sequence[str | Path], env: Mapping[str, str], *, needed: Sequence[Path] = (), timeout_s: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """Run to the end. ``needed``: directories beside those of the programs; they keep their paths."""
    paths = [path.resolve() for path in (*NEEDED, *needed)]
    with tempfile.TemporaryDirectory(prefix="aenv-hold-", dir="/var/tmp") as hold:
        variables = {
            **os.environ,
            **env,
            "PYTHONPATH": str(ROOT),
            "NEEDED": " ".join(map(str, paths)),
            "CLOSED": " ".join(map(str, _closed(paths))),
        }
        return subprocess.run(
            ["unshare", "--mount", "--propagation", propagation(),
             "sh", "-c", SCRIPT, "sh", hold, *map(str, argv)],
            capture_output=True, text=True, env=variables, cwd="/", timeout=timeout_s, check=False,
        )  # fmt: skip
