"""The root file system without a mount: a chain of layers as an EROFS image that runsc reads, made once per chain.

In the home's cache, shared by every machine of the chain; a machine's own link to it outlives its eviction.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aenv_run import disk, disk_commit, erofs
from aenv_run.drivers.gvisor_checked import chain_key
from aenv_run.drivers.gvisor_spec import KEEP
from aenv_run.errors import AenvError, CorruptData, NoSpace, from_os
from aenv_run.ext4 import Ext4
from aenv_run.paths import Home

SUFFIX, METADATA_SUFFIX = ".erofs", ".metadata"
#: In a machine's directory.
IMAGE, METADATA = f"root{SUFFIX}", f"root{METADATA_SUFFIX}"
#: More than this in all, and the images that were not used for longest are removed.
CACHE_BYTES = 16 << 30
HEAD_BYTES = 1 << 20


@dataclass(frozen=True)
class Root:
    """An image, and a digest by which a memory image knows it again."""

    path: Path
    digest: str


async def prepare(home: Home, layers: tuple[Path, ...], machine: Path) -> Root:
    """Link the image of ``layers``, and the metadata of their disk, into a machine's directory.

    They are made if they are not there: 16 children make them once.
    """
    directory = home.cache / "roots"
    key = await asyncio.to_thread(chain_key, layers)
    image = directory / (key + SUFFIX)
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not await asyncio.to_thread(_link_both, image, machine):
            async with _locked(directory / f"{key}.lock"):
                if not await asyncio.to_thread(_link_both, image, machine):
                    await _make(layers, image)
                    await asyncio.to_thread(_evict, directory, image)
                    if not await asyncio.to_thread(_link_both, image, machine):
                        raise AenvError(f"the root file system {image} went away as soon as it was made")
        return Root(machine / IMAGE, await asyncio.to_thread(_digest, machine / IMAGE))
    except OSError as error:
        raise from_os(error, "the disk's layers cannot be made a root file system") from error


def _link_both(image: Path, machine: Path) -> bool:
    for source, name in ((image, IMAGE), (image.with_suffix(METADATA_SUFFIX), METADATA)):
        (machine / name).unlink(missing_ok=True)
        if not _link(source, machine / name):
            return False
    return True


def _link(image: Path, target: Path) -> bool:
    try:
        os.link(image, target)
    except FileNotFoundError:
        return False
    except OSError:  # another file system, or too many links: by its name
        if not image.exists():
            return False
        target.symlink_to(image.absolute())
    with contextlib.suppress(OSError):
        os.utime(image)  # the last use
    return True


@asynccontextmanager
async def _locked(path: Path) -> AsyncIterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(0.02)
        yield
        path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


async def _make(layers: tuple[Path, ...], image: Path) -> None:
    raw, part, metadata = (image.with_suffix(suffix) for suffix in (".raw", ".part", ".part-metadata"))

    def convert() -> None:
        with Ext4(raw) as source:
            erofs.write(source, erofs.read_tree(source, KEEP), part)

    try:
        for path in (raw, part, metadata):  # of a process that was killed
            path.unlink(missing_ok=True)
        await disk.flatten(layers, raw)
        await disk_commit.replay(raw)
        await disk_commit.save_metadata(raw, metadata)
        await asyncio.to_thread(convert)
        for path, final in ((metadata, image.with_suffix(METADATA_SUFFIX)), (part, image)):
            path.chmod(0o444)
            path.rename(final)
    except AenvError as error:
        if "no space left" in error.message.lower():
            raise NoSpace(
                f"the disk is full: {image} was not made", fix="free disk space and try again"
            ) from error
        raise
    finally:
        for path in (raw, part, metadata):
            path.unlink(missing_ok=True)


def _evict(directory: Path, newest: Path) -> None:
    """Remove what was not used for longest; machines have links of their own."""
    found = []
    for path in directory.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):
            facts = path.stat()
            found.append((facts.st_mtime_ns, facts.st_blocks * 512, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= CACHE_BYTES:
            return
        if path != newest:
            path.unlink(missing_ok=True)
            path.with_suffix(METADATA_SUFFIX).unlink(missing_ok=True)
            total -= size


def _digest(image: Path) -> str:
    """Of its size and its beginning: names, owners, sizes, times and places of the first thousands of files."""
    with image.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if len(head) < erofs.BLOCK_BYTES:
        raise CorruptData(f"the root file system {image} is damaged", fix="remove the cache's directory roots")
    return hashlib.sha256(f"{image.stat().st_size}\n".encode() + head).hexdigest()
