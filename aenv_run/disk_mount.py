"""A qcow2 chain as a mounted ext4 file system of the host: storage daemon, FUSE export, loop device, mount.

Runs inside the sandbox's own mount namespace, in a process that must start fast: standard library only. The
mount and the loop device (autoclear) vanish with the last process of that namespace, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import socket
import stat
import struct
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_NOATIME, MS_RDONLY = 2, 4, 8, 1024, 1
#: With all mounts below.
MS_SLAVE = 1 << 19 | 1 << 14
CLONE_NEWNS = 0x20000
LOOP_CTL_GET_FREE, LOOP_CONFIGURE = 0x4C82, 0x4C0A
LO_FLAGS_AUTOCLEAR = 4
#: struct loop_config: fd, block size, loop_info64 (its flags after 5 u64 and 3 u32), 64 bytes reserved.
LOOP_CONFIG = struct.Struct("=II 40x 12x I 176x 64x")
LOOP_ATTEMPTS = 64
#: The image may say errors=panic in its superblock: the host must never obey that.
EXT4_OPTIONS = "errors=continue"
#: Directories that the machine mounts over, or needs as they are.
MOUNT_POINTS = ("dev", "proc", "run", "sys", "tmp")

JsonValue = str | int | float | bool | None | list["JsonValue"] | dict[str, "JsonValue"]


class DiskError(Exception):
    """The disk could not be opened, checked or mounted; ``corrupt`` when its content is to blame."""

    def __init__(self, message: str, *, corrupt: bool = False) -> None:
        super().__init__(message)
        self.corrupt = corrupt


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    if _LIBC.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {kind} on {target}: {os.strerror(number)}")


def unshare_mounts() -> None:
    """A copy of the mount namespace for this process alone; it must have one thread."""
    if _LIBC.unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare of the mount namespace")


class StorageDaemon:
    """The monitor of one qemu-storage-daemon, over an inherited socket: replies come in order."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")

    def greet(self, timeout_s: float) -> None:
        """Return when the daemon has opened the whole graph and its export is there."""
        self._connection.settimeout(timeout_s)
        if b'"QMP"' not in self._lines.readline(65536):
            raise DiskError("the storage daemon did not open the disk")
        self.execute("qmp_capabilities")

    def execute(self, command: str, arguments: dict[str, JsonValue] | None = None) -> JsonValue:
        """Run one command; DiskError when it is refused or the daemon is gone."""
        request: dict[str, JsonValue] = {"execute": command}
        if arguments is not None:
            request["arguments"] = arguments
        try:
            self._connection.sendall(json.dumps(request).encode() + b"\n")
            while line := self._lines.readline(1 << 20):
                reply = json.loads(line)
                if "return" in reply:
                    value: JsonValue = reply["return"]
                    return value
                if "error" in reply:
                    raise DiskError(f"the storage daemon refused {command}: {reply['error'].get('desc')}")
        except OSError as error:
            raise DiskError(f"the storage daemon did not answer {command}: {error}") from error
        raise DiskError(f"the storage daemon is gone ({command})")


def attach_loop(image: str) -> tuple[int, str]:
    """An autoclear loop device over ``image``: its descriptor, to keep open until it is mounted, and its path."""
    backing = os.open(image, os.O_RDWR | os.O_CLOEXEC)
    try:
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        try:
            for _ in range(LOOP_ATTEMPTS):
                number = fcntl.ioctl(control, LOOP_CTL_GET_FREE)
                device = os.open(f"/dev/loop{number}", os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.ioctl(device, LOOP_CONFIGURE, LOOP_CONFIG.pack(backing, 0, LO_FLAGS_AUTOCLEAR))
                    return device, f"/dev/loop{number}"
                except OSError as error:
                    os.close(device)
                    if error.errno != errno.EBUSY:  # another process was faster
                        raise
        finally:
            os.close(control)
    finally:
        os.close(backing)
    raise DiskError("no loop device is free")


def mount_image(image: str, target: str) -> None:
    """Mount the ext4 in ``image``. Set-uid bits and devices in it count inside the sandbox only."""
    device, path = attach_loop(image)
    try:
        mount(path, target, "ext4", MS_NOSUID | MS_NODEV | MS_NOATIME, EXT4_OPTIONS)
    except OSError as error:
        raise DiskError(f"the host cannot mount the disk: {error}", corrupt=True) from error
    finally:
        os.close(device)


def sync(descriptor: int) -> None:
    """Flush the file system of an open file; DiskError, once, when a write was lost since it was opened.

    Not FIFREEZE: a frozen one outlives a killed process for ever.
    """
    if _LIBC.syncfs(descriptor) != 0:
        raise DiskError(os.strerror(ctypes.get_errno()))


def complaints(descriptor: int) -> tuple[str, ...]:
    """How often ext4 has complained of the mounted file system of an open file; a lost write is among the causes.

    Empty where the kernel does not tell.
    """
    device = os.fstat(descriptor).st_dev
    found = []
    with contextlib.suppress(OSError):
        name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").readlink().name
        for counter in ("warning_count", "errors_count"):
            found.append(Path(f"/sys/fs/ext4/{name}/{counter}").read_text())
    return tuple(found)


def prepare_root(target: str, keep: str) -> None:
    """Make the mount points real directories, as envd's init does in a virtual machine, and mark /tmp.

    An image can put links there that lead out of it; no link is followed. ``keep`` is a file in /tmp: runsc
    covers an empty /tmp by a memory file system, and files in that would not be on the disk.
    """
    root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in MOUNT_POINTS:
            _real_directory(root, name, 0o1777 if name == "tmp" else 0o755)
        tmp = os.open("tmp", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            os.close(os.open(keep, flags, 0o600, dir_fd=tmp))
        finally:
            os.close(tmp)
    finally:
        os.close(root)


def _real_directory(root: int, name: str, mode: int) -> None:
    try:
        found = os.lstat(name, dir_fd=root)
    except FileNotFoundError:
        pass
    else:
        if stat.S_ISDIR(found.st_mode):
            return
        os.unlink(name, dir_fd=root)
    os.mkdir(name, dir_fd=root)
    made = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
    try:
        os.fchmod(made, mode)
    finally:
        os.close(made)
