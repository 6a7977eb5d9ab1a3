"""Packing in the background: raw blobs that nobody has used for a while become packed ones.

Only where the store has files: over a wire a commit packs at once. Durable at every moment: the packed form is
complete, synced and read back before the raw one goes, and a crash between leaves both. What is packed when, and
why: docs/decisions/016-chunks.md.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aenv_run.blobs import MIN_SAVED, Stored, packed_file
from aenv_run.cache_limit import let_go
from aenv_run.chunk_table import ChunkTable, has_table
from aenv_run.config import open_repository
from aenv_run.errors import AenvError, CorruptData, NotFound, Unsupported, from_os
from aenv_run.garbage.lock import CollectorLock
from aenv_run.paths import Home
from aenv_run.repository import Repository
from aenv_run.scratch import scratch
from aenv_run.snapshot import Blob
from aenv_run.store import StoreKey
from aenv_run.types import Digest, Model

#: In the cache: an empty file for each blob that packing does not make smaller.
UNPACKABLE = "unpackable"
PR_SET_PDEATHSIG = 1


class Packing(Model):
    """What was packed, or with ``dry_run`` would be.

    ``raw_bytes`` is what those took on disk, ``packed_bytes`` what they take now (0 in a dry run). The others
    stay: ``used`` for they were used within the time or have another name, ``unpackable`` for they do not shrink,
    ``damaged`` for what is stored is not the blob.
    """

    dry_run: bool
    packed: int = 0
    raw_bytes: int = 0
    packed_bytes: int = 0
    used: int = 0
    unpackable: int = 0
    damaged: tuple[Digest, ...] = ()


@dataclass(frozen=True)
class _Raw:
    """A blob that is a raw file of the store."""

    blob: Blob
    path: Path
    stored: Stored
    disk_bytes: int


class Packer:
    """Packs what has not been used for ``older_than_s``. ``cache``: of this home; ``staging``: for scratch."""

    def __init__(self, repository: Repository, cache: Path, staging: Path, *, older_than_s: float) -> None:
        if not repository.store.has_files:
            raise Unsupported(
                "this repository is packed by every commit to it", fix="nothing is to be done: it is not local"
            )
        self._repository, self._blobs, self._store = repository, repository.blobs, repository.store
        self._cache, self._staging, self._older_than_s = cache, staging, older_than_s

    def pack(
        self, *, dry_run: bool = False, told: Callable[[int, int], None] = lambda done, total: None
    ) -> Packing:
        """Pack all that is due, one after the other; ``told`` hears of bytes done, of how many."""
        done = Packing(dry_run=dry_run)
        due: list[_Raw] = []
        for raw in self._raw():
            if self._mark(raw.blob).exists():
                done = done.model_copy(update={"unpackable": done.unpackable + 1})
            elif not self._is_idle(raw):
                done = done.model_copy(update={"used": done.used + 1})
            else:
                due.append(raw)
        total, before = sum(raw.blob.size_bytes for raw in due), 0
        for raw in due:
            if dry_run:
                done = _with(done, raw, 0)
                continue
            done = self._pack(raw, done, partial(_tell, told, before, total))
            before += raw.blob.size_bytes
        return done

    def _pack(self, raw: _Raw, done: Packing, told: Callable[[int], None]) -> Packing:
        try:
            size = self._pack_one(raw, told)
            if size is None:
                return done.model_copy(update={"unpackable": done.unpackable + 1})
            if not self._drop(raw):
                return done.model_copy(update={"used": done.used + 1})
            return _with(done, raw, size)
        except CorruptData:
            return done.model_copy(update={"damaged": (*done.damaged, raw.blob.digest)})
        except NotFound:  # collected, or packed by another
            return done
        except OSError as error:
            raise from_os(error, f"cannot pack blob {raw.blob.digest}") from error

    # What is due

    def _raw(self) -> Iterator[_Raw]:
        """Raw blobs that a snapshot needs; what none needs is for the garbage collector."""
        seen: dict[Digest, Blob] = {}
        for id in self._repository.ids():
            with suppress(AenvError):  # an unreadable manifest is for check
                for blob in self._repository.snapshot(id).files():
                    if blob.digest not in seen or blob.chunks is not None:
                        seen[blob.digest] = blob
        self._forget_marks(seen)
        for blob in seen.values():
            key = self._blobs.raw_key(blob.digest)
            with suppress(AenvError, FileNotFoundError):
                info = self._store.stat(key) if has_table(blob.size_bytes) else None
                path = self._store.local_path(key)
                if info is not None and path is not None and info.size_bytes == blob.size_bytes:
                    blocks = path.stat(follow_symlinks=False).st_blocks
                    yield _Raw(blob, path, Stored(info, packed=False), blocks * 512)

    def _is_idle(self, raw: _Raw, *, let_it_go: bool = False) -> bool:
        """Whether only the repository has it, or this home's cache too, and nobody has used it lately.

        The change time of a file is that of its last link: a commit, a launch from it, the end of a sandbox.
        """
        try:
            found = raw.path.stat(follow_symlinks=False)
        except FileNotFoundError:
            return False
        if not let_it_go and time.time() - found.st_ctime < self._older_than_s:
            return False
        links = found.st_nlink
        if links == 2 and let_go(self._cache, raw.blob.digest, found, self._older_than_s, dry_run=not let_it_go):
            links = 1
        return links == 1

    def _mark(self, blob: Blob) -> Path:
        return self._cache / UNPACKABLE / blob.digest.hex[:2] / blob.digest.hex

    def _forget_marks(self, needed: Mapping[Digest, Blob]) -> None:
        """Of blobs that were collected."""
        for mark in (self._cache / UNPACKABLE).glob("*/*"):
            if f"sha256:{mark.name}" not in needed:
                mark.unlink(missing_ok=True)

    # Packing

    def _pack_one(self, raw: _Raw, told: Callable[[int], None]) -> int | None:
        """The packed form, durable and read back; its size. None if it is not worth it."""
        blob = raw.blob
        table = self._table(blob)
        key = self._blobs.packed_key(blob.digest)
        if self._is_packed(blob, table):
            return self._size(blob)
        with scratch(self._staging) as directory:
            worth_bytes = int(min(blob.size_bytes, raw.disk_bytes) * (1 - MIN_SAVED))
            with packed_file(raw.path, directory, blob, table, told, worth_bytes=worth_bytes) as packed:
                if packed is None:
                    mark = self._mark(blob)
                    mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    mark.touch(mode=0o600)
                    return None
                self._store.put_file(key, packed, consume=True)
        if not self._is_packed(blob, table):
            raise CorruptData(f"blob {blob.digest} ({raw.stored.info.key}) is damaged: it was not packed")
        return self._size(blob)

    def _is_packed(self, blob: Blob, table: ChunkTable | None) -> bool:
        """Whether the packed form is there and right. One that is wrong is removed: the raw one is there."""
        key = self._blobs.packed_key(blob.digest)
        if (info := self._store.stat(key)) is None:
            return False
        try:
            self._blobs.verify_form(blob, Stored(info, packed=True), table)
        except CorruptData:
            self._blobs.forget(blob.digest)
            self._delete(key, while_there=self._blobs.raw_key(blob.digest))
            return False
        return True

    def _size(self, blob: Blob) -> int:
        info = self._store.stat(self._blobs.packed_key(blob.digest))
        if info is None:
            raise NotFound(f"blob {blob.digest} was collected while it was packed")
        return info.size_bytes

    def _table(self, blob: Blob) -> ChunkTable | None:
        """None also if it cannot be had: the whole is verified by its own digest in any case."""
        try:
            return self._blobs.table(blob)
        except AenvError:
            return None

    def _drop(self, raw: _Raw) -> bool:
        """Remove the raw form, whose packed one is whole. False if somebody has come to use it: then both stay."""
        if not self._is_idle(raw, let_it_go=True):
            return False
        return self._delete(raw.stored.info.key, while_there=self._blobs.packed_key(raw.blob.digest))

    def _delete(self, key: StoreKey, *, while_there: StoreKey) -> bool:
        """Remove one form while the other is there. Under the lock: no collector takes that one meanwhile."""
        lock = CollectorLock(self._repository.gate, "pack")
        lock.acquire()
        try:
            if self._store.stat(while_there) is None:
                return False
            lock.require()
            self._store.delete(key)
            return True
        finally:
            lock.release()


def _with(done: Packing, raw: _Raw, packed_bytes: int) -> Packing:
    return done.model_copy(
        update={
            "packed": done.packed + 1,
            "raw_bytes": done.raw_bytes + raw.disk_bytes,
            "packed_bytes": done.packed_bytes + packed_bytes,
        }
    )


def _tell(told: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    told(before + done, total)


def be_idle() -> None:
    """Let this process have what no other one wants of processors and disks."""
    with suppress(OSError):
        os.nice(19)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # its disk priority follows


def main(argv: list[str] | None = None) -> int:
    """What the node starts now and then: packs at idle priority and tells the result to the node's log."""
    parser = argparse.ArgumentParser(prog="aenv_run.packing", description="packs what has not been used")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--repository", default=None, help="URL or path; default: the home's own")
    parser.add_argument("--older-than-s", type=float, required=True)
    options = parser.parse_args(argv)
    be_idle()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # not longer than the node
    home = Home(options.home.absolute())
    repository = open_repository(options.repository, home)
    done = Packing(dry_run=False)
    if repository.store.has_files:
        done = Packer(repository, home.cache, home.staging, older_than_s=options.older_than_s).pack()
    sys.stdout.write(done.model_dump_json() + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
