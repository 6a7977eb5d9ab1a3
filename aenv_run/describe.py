"""What a captured file is: its size, its digest and those of its chunks, all in one pass over it.

The chunks are digested in other threads than the whole, since hashing releases the interpreter lock, and a hole is
not read: of it the whole's digest needs the zeros and nobody else anything.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from aenv_run.chunk_table import CHUNK_BYTES, ChunkTable, has_table, zero_digest
from aenv_run.digest import digest_bytes
from aenv_run.errors import InvalidInput
from aenv_run.snapshot import Blob
from aenv_run.store.identity import FileIdentity
from aenv_run.store.sparse import data_runs
from aenv_run.types import Digest

#: Read at once. A whole number of chunks.
PIECE_BYTES = 4 * CHUNK_BYTES
#: Pieces of one file that wait for their digests.
WINDOW = 8
_ZEROS = bytes(PIECE_BYTES)


@dataclass(frozen=True)
class Described:
    """``identity`` is None if a later write to the file would not show in it."""

    blob: Blob
    table: ChunkTable | None
    identity: FileIdentity | None


def describe(files: Sequence[Path]) -> tuple[Described, ...]:
    """Of each file; ``InvalidInput`` for one that cannot be read, or is written meanwhile: it is not sealed."""
    if not files:
        return ()
    threads = min(os.cpu_count() or 1, 8)
    with ThreadPoolExecutor(min(len(files), threads)) as pool, ThreadPoolExecutor(threads) as chunks:
        return tuple(pool.map(lambda path: _describe(path, chunks), files))


def require_unchanged(files: Mapping[Digest, Path], described: Sequence[Described]) -> None:
    """``InvalidInput`` if a file was written since: what was stored of it may not be what was described."""
    known: dict[Digest, set[FileIdentity | None]] = {}
    for one in described:
        known.setdefault(one.blob.digest, set()).add(one.identity)
    for digest, path in files.items():
        identities = known.get(digest, {None})
        if None not in identities and FileIdentity.of(path.stat(follow_symlinks=False)) not in identities:
            raise InvalidInput(f"captured file {path} was written while it was committed: it is not sealed")


def _describe(path: Path, chunks: ThreadPoolExecutor) -> Described:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidInput(f"captured file {path} cannot be read: {error.strerror}") from error
    try:
        before = FileIdentity.of(os.fstat(fd))
        whole, digests = _digests(fd, before.size_bytes, chunks)
        if whole is None or FileIdentity.of(os.fstat(fd)) != before:
            raise InvalidInput(f"captured file {path} was written while it was committed: it is not sealed")
    except OSError as error:
        raise InvalidInput(f"captured file {path} cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)
    table = ChunkTable(CHUNK_BYTES, before.size_bytes, digests) if has_table(before.size_bytes) else None
    blob = Blob(
        digest=whole,
        size_bytes=before.size_bytes,
        chunks=digest_bytes(table.encoded()) if table is not None else None,
    )
    return Described(blob, table, before if before.settled else None)


def _digests(fd: int, size_bytes: int, chunks: ThreadPoolExecutor) -> tuple[Digest | None, bytes]:
    """Of the whole and of all chunks; None if the file ends early."""
    whole, done, found = hashlib.sha256(), 0, bytearray()
    waiting: deque[Future[bytes]] = deque()
    for start, end in (*data_runs(fd, size_bytes, CHUNK_BYTES), (size_bytes, size_bytes)):
        while waiting and start > done:
            found += waiting.popleft().result()
        found += _zeros(whole, done, start)
        for offset in range(start, end, PIECE_BYTES):
            data = os.pread(fd, min(PIECE_BYTES, end - offset), offset)
            if len(data) != min(PIECE_BYTES, end - offset):
                return None, b""
            if len(waiting) >= WINDOW:
                found += waiting.popleft().result()
            waiting.append(chunks.submit(_digest_chunks, data))
            whole.update(data)
        done = end
    while waiting:
        found += waiting.popleft().result()
    return Digest(f"sha256:{whole.hexdigest()}"), bytes(found)


def _digest_chunks(data: bytes) -> bytes:
    view = memoryview(data)
    return b"".join(
        hashlib.sha256(view[offset : offset + CHUNK_BYTES]).digest() for offset in range(0, len(data), CHUNK_BYTES)
    )


def _zeros(whole: hashlib._Hash, start: int, end: int) -> bytes:
    """Digest a hole, which begins at a chunk; returns the digests of its chunks."""
    for offset in range(start, end, PIECE_BYTES):
        whole.update(memoryview(_ZEROS)[: min(PIECE_BYTES, end - offset)])
    count, rest = divmod(end - start, CHUNK_BYTES)
    return zero_digest(CHUNK_BYTES) * count + (zero_digest(rest) if rest else b"")
