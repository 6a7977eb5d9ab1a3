"""Capturing a QEMU machine: the disk sealed, RAM and device state saved, all of one instant."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from aenv_run import disk, memory, memory_files
from aenv_run.capture import Capture
from aenv_run.drivers.qemu_ram import DEVICE_STATE, next_role
from aenv_run.drivers.qmp import Qmp, QmpError
from aenv_run.errors import AenvError, Conflict, NoSpace, SandboxDead
from aenv_run.memory_layers import PAGE, coalesce, finish_layer
from aenv_run.snapshot import MemoryFacts
from aenv_run.threads import in_thread

FULL = (errno.ENOSPC, errno.EDQUOT)
#: Room for what the guest writes between the look at its pages and the stop.
SLACK_BYTES = 1 << 20
#: Less free space than this after a refused write means that the disk is full.
NEARLY_FULL_BYTES = 1 << 20


def overlay_name(number: int) -> str:
    """The node of the machine's n-th overlay; its file adds ``.qcow2``."""
    return f"disk-{number:03}"


@cache
def page_reader() -> memory.PageReader:
    """One buffer for this process: see ``PageReader``. Captures use it in turn."""
    return memory.PageReader()


class RamPages:
    """A layer of the pages that a machine wrote: made ready while it runs, filled while it is stopped.

    ``prepare``, ``fill`` and ``close`` block, and are called one after the other. Whoever made it closes it, also
    after a ``prepare`` whose end nobody could wait for any more.
    """

    def __init__(self, mapping: memory.Mapping, path: Path) -> None:
        self._mapping, self._path = mapping, path
        self._file: memory.ReadyFile | None = None

    def prepare(self) -> None:
        """Make the file, with its first pages."""
        page_reader()
        self._file = memory.ReadyFile(self._path, self._ready_bytes())

    def _made(self) -> memory.ReadyFile:
        assert self._file is not None, "prepare comes first"
        return self._file

    def _ready_bytes(self) -> int:
        """As much as it would be now, and a little more."""
        return PAGE + sum(run.length for run in coalesce(memory.dirty_runs(self._mapping))) + SLACK_BYTES

    def fill(self) -> None:
        """The machine must be stopped."""
        runs = coalesce(memory.dirty_runs(self._mapping))
        file = self._made()
        page_reader().pack(self._mapping, runs, file)
        os.ftruncate(file.descriptor, PAGE + sum(run.length for run in runs))
        finish_layer(file.descriptor, self._mapping.length, runs)

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            self._file.close()


class WholeRam(RamPages):
    """All that a machine which was booted cold has in its RAM: a sparse file as large as it."""

    def _ready_bytes(self) -> int:
        return 0  # blocks of zeros are to stay holes

    def fill(self) -> None:
        """The machine must be stopped."""
        descriptor = self._made().descriptor
        os.ftruncate(descriptor, self._mapping.length)
        page_reader().stream(self._mapping, memory.dirty_runs(self._mapping), descriptor)


@dataclass
class Capturer:
    """What a machine needs to be captured. ``top`` is the number of the overlay it writes."""

    directory: Path
    pid: int
    qmp: Qmp
    virtual_bytes: int
    ram: memory.Mapping
    ram_roles: tuple[str, ...]
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
            pages = self._ram_pages(directory) if memory else None
            try:
                if pages is not None:
                    await in_thread(pages.prepare)
                await self._drop_following()
                disk.write_overlay(self._overlay(self.top + 1), self.virtual_bytes)
                name = overlay_name(self.top + 1)
                await self.qmp.execute("blockdev-add", disk.overlay_node(Path(f"{name}.qcow2"), name, None))
                stopped_ms = await self._freeze(directory, pages, was_running, keep_running)
            finally:
                if pages is not None:
                    await in_thread(pages.close)
            return self._hand_over(directory, memory, stopped_ms)
        except BaseException as error:
            await self._undo(directory)
            raise self._explain(error, directory) from error

    def _ram_pages(self, directory: Path) -> RamPages:
        path = directory / next_role(self.ram_roles)
        return RamPages(self.ram, path) if self.ram_roles else WholeRam(self.ram, path)

    async def _freeze(
        self, directory: Path, pages: RamPages | None, was_running: bool, keep_running: bool
    ) -> float:
        """The part with the machine stopped; returns for how long it was, in milliseconds.

        Sealing comes last and is one atomic step: whatever fails before it, the machine goes on as it was.
        """
        started = time.perf_counter()
        done = False
        await self.qmp.execute("stop")
        try:
            if pages is not None:
                await in_thread(pages.fill)
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

    def _hand_over(self, directory: Path, with_memory: bool, stopped_ms: float) -> Capture:
        layers = []
        for number in range(1, self.top):
            sealed = self._overlay(number)
            if sealed.stat().st_size <= disk.overlay_bytes(self.virtual_bytes):
                continue  # nothing was ever written to it
            sealed.chmod(0o444)
            layers.append(directory / sealed.name)
            _link_or_copy(sealed, layers[-1])
        if not with_memory:
            return Capture(directory, tuple(layers), stopped_ms=stopped_ms)
        files = {role: directory / role for role in (next_role(self.ram_roles), DEVICE_STATE)}
        for path in files.values():
            path.chmod(0o444)
        return Capture(directory, tuple(layers), files, self.facts, stopped_ms, self.ram_roles)

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
        memory_files.copy_sparse(source, target)
        target.chmod(0o444)
