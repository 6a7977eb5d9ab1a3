"""Verified parts of blobs: a chunk is believed because the manifest leads to its digest, never because it came.

Two manifests may claim different tables for one blob, and one of them lies. So what was read by a table is that
blob's only for those who have the same table: whoever keeps chunks keeps them by ``Blob.chunks``.
"""

from __future__ import annotations

from aenv_run.chunk_table import CHUNK_BYTES, ChunkTable
from aenv_run.errors import CorruptData, InvalidInput, NotFound
from aenv_run.repository import Repository
from aenv_run.snapshot import Blob

__all__ = ["CHUNK_BYTES", "MAX_READ_CHUNKS", "ChunkReader", "ChunkTable"]

#: What one ``read`` gives at most: 64 MiB.
MAX_READ_CHUNKS = 256


class ChunkReader:
    """Blocking and thread-safe, as its repository is."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    def table(self, blob: Blob) -> ChunkTable | None:
        """The blob's chunks, verified. None if it has no table: it is then read whole, by its own digest.

        A blob of at most one chunk needs none stored, and always has one here.
        """
        if blob.size_bytes <= CHUNK_BYTES:
            return ChunkTable.of_small(blob.size_bytes, bytes.fromhex(blob.digest.hex))
        return self._repository.blobs.table(blob)

    def read(self, blob: Blob, table: ChunkTable, first: int, count: int) -> list[bytes]:
        """Chunks ``first`` to ``first + count - 1``, raw, each verified; those of zeros are not fetched.

        At most ``MAX_READ_CHUNKS``. Those that are neighbours come in one read of the store. ``CorruptData``
        names the blob and the chunk; ``NotFound`` when the store has the blob in no form.
        """
        if not 0 <= first <= first + count <= table.count or count > MAX_READ_CHUNKS:
            raise InvalidInput(f"blob {blob.digest} has {table.count} chunks, not {first} to {first + count - 1}")
        chunks: dict[int, bytes] = {}
        index, end = first, first + count
        while index < end:
            if table.is_zero(index):
                chunks[index] = bytes(table.length(index))
                index += 1
                continue
            start = index
            while index < end and not table.is_zero(index):
                index += 1
            chunks.update(enumerate(self._fetch(blob, table, start, index), start))
        return [chunks[number] for number in range(first, end)]

    def _fetch(self, blob: Blob, table: ChunkTable, start: int, end: int) -> list[bytes]:
        """Verified. The blob may have been packed since it was found: what is wrong is looked for once more."""
        for again in (False, True):
            wrong: int | None = start
            try:
                chunks = self._repository.blobs.chunks(blob, start, end)
                wrong = next((n for n, data in enumerate(chunks, start) if not table.matches(n, data)), None)
            except (NotFound, CorruptData):
                if again:
                    raise
            if wrong is None:
                return chunks
            self._repository.blobs.forget(blob.digest)
        raise CorruptData(
            f"chunk {wrong} of blob {blob.digest} is damaged in the repository",
            fix="restore the blob from a copy, or build the snapshot again",
        )
