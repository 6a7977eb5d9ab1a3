"""Base from an archive of a root file system, or from the layers of an image."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from aenv_run import process
from aenv_run.errors import BaseUnavailable, Unsupported
from aenv_run.types import Digest

SCRIPT = Path(__file__).parent / "unpack" / "__main__.py"
MAX_ENTRIES = 2_000_000
UNPACK_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class LayerFile:
    """A layer of an image: its file, the digest of the file and that of the tar in it. Both are verified."""

    path: Path
    digest: Digest
    diff_id: Digest


def require_root() -> None:
    """``Unsupported`` where owners cannot be kept; asked before anything is fetched."""
    if os.geteuid() != 0:
        raise Unsupported(
            "a base with its files' owners can only be unpacked by root",
            fix="run the build with sudo, or start from a snapshot",
        )


async def unpack_archive(archive: Path, tree: Path, *, disk_mib: int) -> None:
    """Unpack into the new directory ``tree``; bounded by the disk it must fit on."""
    layers: list[dict[str, object]] = [{"path": str(archive), "digest": None, "diff_id": None}]
    reason = await _unpack(tree, disk_mib, layered=False, workdir=None, layers=layers)
    if reason:
        raise BaseUnavailable(
            f"cannot unpack {archive}: {reason}",
            fix="give a complete tar archive of a root file system (.tar, .tar.gz, .tar.xz, .tar.zst)",
        )


async def unpack_layers(
    layers: Sequence[LayerFile], tree: Path, *, disk_mib: int, workdir: str, image: str
) -> None:
    """Unpack an image's layers, the lowest first, into the new ``tree``: what a container of ``image`` shows."""
    files = [{**asdict(layer), "path": str(layer.path)} for layer in layers]
    reason = await _unpack(tree, disk_mib, layered=True, workdir=workdir, layers=files)
    if reason:
        raise BaseUnavailable(
            f"cannot unpack the image {image}: {reason}",
            fix="build or pull the image again; if it is only large, give the machine a larger disk",
        )


async def _unpack(
    tree: Path, disk_mib: int, *, layered: bool, workdir: str | None, layers: Sequence[dict[str, object]]
) -> str:
    """Why it failed, or nothing."""
    require_root()
    tree.mkdir(mode=0o755)
    job = {
        "tree": str(tree),
        "max_bytes": disk_mib << 20,
        "max_entries": MAX_ENTRIES,
        "devices": True,
        "layered": layered,
        "workdir": workdir,
        "layers": list(layers),
    }
    argv = [sys.executable, "-I", "-X", "utf8", str(SCRIPT)]
    done = await process.run(argv, timeout_s=UNPACK_TIMEOUT_S, stdin=json.dumps(job).encode())
    if done.exit_code == 0:
        return ""
    reason = done.stderr.decode(errors="replace").strip().splitlines()
    return reason[-1] if reason else f"the child ended with {done.exit_code}"
