"""Cache mounts: directories of steps that outlive their machines and are in no layer and no key.

A step works on a copy of its own, moved in and out as an archive; of steps that run at once the last one wins.
Content comes from a guest and goes to another: it is bounded, rewritten so that nothing in it lies outside its
directory, and never unpacked on the host. docs/decisions/013-cache-mounts.md says why so.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from aenv_build.language.verbs import CacheMount
from aenv_build.planning.files import holds_directory, strip_top
from aenv_run.errors import AenvError, InvalidInput, NotFound, ProtocolError, SandboxDead
from aenv_run.guest import EntryType, Guest
from aenv_run.threads import in_thread
from aenv_run.untar import Limit

LIMIT_VARIABLE = "AENV_BUILD_CACHE_MIB"
DEFAULT_LIMIT_BYTES = 10 << 30
#: Where what the image has in the place of the directory waits.
ASIDE = ".aenv-aside"


def mount_limit_bytes(environ: Mapping[str, str] | None = None) -> int:
    """What all cache mounts of a home may keep: $AENV_BUILD_CACHE_MIB, or 10 GiB."""
    text = (os.environ if environ is None else environ).get(LIMIT_VARIABLE)
    if not text:
        return DEFAULT_LIMIT_BYTES
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise InvalidInput(f"{LIMIT_VARIABLE} is {text[:40]!r}", fix="write a whole number of MiB, such as 10240")
    return int(text) << 20


@dataclass(frozen=True)
class KeptMount:
    """One directory's content on the host. ``scope``: the recipe's name, or the id that recipes share."""

    path: str
    scope: str
    size_bytes: int
    used_at_s: float


class MountStore:
    """All of a home: one archive a directory, at most ``limit_bytes`` in all, the least recently used go first."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes

    @property
    def limit(self) -> Limit:
        """What one directory may bring: half of all, so that none drives out all others."""
        half = self._limit_bytes // 2
        return Limit(half, "half of what cache mounts may keep", fix=f"raise {LIMIT_VARIABLE}")

    def find(self, scope: str, path: str) -> Path | None:
        """The archive, if there is one; it counts as used now."""
        archive = self._archive(scope, path)
        try:
            os.utime(archive)
        except FileNotFoundError:
            return None
        return archive

    def scratch(self) -> Path:
        """A new file beside the archives."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".new-", dir=self._directory)
        os.close(descriptor)
        return Path(name)

    def keep(self, scope: str, path: str, content: Path) -> None:
        """Put it in the place of what was there, then drop what is over the limit."""
        archive = self._archive(scope, path)
        note = archive.with_suffix(".json")
        temporary = self.scratch()
        temporary.write_text(json.dumps({"path": path, "scope": scope}))
        temporary.replace(note)
        content.replace(archive)
        self._trim()

    def show(self) -> list[KeptMount]:
        """What is kept, the most recently used first."""
        found = []
        for archive in self._directory.glob("*.tar"):
            with suppress(OSError, ValueError, KeyError):
                note = json.loads(archive.with_suffix(".json").read_text())
                info = archive.stat()
                found.append(KeptMount(str(note["path"]), str(note["scope"]), info.st_size, info.st_mtime))
        return sorted(found, key=lambda one: -one.used_at_s)

    def empty(self) -> int:
        """Remove all of it, and what killed builds left; how many bytes that were."""
        freed = 0
        for path in (*self._directory.glob("*.tar"), *self._directory.glob(".new-*")):
            freed += _remove(path)
        return freed

    def _trim(self) -> None:
        kept = self.show()
        left = sum(one.size_bytes for one in kept)
        while left > self._limit_bytes and kept:
            oldest = kept.pop()
            left -= _remove(self._archive(oldest.scope, oldest.path))

    def _archive(self, scope: str, path: str) -> Path:
        digest = hashlib.sha256(json.dumps([scope, path]).encode()).hexdigest()[:32]
        return self._directory / f"{digest}.tar"


def _remove(archive: Path) -> int:
    try:
        size_bytes = archive.stat().st_size
        archive.unlink()
    except FileNotFoundError:
        return 0
    archive.with_suffix(".json").unlink(missing_ok=True)
    return size_bytes


@dataclass(frozen=True)
class Mounts:
    """The cache mounts of one step."""

    store: MountStore
    recipe: str
    wanted: Sequence[CacheMount] = ()
    #: What was not kept, and why: for people.
    notes: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def around(self, guest: Guest, user: str) -> AsyncIterator[None]:
        """In the guest while a command of ``user`` runs; kept if it ends well, taken out in any case."""
        async with AsyncExitStack() as stack:
            for mount in self.wanted:
                await stack.enter_async_context(self._mounted(mount, guest, user))
            yield

    @asynccontextmanager
    async def _mounted(self, mount: CacheMount, guest: Guest, user: str) -> AsyncIterator[None]:
        scope = f"id {mount.id}" if mount.id is not None else f"recipe {self.recipe}"
        covered = await _set_aside(guest, mount.path)
        try:
            await guest.make_dir(mount.path, user=user)
            await self._give(mount, scope, guest, user)
            yield
            await self._keep(mount, scope, guest)
        except BaseException:
            with suppress(AenvError):
                await _take_out(guest, mount.path, covered=covered)
            raise
        await _take_out(guest, mount.path, covered=covered)

    async def _give(self, mount: CacheMount, scope: str, guest: Guest, user: str) -> None:
        kept = await in_thread(self.store.find, scope, mount.path)
        try:
            if kept is not None:
                await guest.put_archive(mount.path, kept, user="root", keep_owner=True)
        except SandboxDead:
            raise
        except FileNotFoundError:
            return  # another build has just emptied it
        except AenvError as error:
            self.notes.append(f"the cache {mount.path} begins empty: {error.message}")
            await guest.remove(mount.path, user="root")
            await guest.make_dir(mount.path, user=user)

    async def _keep(self, mount: CacheMount, scope: str, guest: Guest) -> None:
        """Its content for the next one. What cannot be kept costs time later, and no build."""
        sent, content = await in_thread(self.store.scratch), await in_thread(self.store.scratch)
        limit = self.store.limit
        try:
            stream = limit.of_stream()
            with sent.open("wb") as file:
                async for chunk in guest.get_archive(mount.path, user="root"):
                    stream.take(len(chunk))
                    await in_thread(file.write, chunk)
            if not await in_thread(holds_directory, sent):
                raise ProtocolError("it is no directory any more")
            # A server's socket or fifo is of no use to the next machine, which would refuse all for it.
            await in_thread(strip_top, sent, content, limit, name="", special=False)
            await in_thread(self.store.keep, scope, mount.path, content)
        except SandboxDead:
            raise
        except (AenvError, OSError) as error:
            why = error.message if isinstance(error, AenvError) else str(error.strerror)
            self.notes.append(f"the cache {mount.path} was not kept: {why}")
        finally:
            sent.unlink(missing_ok=True)
            content.unlink(missing_ok=True)


async def _set_aside(guest: Guest, path: str) -> bool:
    """Move what the image has there out of the way; whether there was something."""
    try:
        found = await guest.stat(path, user="root")
    except NotFound:
        return False
    if found.type is not EntryType.DIRECTORY:
        raise InvalidInput(f"the cache {path} is no directory in the image", fix="name another path")
    await guest.move(path, path + ASIDE, user="root")
    return True


async def _take_out(guest: Guest, path: str, *, covered: bool) -> None:
    await guest.remove(path, user="root")
    if covered:
        await guest.move(path + ASIDE, path, user="root")
