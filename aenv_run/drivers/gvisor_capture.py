"""Capturing a gVisor machine: its memory by runsc, its disk sealed in the storage daemon, all of one instant."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from aenv_run import disk
from aenv_run.capture import Capture
from aenv_run.drivers.gvisor_control import CheckpointFailed, Json, request
from aenv_run.drivers.protocol import Endpoint
from aenv_run.errors import AenvError, Conflict, NoSpace, SandboxDead
from aenv_run.memory_files import copy_sparse
from aenv_run.snapshot import MemoryFacts

CAPTURE_TIMEOUT_S = 900.0
FULL = (errno.ENOSPC, errno.EDQUOT)
NEARLY_FULL_BYTES = 1 << 20
#: How runsc names the files of a checkpoint.
SUFFIX = ".img"


def overlay_name(number: int) -> str:
    """The node of the machine's n-th overlay; its file adds ``.qcow2``."""
    return f"disk-{number:03}"


def overlay_path(directory: Path, number: int) -> Path:
    """The file of it."""
    return directory / f"{overlay_name(number)}.qcow2"


@dataclass
class Directory:
    """An open directory: the supervisor has its own mounts, where its path may mean another."""

    number: int

    def close(self) -> None:
        """Close it."""
        os.close(self.number)


def new_directory(path: Path) -> Directory:
    """Make it, and open it; Conflict when it is there already."""
    try:
        path.mkdir(parents=True)
    except FileExistsError as error:
        raise Conflict(f"the capture directory {path} exists already") from error
    return Directory(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


async def capture(
    machine: Path,
    directory: Path,
    *,
    facts: MemoryFacts | None,
    endpoint: Endpoint,
    disk_mib: int,
    keep_running: bool,
) -> Capture:
    """Capture, with memory if there are ``facts``; or raise with the machine as it was and ``directory`` gone."""
    state = await request(machine, {"op": "state"}, timeout_s=60.0)
    top = int(str(state["top"]).rpartition("-")[2])
    following = overlay_path(machine, top + 1)
    target = new_directory(directory)
    try:
        disk.write_overlay(following, disk_mib << 20)
        node = cast(Json, disk.overlay_node(Path(following.name), overlay_name(top + 1), None))
        stopped_ms = await ask(
            machine, target, endpoint, memory=facts is not None, keep_running=keep_running, node=node
        )
        return hand_over(machine, directory, top, facts, stopped_ms)
    except BaseException as error:
        free_bytes = min(shutil.disk_usage(path).free for path in (directory, machine))  # before it is tidied up
        shutil.rmtree(directory, ignore_errors=True)
        if not await _is_top(machine, top + 1):
            following.unlink(missing_ok=True)
        raise explain(error, free_bytes, directory) from error
    finally:
        target.close()


async def ask(
    machine: Path, target: Directory, endpoint: Endpoint, *, memory: bool, keep_running: bool, **more: Json
) -> float:
    """Have the supervisor capture into ``target``; for how long the machine stood still, in milliseconds."""
    message: Json = {"op": "capture", "memory": memory, "keep_running": keep_running}
    message |= {"host": endpoint.host, "port": endpoint.port, **more}
    answer = await request(machine, message, timeout_s=CAPTURE_TIMEOUT_S, descriptor=target.number)
    return float(str(answer["stopped_ms"]))


async def _is_top(machine: Path, number: int) -> bool:
    try:
        state = await request(machine, {"op": "state"}, timeout_s=10.0)
    except SandboxDead:
        return False
    return state["top"] == overlay_name(number)


def hand_over(machine: Path, directory: Path, top: int, facts: MemoryFacts | None, stopped_ms: float) -> Capture:
    """What is captured in ``directory``, and links of the machine's first ``top`` layers there; all sealed."""
    files = {path.name.removesuffix(SUFFIX): path for path in sorted(directory.glob(f"*{SUFFIX}"))}
    layers = []
    for number in range(1, top + 1):
        sealed = overlay_path(machine, number)
        sealed.chmod(0o444)
        layers.append(directory / sealed.name)
        _link_or_copy(sealed, layers[-1])
    for path in files.values():
        path.chmod(0o444)
    return Capture(directory, tuple(layers), files if facts else {}, facts, stopped_ms)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            raise
        copy_sparse(source, target)
        target.chmod(0o444)


def explain(error: BaseException, free_bytes: int, directory: Path) -> BaseException:
    """The error to raise for a capture that failed."""
    if isinstance(error, SandboxDead | Conflict | asyncio.CancelledError):
        return error
    if isinstance(error, OSError | AenvError):
        number = error.errno if isinstance(error, OSError) else None
        if number in FULL or "no space left" in str(error).lower() or free_bytes < NEARLY_FULL_BYTES:
            return NoSpace(
                f"the disk is full: {directory} could not be captured; the machine runs on",
                fix="free disk space and try again",
            )
    if isinstance(error, CheckpointFailed) and error.deleted:
        names = "; ".join(map(str, error.deleted))
        return Conflict(
            f"gVisor cannot save a file that is open and deleted; the sandbox runs on. Such files: {names}",
            fix="close it, or end the process, and try again; files in /dev/shm can be saved",
        )
    if isinstance(error, CheckpointFailed):
        said = error.message.partition("\ngoroutine")[0]
        return AenvError(f"runsc could not save the memory of the sandbox, which runs on: {said}")
    return error
