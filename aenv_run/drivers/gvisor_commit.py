"""Capturing a gVisor machine whose disk is in the guest's memory: its own account of it becomes a layer."""

from __future__ import annotations

import shutil
from pathlib import Path

from pydantic import ValidationError

from aenv_run import disk_commit
from aenv_run.capture import Capture
from aenv_run.drivers.gvisor_capture import (
    SUFFIX,
    ask,
    explain,
    hand_over,
    new_directory,
    overlay_path,
)
from aenv_run.drivers.gvisor_control import request
from aenv_run.drivers.gvisor_root import METADATA as ROOT_METADATA
from aenv_run.drivers.gvisor_spec import KEEP
from aenv_run.drivers.gvisor_supervisor import PACK
from aenv_run.drivers.protocol import Endpoint
from aenv_run.errors import AenvError, BootFailed
from aenv_run.snapshot import MemoryFacts
from aenv_run.types import Model

#: The memory file that says what the memory lies above.
ROLE = "root"


class Below(Model):
    """What the guest's writes, which are in its memory, lie above: the first ``layers`` of its chain."""

    layers: int
    digest: str


def read_below(path: Path, layers: int) -> Below:
    """The file that a capture wrote; BootFailed when it is none, or of another chain."""
    try:
        found = Below.model_validate_json(path.read_bytes()[:4096])
    except (OSError, ValidationError) as error:
        raise BootFailed(f"the memory snapshot was not restored: {path} is damaged") from error
    if not 0 < found.layers <= layers:
        raise BootFailed("the memory snapshot was not restored: it belongs to another chain of disk layers")
    return found


async def capture(
    machine: Path,
    directory: Path,
    *,
    below: Below,
    chain: tuple[Path, ...],
    facts: MemoryFacts | None,
    endpoint: Endpoint,
    keep_running: bool,
) -> Capture:
    """As ``gvisor_capture.capture``. The layer is made while the machine runs on."""
    paused = (await request(machine, {"op": "state"}, timeout_s=60.0))["paused"]
    sealed = 0
    while overlay_path(machine, sealed + 1).exists():
        sealed += 1
    before = tuple(overlay_path(machine, number) for number in range(1, sealed + 1))
    pack = machine / PACK
    descriptor = new_directory(directory)
    try:
        stopped_ms = await ask(machine, descriptor, endpoint, memory=facts is not None, keep_running=keep_running)
        layer = overlay_path(machine, sealed + 1)
        shown = disk_commit.Disk(machine / ROOT_METADATA, chain[: below.layers], (*chain, *before), KEEP)
        await disk_commit.make_layer(pack, shown, layer)
        if facts is not None:
            (directory / f"{ROLE}{SUFFIX}").write_text(below.model_dump_json())
        return hand_over(machine, directory, sealed + 1, facts, stopped_ms)
    except BaseException as error:
        free_bytes = min(shutil.disk_usage(path).free for path in (directory, machine))
        shutil.rmtree(directory, ignore_errors=True)
        overlay_path(machine, sealed + 1).unlink(missing_ok=True)
        if not paused:
            await _go_on(machine)
        raise explain(error, free_bytes, directory) from error
    finally:
        descriptor.close()
        pack.unlink(missing_ok=True)


async def _go_on(machine: Path) -> None:
    try:
        await request(machine, {"op": "resume"}, timeout_s=60.0)
    except AenvError:
        return  # it is dead: the error that brought us here says why
