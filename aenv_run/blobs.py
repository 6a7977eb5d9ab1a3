"""Blobs over a store, in either form: raw, or packed. Whoever asks for a blob need not know which it is.

A blob is present if one of its forms is. Forms only ever change from raw to packed, the packed one complete before
the raw one goes, so a reader that misses the one finds the other.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Protocol

from aenv_run.chunk_table import CHUNK_BYTES, ChunkTable, chunk_count, has_table
from aenv_run.digest import READ_BYTES
from aenv_run.errors import CorruptData, HostRefused, NoSpace, NotFound, StoreUnavailable, from_os
from aenv_run.packed import HEADER_BYTES, PackedIndex, blob_bytes_of, index_bytes, pack
from aenv_run.snapshot import Blob
from aenv_run.store import KeyInfo, Store, StoreKey
from aenv_run.types import Digest

RESTORE_FIX = "restore the file from a copy, or move it away and build the snapshot again, which stores it anew"
#: Ranges of one blob that are read at the same time from a store over a wire, and how many chunks each is.
READERS = 8
SPAN_CHUNKS = 16
#: A packed form that saves less than this part of the blob is not worth unpacking it at each use.
MIN_SAVED = 0.05
_REMEMBERED = 64
_FIRST_READ_BYTES = 64 << 10


class Readable(Protocol):
    """What gives bytes in order; empty at the end."""

    def read(self, size: int = -1, /) -> bytes:
        """Up to ``size`` bytes, all for a negative one."""


@dataclass(frozen=True)
class Stored:
    """One form of a blob that the store has."""

    info: KeyInfo
    packed: bool


class Blobs:
    """Blocking and thread-safe, as the store is."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._indexes: OrderedDict[StoreKey, PackedIndex] = OrderedDict()
        self._read: OrderedDict[Digest, Stored] = OrderedDict()  # of blobs that are read by chunks
        self._lock = Lock()

    # Where they are

    def raw_key(self, digest: Digest) -> StoreKey:
        """Where the blob is when it is raw."""
        return StoreKey(f"blobs/sha256/{digest.hex[:2]}/{digest.hex}")

    def packed_key(self, digest: Digest) -> StoreKey:
        """Where the blob is when it is packed."""
        return StoreKey(f"packed/sha256/{digest.hex[:2]}/{digest.hex}")

    def find(self, digest: Digest) -> Stored | None:
        """The form to read; None when there is none."""
        forms = [(self.raw_key(digest), False), (self.packed_key(digest), True)]
        if not self._store.has_files:
            forms.reverse()  # a commit over a wire packs what is large
            forms.append(forms[0])  # once more: it may have been packed between
        for key, packed in forms:
            if (info := self._store.stat(key)) is not None:
                return Stored(info, packed)
        return None

    def forms(self, digest: Digest) -> tuple[Stored, ...]:
        """Every form that there is now."""
        keys = ((self.raw_key(digest), False), (self.packed_key(digest), True))
        found = ((self._store.stat(key), packed) for key, packed in keys)
        return tuple(Stored(info, packed) for info, packed in found if info is not None)

    def require(self, blob: Blob) -> Stored:
        """``CorruptData`` unless the blob is there with the right size. Reads no content."""
        stored = self.find(blob.digest)
        if stored is None:
            key = self.raw_key(blob.digest)
            raise CorruptData(f"blob {blob.digest} ({key}) is missing from the repository", fix=RESTORE_FIX)
        self.require_size(blob, stored)
        return stored

    def require_size(self, blob: Blob, stored: Stored) -> None:
        """``CorruptData`` unless that form is one of a blob of the right size."""
        key = stored.info.key
        size = self.index(stored).blob_bytes if stored.packed else stored.info.size_bytes
        if size != blob.size_bytes:
            raise CorruptData(
                f"blob {blob.digest} ({key}) has {size} bytes instead of {blob.size_bytes}", fix=RESTORE_FIX
            )

    # Reading

    @contextmanager
    def open(self, blob: Blob | Digest, stored: Stored | None = None) -> Iterator[VerifiedReader]:
        """A reader of the blob from its start that raises ``CorruptData`` at the end if the digest differs.

        Of that form, or of the one that there is. Of a ``Blob`` no more is read than its size.
        """
        digest, size_bytes = (blob.digest, blob.size_bytes) if isinstance(blob, Blob) else (blob, None)
        with ExitStack() as stack:
            yield VerifiedReader(self._opened(digest, stored, stack), digest, self.raw_key(digest), size_bytes)

    def _opened(self, digest: Digest, stored: Stored | None, stack: ExitStack) -> Readable:
        for again in (False, True):
            form = stored or self.find(digest)
            if form is None:
                break
            try:
                if self._store.has_files and not form.packed:
                    return stack.enter_context(self._store.open(form.info.key))
            except NotFound:
                if stored is not None or again:
                    raise
                continue  # it was packed meanwhile
            pool = ThreadPoolExecutor(READERS)
            stack.callback(pool.shutdown, cancel_futures=True)
            return _InOrder(stack.enter_context(closing(self._pieces(form, pool))))
        raise NotFound(f"{self.raw_key(digest)} is not in the store")

    def verify(self, blob: Blob) -> None:
        """``CorruptData`` unless every form that is stored has the blob's size, digest and chunks. Reads all."""
        for needed in blob.with_table:
            self.require(needed)
        table = self.table(blob)
        for stored in self.forms(blob.digest):
            try:
                self.verify_form(blob, stored, table)
            except NotFound:  # packed meanwhile, or collected
                self.verify_form(blob, self.require(blob), table)

    def verify_form(self, blob: Blob, stored: Stored, table: ChunkTable | None) -> None:
        """As ``verify``, of one form."""
        self.require_size(blob, stored)
        number = 0
        with self.open(blob, stored) as reader:
            while chunk := reader.read_fully(CHUNK_BYTES):
                if table is not None and (number >= table.count or not table.matches(number, chunk)):
                    raise CorruptData(
                        f"chunk {number} of blob {blob.digest} ({stored.info.key}) is not that of its table "
                        f"{blob.chunks}",
                        fix=RESTORE_FIX,
                    )
                number += 1

    def table(self, blob: Blob) -> ChunkTable | None:
        """The blob's chunk table, verified; None if it has none. ``NotFound`` if the store lacks it."""
        if (table := blob.table) is None:
            return None
        with self.open(table) as reader:
            data = reader.read_fully(table.size_bytes)
            reader.read(1)  # the end, where its digest is compared
        return ChunkTable.parse(data, blob.size_bytes, f"{table.digest}, said to be of blob {blob.digest},")

    def chunks(self, blob: Blob, first: int, end: int) -> list[bytes]:
        """Chunks ``first`` to ``end - 1``, not verified, by one read of the store; ``NotFound`` without any form.

        Where the blob is, and its index, is remembered: ``forget`` it when what comes is wrong.
        """
        with self._lock:
            stored = self._read.get(blob.digest)
        if stored is None:
            if (stored := self.find(blob.digest)) is None:
                raise NotFound(f"{self.raw_key(blob.digest)} is not in the store")
            self.require_size(blob, stored)
            with self._lock:
                self._read[blob.digest] = stored
                while len(self._read) > _REMEMBERED:
                    self._read.popitem(last=False)
        return self._span(stored, first, end)

    def index(self, stored: Stored) -> PackedIndex:
        """Of a packed form. Remembered."""
        key, size_bytes = stored.info.key, stored.info.size_bytes
        with self._lock:
            if (index := self._indexes.get(key)) is not None and index.stored_bytes == size_bytes:
                self._indexes.move_to_end(key)
                return index
        what = f"blob sha256:{key[-64:]} ({key})"
        data = self._store.read_range(key, 0, min(size_bytes, _FIRST_READ_BYTES))
        wanted = index_bytes(blob_bytes_of(data[:HEADER_BYTES], what))
        if len(data) < wanted <= size_bytes:
            data += self._store.read_range(key, len(data), wanted - len(data))
        index = PackedIndex.parse(data[:wanted], what)
        if index.stored_bytes != size_bytes:
            raise CorruptData(
                f"{what} is damaged: it has {size_bytes} bytes, its index says {index.stored_bytes}",
                fix=RESTORE_FIX,
            )
        with self._lock:
            self._indexes[key] = index
            while len(self._indexes) > _REMEMBERED:
                self._indexes.popitem(last=False)
        return index

    def forget(self, digest: Digest) -> None:
        """Look for the blob anew next time: it may have another form, or another packed one, by now."""
        with self._lock:
            self._read.pop(digest, None)
            self._indexes.pop(self.packed_key(digest), None)

    # Writing

    def put(self, path: Path, blob: Blob, table: ChunkTable | None) -> None:
        """Store the file, which is given away, unless a form of it is there.

        The file itself where the store has files, so that it is instant; over a wire packed, where that saves.
        """
        if self.find(blob.digest) is None:
            if self._store.has_files or not has_table(blob.size_bytes):
                self._store.put_file(self.raw_key(blob.digest), path, consume=True)
            else:
                self._put_packed(path, blob, table)
        self.require(blob)

    def put_table(self, blob: Blob, table: ChunkTable) -> None:
        """Store the blob's table."""
        if blob.table is not None and not self._store.put_new(self.raw_key(blob.table.digest), table.encoded()):
            self.verify(blob.table)

    def _put_packed(self, path: Path, blob: Blob, table: ChunkTable | None) -> None:
        with ExitStack() as stack:
            try:
                packed = stack.enter_context(packed_file(path, path.parent, blob, table))
            except (NoSpace, HostRefused):
                packed = None  # no place for it beside the file: raw it only takes longer
            if packed is None:
                self._store.put_file(self.raw_key(blob.digest), path, consume=True)
            else:
                self._store.put_file(self.packed_key(blob.digest), packed, consume=True)

    # Pieces

    def _span(self, stored: Stored, first: int, end: int) -> list[bytes]:
        """Chunks of one form, by one read."""
        key = stored.info.key
        if not stored.packed:
            offset = first * CHUNK_BYTES
            length = min(end * CHUNK_BYTES, stored.info.size_bytes) - offset
            data = self._store.read_range(key, offset, length)
            return [data[at : at + CHUNK_BYTES] for at in range(0, length, CHUNK_BYTES)]
        index = self.index(stored)
        start = index.offsets[first]
        length = index.offsets[end] - start
        data = self._store.read_range(key, start, length) if length else b""
        return [
            index.unpack(number, data[index.offsets[number] - start : index.offsets[number + 1] - start])
            for number in range(first, end)
        ]

    def _pieces(self, stored: Stored, pool: ThreadPoolExecutor) -> Generator[bytes, None, None]:
        """The whole of one form in order, a few ranges at a time."""
        size = self.index(stored).blob_bytes if stored.packed else stored.info.size_bytes
        waiting: deque[Future[list[bytes]]] = deque()
        count = chunk_count(size)
        for first in range(0, count, SPAN_CHUNKS):
            if len(waiting) == READERS:
                yield from waiting.popleft().result()
            waiting.append(pool.submit(self._span, stored, first, min(first + SPAN_CHUNKS, count)))
        while waiting:
            yield from waiting.popleft().result()


