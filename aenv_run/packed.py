"""The packed form of a blob: its chunks as independent zstd frames, with an index. docs/snapshot-format.md has it.

Packed bytes are a way to carry a blob, not a truth: nothing here verifies content. What is read of them is bounded
by what the blob's size allows, and whoever uses a chunk compares it with its digest.
"""

from __future__ import annotations

import os
import struct
import threading
from array import array
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import zstandard

from aenv_run.chunk_table import CHUNK_BYTES, MAX_CHUNKED_BYTES, ChunkTable, chunk_count
from aenv_run.errors import CorruptData
from aenv_run.store.sparse import write_at

#: Of the level that zstd itself has as default: docs/decisions/016-chunks.md has what others would bring.
LEVEL = 3
PACK_WINDOW = 32
_MAGIC, _VERSION = b"aenvpack", 1
_HEADER = struct.Struct("<8sQQQ")
HEADER_BYTES = _HEADER.size
_LENGTH_BYTES = 4
_ZEROS = bytes(CHUNK_BYTES)
_local = threading.local()


def index_bytes(blob_bytes: int) -> int:
    """Bytes of header and index of a packed blob of that size."""
    return HEADER_BYTES + _LENGTH_BYTES * chunk_count(blob_bytes)


def blob_bytes_of(header: bytes, what: str) -> int:
    """Bytes of the blob that a packed one is of, by its first ``HEADER_BYTES``."""
    if len(header) == HEADER_BYTES:
        magic, version, chunk_bytes, blob_bytes = _HEADER.unpack(header)
        if (magic, version, chunk_bytes) == (_MAGIC, _VERSION, CHUNK_BYTES) and blob_bytes <= MAX_CHUNKED_BYTES:
            return int(blob_bytes)
    raise damaged(what, "it does not begin as a packed blob does")


def damaged(what: str, why: str) -> CorruptData:
    """The error for packed bytes that cannot be."""
    return CorruptData(
        f"{what} is damaged: {why}", fix="restore the file from a copy, or build the snapshot again"
    )


@dataclass(frozen=True)
class PackedIndex:
    """Where the chunks are: that of number ``i`` from ``offsets[i]`` to ``offsets[i + 1]``."""

    blob_bytes: int
    offsets: array[int]
    what: str

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return len(self.offsets) - 1

    @property
    def stored_bytes(self) -> int:
        """How large the packed blob is."""
        return self.offsets[-1]

    def length(self, number: int) -> int:
        """Bytes of that chunk when it is unpacked."""
        return min(CHUNK_BYTES, self.blob_bytes - number * CHUNK_BYTES)

    @classmethod
    def parse(cls, data: bytes, what: str) -> PackedIndex:
        """Of header and index, strictly read."""
        blob_bytes = blob_bytes_of(data[:HEADER_BYTES], what)
        if len(data) != index_bytes(blob_bytes):
            raise damaged(what, "its index is cut off")
        offsets = array("Q", [len(data)])
        for number, (length,) in enumerate(struct.iter_unpack("<I", data[HEADER_BYTES:])):
            if length > min(CHUNK_BYTES, blob_bytes - number * CHUNK_BYTES):
                raise damaged(what, f"its index says that chunk {number} has {length} bytes")
            offsets.append(offsets[-1] + length)
        return cls(blob_bytes, offsets, what)

    def unpack(self, number: int, stored: bytes) -> bytes:
        """The chunk, of exactly its length, from its stored bytes; ``CorruptData`` if they are not such."""
        length = self.length(number)
        if not stored:
            return _ZEROS if length == CHUNK_BYTES else bytes(length)
        if len(stored) == length:
            return stored
        try:
            # The frame's header would make zstd allocate what it says, so that is looked at first.
            if zstandard.get_frame_parameters(stored).content_size == length:
                return _decompressor().decompress(stored, max_output_size=length, allow_extra_data=False)
        except zstandard.ZstdError:
            pass
        raise damaged(self.what, f"chunk {number} does not unpack to {length} bytes")


def pack(
    source_fd: int, blob_bytes: int, target_fd: int, table: ChunkTable | None, told: Callable[[int], None]
) -> int | None:
    """Write the packed form of a file into the empty ``target_fd``; its size. Bounded memory, all processors.

    None if the source is not what ``table`` says, or shorter. ``told`` hears of bytes that are done.
    """
    lengths = bytearray()
    offset = index_bytes(blob_bytes)
    done = 0
    threads = min(os.cpu_count() or 1, 8)
    with ThreadPoolExecutor(threads, initializer=_gently) as pool:
        waiting: deque[Future[bytes | None]] = deque()
        for number in range(chunk_count(blob_bytes) + PACK_WINDOW):
            if number < chunk_count(blob_bytes):
                waiting.append(pool.submit(_pack_chunk, source_fd, blob_bytes, number, table))
            if number < PACK_WINDOW or not waiting:
                continue
            stored = waiting.popleft().result()
            if stored is None:
                return None
            write_at(target_fd, stored, offset)
            lengths += len(stored).to_bytes(_LENGTH_BYTES, "little")
            offset += len(stored)
            done += 1
            told(min(done * CHUNK_BYTES, blob_bytes))
    write_at(target_fd, _HEADER.pack(_MAGIC, _VERSION, CHUNK_BYTES, blob_bytes) + lengths, 0)
    return offset


def _pack_chunk(source_fd: int, blob_bytes: int, number: int, table: ChunkTable | None) -> bytes | None:
    """What is stored of the chunk; None if it is not the one of the table."""
    if table is not None and table.is_zero(number):
        return b""  # also if it is not: whoever reads it finds the digest of zeros
    length = min(CHUNK_BYTES, blob_bytes - number * CHUNK_BYTES)
    data = os.pread(source_fd, length, number * CHUNK_BYTES)
    if len(data) != length or (table is not None and not table.matches(number, data)):
        return None
    if data == _ZEROS[:length]:
        return b""
    frame = _compressor().compress(data)
    return frame if len(frame) < length else data


def _gently() -> None:
    """Let guests and whoever waits for an answer go first: on Linux a thread has a priority of its own."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _compressor() -> zstandard.ZstdCompressor:
    """One of this thread's own."""
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True, write_checksum=False)
    compressor: zstandard.ZstdCompressor = _local.compressor
    return compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    decompressor: zstandard.ZstdDecompressor = _local.decompressor
    return decompressor
