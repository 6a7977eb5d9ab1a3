"""The disk of a sandbox as a mounted file system: storage daemon, FUSE export, loop device; for root alone.

Standard library only: part of the supervisor.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

from aenv_run import disk_mount
from aenv_run.disk_mount import DiskError, JsonValue
from aenv_run.drivers.gvisor_children import Children
from aenv_run.drivers.gvisor_start import IMAGE, STORAGE_LOG, Storage

ROOT = "root"
START_S, CHECK_S = 60.0, 600.0
#: Less free space than this after a lost write means that the host's disk is full.
NEARLY_FULL_BYTES = 16 << 20


class LostWritesError(DiskError):
    """The host could not keep what the guest wrote; its file system cannot be trusted, nor written, any more."""


class MountedDisk:
    """The storage daemon keeps the mount namespace that it was started in, with its export; we have left that.

    Killed as the last process of the namespace where the file system that it serves is mounted, it would unmount
    it, and wait for ever for itself to write it (measured).
    """

    def __init__(self, children: Children, storage: Storage, top: str) -> None:
        """Return when the storage daemon's export is there."""
        self._children = children
        self.top, self.pid = top, storage.pid
        #: Why the disk is lost; empty as long as it is not.
        self.lost = ""
        self._root = -1
        self._complaints: tuple[str, ...] = ()
        self._syncing = threading.Lock()
        self._image = f"/proc/{storage.pid}/root{Path.cwd()}/{IMAGE}"
        self._storage = disk_mount.StorageDaemon(socket.socket(fileno=storage.monitor))
        try:
            self._storage.greet(START_S)
        except DiskError as error:
            raise DiskError(f"{error}: {said()}") from error

    def mount(self, *, check: bool, keep: str) -> None:
        """Mount it, if need be after a check. With ``keep`` it is a cold boot: see ``prepare_root``."""
        if check:
            self._check()
        Path(ROOT).mkdir(exist_ok=True)
        disk_mount.mount_image(self._image, ROOT)
        if keep:
            disk_mount.prepare_root(ROOT, keep)
        # Open from here to the end: the kernel tells every descriptor of the writes lost since it was opened.
        self._root = os.open(ROOT, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._complaints = disk_mount.complaints(self._root)

    def _check(self) -> None:
        """Before the host's kernel mounts what a guest's kernel wrote: replay its journal, look at all of it."""
        # -p repairs nothing of doubt (-y would, and hide the damage from the second look). Exit codes: e2fsck(8).
        for arguments, accepted in ((["-E", "journal_only", "-p"], (0, 1)), (["-f", "-n"], (0,))):
            code, output = self._children.run(["e2fsck", *arguments, self._image], timeout_s=CHECK_S)
            if code not in accepted:
                message = f"the file system of the disk is damaged, it was not mounted: {output[-1500:]}"
                raise DiskError(message, corrupt=True)

    def sync(self) -> None:
        """Flush what the guest wrote; LostWritesError, from then on at every call, when some of it is lost.

        The export and the loop device pass the host's error on, and the file system gives up what it could not
        write. So nothing may be captured any more.
        """
        with self._syncing:  # the kernel tells it once, and whoever asks next must know too
            if not self.lost:
                try:
                    disk_mount.sync(self._root)
                except DiskError as error:
                    self.lost = f"what it wrote to its disk was lost: {_host_disk()} ({error})"
            if self.lost:
                raise LostWritesError(self.lost)

    def look(self) -> None:
        """As ``sync``, but flush only if the kernel complained since the last look: a guest can cause that too."""
        complaints = disk_mount.complaints(self._root)
        if complaints != self._complaints:
            self._complaints = complaints
            self.sync()

    def add(self, node: dict[str, JsonValue]) -> None:
        """Open the overlay that is to be the next one."""
        self._storage.execute("blockdev-add", node)

    def seal(self, node: dict[str, JsonValue]) -> None:
        """From now on the guest writes into it; what was the top is sealed."""
        overlay = str(node["node-name"])
        self._storage.execute("blockdev-snapshot", {"node": self.top, "overlay": overlay})
        self.top = overlay

    def drop(self, node: dict[str, JsonValue]) -> None:
        """Undo ``add``."""
        with contextlib.suppress(DiskError):
            self._storage.execute("blockdev-del", {"node-name": node["node-name"]})


def _host_disk() -> str:
    found = os.statvfs(".")
    full = found.f_bavail * found.f_frsize < NEARLY_FULL_BYTES
    # The file system reads what is below before it writes beside it: a layer on demand gives such an error, too.
    return (
        "the host's disk is full" if full else "its layers could not be read, or the host's disk was full or fails"
    )


def said() -> str:
    """The last that the storage daemon said."""
    try:
        return Path(STORAGE_LOG).read_bytes()[-2000:].decode(errors="replace").strip() or "it said nothing"
    except OSError:
        return "it said nothing"
