"""What a blob's chunks are: a table of their digests, so that a part of a blob can be verified alone.

The bytes are described in docs/snapshot-format.md. A table is found by its own digest, which the manifest has.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import lru_cache

from aenv_run.errors import CorruptData

#: docs/decisions/016-chunks.md says why.
CHUNK_BYTES = 256 << 10
#: A larger blob has no table and is only ever read whole: a table has to fit into memory.
MAX_CHUNKED_BYTES = 1 << 40
DIGEST_BYTES = 32
_MAGIC, _VERSION = b"aenvchnk", 1
_HEADER = struct.Struct("<8sQQQ")


def has_table(blob_bytes: int) -> bool:
    """Whether a blob of that size gets a table: the digest of a blob of one chunk says it already."""
    return CHUNK_BYTES < blob_bytes <= MAX_CHUNKED_BYTES


def chunk_count(blob_bytes: int) -> int:
    """Of how many chunks it is; the last may be shorter."""
    return -(-blob_bytes // CHUNK_BYTES)


def table_bytes(blob_bytes: int) -> int:
    """The size of the table of a blob of that size."""
    return _HEADER.size + DIGEST_BYTES * chunk_count(blob_bytes)


@lru_cache(maxsize=64)
def zero_digest(length: int) -> bytes:
    """sha256 of so many zeros, at most a chunk of them."""
    return hashlib.sha256(bytes(length)).digest()


@dataclass(frozen=True)
class ChunkTable:
    """``digests`` are the sha256 of the chunks, 32 bytes each, one after the other."""

    chunk_bytes: int
    blob_bytes: int
    digests: bytes

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return len(self.digests) // DIGEST_BYTES

    def length(self, index: int) -> int:
        """Bytes of that chunk: only the last may be shorter than the others."""
        return min(self.chunk_bytes, self.blob_bytes - index * self.chunk_bytes)

    def digest(self, index: int) -> bytes:
        """sha256 of that chunk."""
        return self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def is_zero(self, index: int) -> bool:
        """Whether it is nothing but zeros, so that nobody need fetch it."""
        return self.digest(index) == zero_digest(self.length(index))

    def matches(self, index: int, data: bytes) -> bool:
        """Whether these are the bytes of that chunk."""
        return len(data) == self.length(index) and hashlib.sha256(data).digest() == self.digest(index)

    def encoded(self) -> bytes:
        """The bytes that are stored."""
        return _HEADER.pack(_MAGIC, _VERSION, self.chunk_bytes, self.blob_bytes) + self.digests

    @classmethod
    def parse(cls, data: bytes, blob_bytes: int, what: str) -> ChunkTable:
        """The table of a blob of that size, strictly read; ``CorruptData`` for anything else."""
        header = _HEADER.pack(_MAGIC, _VERSION, CHUNK_BYTES, blob_bytes)
        if not has_table(blob_bytes) or len(data) != table_bytes(blob_bytes) or not data.startswith(header):
            raise CorruptData(
                f"{what} is no chunk table of a blob of {blob_bytes} bytes", fix="build the snapshot again"
            )
        return cls(CHUNK_BYTES, blob_bytes, data[len(header) :])

    @classmethod
    def of_small(cls, blob_bytes: int, digest: bytes) -> ChunkTable:
        """Of a blob that is at most one chunk, whose digest is that of the blob."""
        return cls(CHUNK_BYTES, blob_bytes, digest if blob_bytes else b"")