@contextmanager
def packed_file(
    path: Path,
    scratch: Path,
    blob: Blob,
    table: ChunkTable | None,
    told: Callable[[int], None] = lambda _: None,
    *,
    worth_bytes: int | None = None,
) -> Iterator[Path | None]:
    """The packed form of a file, in ``scratch`` until the end; None where it is larger than ``worth_bytes``.

    ``CorruptData`` if the file is not what the table says; without a table the caller compares the result.
    """
    if worth_bytes is None:
        worth_bytes = int(blob.size_bytes * (1 - MIN_SAVED))
    target = scratch / f".packed-{blob.digest.hex}-{secrets.token_hex(4)}"
    try:
        with path.open("rb") as source, target.open("xb") as file:
            size = pack(source.fileno(), blob.size_bytes, file.fileno(), table, told)
        if size is None:
            raise CorruptData(f"{path} is not blob {blob.digest}, as which it was to be packed", fix=RESTORE_FIX)
    except OSError as error:
        target.unlink(missing_ok=True)
        raise from_os(error, f"cannot pack blob {blob.digest}") from error
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    try:
        yield target if size <= worth_bytes else None
    finally:
        target.unlink(missing_ok=True)


class VerifiedReader:
    """Reads a blob and digests it on the way; at the end raises ``CorruptData`` if it was not the blob."""

    def __init__(self, file: Readable, digest: Digest, key: StoreKey, size_bytes: int | None = None) -> None:
        self._file, self._digest, self._key, self._limit = file, digest, key, size_bytes
        self._hash = hashlib.sha256()
        self._size = 0

    def read(self, size: int = -1) -> bytes:
        """Up to ``size`` bytes; empty at the end, which is reached only by a blob that is right."""
        if size == 0:
            return b""
        try:
            data = self._file.read(size)
        except OSError as error:
            raise StoreUnavailable(f"reading {self._key}: {error.strerror or error}") from error
        self._hash.update(data)
        self._size += len(data)
        too_long = self._limit is not None and self._size > self._limit
        if (too_long or not data or size < 0) and self._hash.hexdigest() != self._digest.hex:
            raise CorruptData(
                f"blob {self._digest} ({self._key}) is damaged: "
                f"its {'first ' if too_long else ''}{self._size} bytes have sha256 {self._hash.hexdigest()}",
                fix=RESTORE_FIX,
            )
        return data

    def read_fully(self, size: int) -> bytes:
        """Exactly ``size`` bytes, or what is left before the end."""
        data = self.read(min(size, READ_BYTES))
        if len(data) == size or not data:
            return data
        parts, missing = [data], size - len(data)
        while missing and (data := self.read(min(missing, READ_BYTES))):
            parts.append(data)
            missing -= len(data)
        return b"".join(parts)


class _InOrder:
    """Reads pieces one after the other."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, b""

    def read(self, size: int = -1, /) -> bytes:
        if size < 0:
            data, self._rest = self._rest + b"".join(self._pieces), b""
            return data
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return b""
            self._rest = piece
        data, self._rest = self._rest[:size], self._rest[size:]
        return data
