"""The files of a snapshot's disk, read out of its layers: no mount, and no name in it becomes one of the host's.

The chain is copied flat, its journal replayed and all of it looked at by e2fsck; then it is read by ``ext4``.
"""

from __future__ import annotations

import bisect
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from aenv_run import disk, disk_commit
from aenv_run.errors import CorruptData, TooLarge
from aenv_run.ext4 import ROOT_INODE, Ext4, Inode

MAX_FILES, MAX_PATH_BYTES = 1_000_000, 4096
DIRECTORY, REGULAR, LINK, BLOCK_DEVICE, CHARACTER_DEVICE = 0o040000, 0o100000, 0o120000, 0o060000, 0o020000
CHUNK_BYTES = 1 << 20
#: Where package managers keep what is installed; no such list is larger.
MAX_LIST_BYTES = 128 << 20
DPKG, DPKG_PARTS, APK = b"/var/lib/dpkg/status", b"/var/lib/dpkg/status.d/", b"/lib/apk/db/installed"
WHEEL = re.compile(rb"/(?:site|dist)-packages/([^/]{1,200}?)-([^/-]{1,100})(?:-py[0-9.]+)?\.(?:dist|egg)-info\Z")


@dataclass(frozen=True, slots=True)
class Listed:
    """A file: its inode, and where it points if it is a symbolic link."""

    inode: Inode
    target: bytes = b""


Listing = Mapping[bytes, Listed]


async def flat_disk(layers: tuple[Path, ...], disk_mib: int, target: Path) -> None:
    """Write the disk of a chain to ``target``, sound: ``CorruptData`` where it is not."""
    disk.check_chain(layers, disk_mib)
    await disk.flatten(layers, target)
    await disk_commit.replay(target)


def list_files(source: Ext4) -> Listing:
    """Every file by its absolute path, without the root. ``TooLarge`` for more than a million."""
    found: dict[bytes, Listed] = {}
    seen: set[int] = set()
    waiting = [(b"", source.inode(ROOT_INODE))]
    while waiting:
        path, directory = waiting.pop()
        if directory.number in seen:
            raise CorruptData(f"directory {directory.number} of the disk has two names")
        seen.add(directory.number)
        for name, number in source.entries(directory):
            inode, below = source.inode(number), path + b"/" + name
            if len(below) > MAX_PATH_BYTES:
                raise CorruptData("the disk's directories are deeper than a path can be long")
            if len(found) >= MAX_FILES:
                raise TooLarge(
                    f"the disk has more than {MAX_FILES} files", fix="compare without files: --no-files"
                )
            found[below] = Listed(inode, source.link_target(inode) if inode.kind == LINK else b"")
            if inode.kind == DIRECTORY:
                waiting.append((below, inode))
    return found


def differences(one: Ext4, a: Listed, two: Ext4, b: Listed) -> tuple[str, ...]:
    """What of a file is another: kind, mode, owner, target, device, content. Times and attributes do not count."""
    if a.inode.kind != b.inode.kind:
        return ("kind",)
    found = []
    if a.inode.mode != b.inode.mode:
        found.append("mode")
    if (a.inode.uid, a.inode.gid) != (b.inode.uid, b.inode.gid):
        found.append("owner")
    if a.target != b.target:
        found.append("target")
    if a.inode.kind in (BLOCK_DEVICE, CHARACTER_DEVICE) and a.inode.rdev != b.inode.rdev:
        found.append("device")
    if a.inode.kind == REGULAR and not _same_content(one, a.inode, two, b.inode):
        found.append("content")
    return tuple(found)


def _same_content(one: Ext4, a: Inode, two: Ext4, b: Inode) -> bool:
    if a.size != b.size:
        return False
    left, right = _Content(one, a), _Content(two, b)
    starts = sorted({*left.chunks(), *right.chunks()})  # anywhere else both are zeroes
    return all(left.at(start) == right.at(start) for start in starts)


class _Content:
    """The content of a regular file in chunks; those that are all hole are not read."""

    def __init__(self, source: Ext4, inode: Inode) -> None:
        self._source, self._size = source, inode.size
        self._extents = source.extents(inode)
        self._ends = [(extent.logical + extent.count) * source.block_bytes for extent in self._extents]

    def chunks(self) -> Iterator[int]:
        """Where those begin that have something."""
        block = self._source.block_bytes
        for extent in self._extents:
            start, end = extent.logical * block, min((extent.logical + extent.count) * block, self._size)
            yield from range(start - start % CHUNK_BYTES, end, CHUNK_BYTES)

    def at(self, start: int) -> bytes:
        """The chunk from there."""
        block, length = self._source.block_bytes, min(CHUNK_BYTES, self._size - start)
        data = bytearray(length)
        for index in range(bisect.bisect_right(self._ends, start), len(self._extents)):
            first = self._extents[index].logical * block
            low, high = max(first, start), min(self._ends[index], start + length)
            if low >= high:
                break
            place = self._extents[index].physical * block + low - first
            part = os.pread(self._source.descriptor, high - low, place)
            data[low - start : low - start + len(part)] = part
        return bytes(data)


def packages(source: Ext4, files: Listing) -> dict[tuple[str, str], str]:
    """Versions by package manager and name: dpkg, apk, and Python's."""
    found: dict[tuple[str, str], str] = {}
    for path, listed in files.items():
        if path in (DPKG, APK) or path.startswith(DPKG_PARTS):
            if listed.inode.kind != REGULAR or listed.inode.size > MAX_LIST_BYTES:
                continue
            text = source.read(listed.inode, MAX_LIST_BYTES).decode(errors="replace")
            manager, parse = ("apk", _apk) if path == APK else ("dpkg", _dpkg)
            found |= {(manager, name): version for name, version in parse(text)}
        elif wheel := WHEEL.search(path):
            name, version = (part.decode(errors="replace") for part in wheel.groups())
            found["python", name.lower().replace("_", "-")] = version
    return found


def _dpkg(text: str) -> Iterator[tuple[str, str]]:
    for paragraph in text.split("\n\n"):
        fields = dict(re.findall(r"(?m)^(Package|Version|Status|Architecture|Multi-Arch): *(.*)$", paragraph))
        installed = fields.get("Status", "install ok installed").endswith(" installed")
        name = fields.get("Package", "")
        if fields.get("Multi-Arch") == "same":  # may be there once for each architecture: as `dpkg -l` names it
            name += f":{fields.get('Architecture', '')}"
        if installed and name and fields.get("Version"):
            yield name, fields["Version"]


def _apk(text: str) -> Iterator[tuple[str, str]]:
    for paragraph in text.split("\n\n"):
        fields = dict(re.findall(r"(?m)^(P|V):(.*)$", paragraph))
        if "P" in fields and "V" in fields:
            yield fields["P"], fields["V"]
