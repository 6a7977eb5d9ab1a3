"""Capturing a QEMU machine: the disk sealed, RAM and device state saved, all of one instant."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from aenv_run import disk, memory
from aenv_run.capture import Capture
from aenv_run.drivers.qmp import Qmp, QmpError
from aenv_run.errors import AenvError, Conflict, NoSpace, SandboxDead
from aenv_run.snapshot import MemoryFacts

RAM, DEVICE_STATE = "ram", "device_state"
FULL = (errno.ENOSPC, errno.EDQUOT)
#: Less free space than this after a refused write means that the disk is full.
NEARLY_FULL_BYTES = 1 << 20


def overlay_name(number: int) -> str:
    """The node of the machine's n-th overlay; its file adds ``.qcow2``."""
    return f"disk-{number:03}"


@cache
def page_reader() -> memory.PageReader:
    """One buffer for this process: see ``PageReader``. Captures use it in turn."""
    return memory.PageReader()


@dataclass
class Capturer:
    """What a machine needs to be captured. ``top`` is the number of the overlay it writes."""

    directory: Path
    pid: int
    qmp: Qmp
    virtual_bytes: int
    ram_base: Path
    ram_base_is_zero: bool
    facts: MemoryFacts
    top: int

    def _overlay(self, number: int) -> Path:
        return self.directory / f"{overlay_name(number)}.qcow2"

    async def capture(self, directory: Path, *, memory: bool, was_running: bool, keep_running: bool) -> Capture:
        """Capture, or raise with the machine as it was and nothing left in ``directory``."""
        try:
            directory.mkdir(parents=True)
        except FileExistsError as error:
            raise Conflict(f"the capture directory {directory} exists already") from error
        try:
            # All that takes long and needs no stopped machine comes first.
            if memory:
                await asyncio.to_thread(self._prepare_ram, directory / RAM)
            await self._drop_following()
            disk.write_overlay(self._overlay(self.top + 1), self.virtual_bytes)
            name = overlay_name(self.top + 1)
            await self.qmp.execute("blockdev-add", disk.overlay_node(Path(f"{name}.qcow2"), name, None))
            stopped_ms = await self._freeze(directory, memory, was_running, keep_running)
            return self._hand_over(directory, memory, stopped_ms)
        except BaseException as error:
            await self._undo(directory)
            raise self._explain(error, directory) from error

    def _prepare_ram(self, target: Path) -> None:
        if self.ram_base_is_zero:
            with target.open("xb") as file:
                file.truncate(self.ram_base.stat().st_size)
        else:
            memory.copy_sparse(self.ram_base, target)

    async def _freeze(self, directory: Path, with_memory: bool, was_running: bool, keep_running: bool) -> float:
        """The part with the machine stopped; returns for how long it was, in milliseconds.

        Sealing comes last and is one atomic step: whatever fails before it, the machine goes on as it was.
        """
        started = time.perf_counter()
        done = False
        await self.qmp.execute("stop")
        try:
            if with_memory:
                await asyncio.to_thread(self._stream_ram, directory / RAM)
                # Devices only, 1-2 ms. live=false: with true QEMU drops its image locks and a second writer of
                # the same disk is let in. (`migrate` would write all RAM, which is share=off.) No Xen involved.
                await self.qmp.execute(
                    "xen-save-devices-state",
                    {"filename": str((directory / DEVICE_STATE).absolute()), "live": False},
                )
            await self.qmp.execute(
                "blockdev-snapshot", {"node": overlay_name(self.top), "overlay": overlay_name(self.top + 1)}
            )
            self.top += 1
            done = True
        finally:
            # RAM is share=off: running on does not touch what was saved. (A share=on machine would corrupt it.)
            if was_running and (keep_running or not done):
                await self.qmp.execute("cont")
        return (time.perf_counter() - started) * 1000

    def _stream_ram(self, target: Path) -> None:
        mapping = memory.find_mapping(self.pid, self.ram_base)
        runs = memory.dirty_runs(mapping)
        descriptor = os.open(target, os.O_WRONLY | os.O_CLOEXEC)
        try:
            page_reader().stream(mapping, runs, descriptor, skip_zeros=self.ram_base_is_zero)
        finally:
            os.close(descriptor)

    def _hand_over(self, directory: Path, with_memory: bool, stopped_ms: float) -> Capture:
        layers = []
        for number in range(1, self.top):
            sealed = self._overlay(number)
            if sealed.stat().st_size <= disk.overlay_bytes(self.virtual_bytes):
                continue  # nothing was ever written to it
            sealed.chmod(0o444)
            layers.append(directory / sealed.name)
            _link_or_copy(sealed, layers[-1])
        files = {role: directory / role for role in (RAM, DEVICE_STATE)} if with_memory else {}
        for path in files.values():
            path.chmod(0o444)
        return Capture(directory, tuple(layers), files, self.facts if with_memory else None, stopped_ms)

    async def _undo(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        await self._drop_following()

    async def _drop_following(self) -> None:
        """Remove the overlay that would come next: of a capture that failed, perhaps in a process that crashed.

        After sealing it is the top, and the next one is not there.
        """
        following = self._overlay(self.top + 1)
        if not following.exists():
            return
        with contextlib.suppress(QmpError, SandboxDead):  # it may not have been added yet
            await self.qmp.execute("blockdev-del", {"node-name": overlay_name(self.top + 1)})
        following.unlink(missing_ok=True)

    def _explain(self, error: BaseException, directory: Path) -> BaseException:
        if isinstance(error, OSError) and error.errno in FULL:
            full = True
        elif isinstance(error, QmpError):
            # "saving Xen device state failed" says no reason
            free = min(shutil.disk_usage(path).free for path in (directory.parent, self.directory))
            full = "No space left" in error.message or free < NEARLY_FULL_BYTES
        else:
            full = False
        if full:
            return NoSpace(
                f"the disk is full: {directory} could not be captured; the machine runs on",
                fix="free disk space and try again",
            )
        if isinstance(error, QmpError):
            return AenvError(f"QEMU could not be captured into {directory}: {error.message}")
        return error


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            raise
        memory.copy_sparse(source, target)
        target.chmod(0o444)
