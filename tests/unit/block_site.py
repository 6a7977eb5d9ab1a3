"""What the tests of reading by range share: blobs of small chunks, and a source of them that counts and fails."""

from __future__ import annotations

import hashlib
import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from aenv_run.blocks.budget import Budget
from aenv_run.blocks.chunk_file import ChunkFile
from aenv_run.blocks.fetch import Fetcher, Supply
from aenv_run.blocks.served_blob import ServedBlob
from aenv_run.errors import AenvError, CorruptData

CHUNK = 4096


def content(chunks: float, seed: int = 1, zeros: tuple[int, ...] = ()) -> bytes:
    """Bytes that compress badly, but for whole chunks of zeros; the last chunk may be a part of one."""
    data = bytearray(random.Random(seed).randbytes(int(chunks * CHUNK)))
    for index in zeros:
        data[index * CHUNK : (index + 1) * CHUNK] = bytes(len(data[index * CHUNK : (index + 1) * CHUNK]))
    return bytes(data)


@dataclass(frozen=True)
class SmallTable:
    """A chunk table of small chunks."""

    data: bytes
    chunk_bytes: int = CHUNK

    @property
    def blob_bytes(self) -> int:
        return len(self.data)

    @property
    def count(self) -> int:
        return -(-len(self.data) // CHUNK)

    def chunk(self, index: int) -> bytes:
        return self.data[index * CHUNK : (index + 1) * CHUNK]

    def length(self, index: int) -> int:
        return len(self.chunk(index))

    def is_zero(self, index: int) -> bool:
        return not any(self.chunk(index))

    def matches(self, index: int, data: bytes) -> bool:
        return hashlib.sha256(data).digest() == hashlib.sha256(self.chunk(index)).digest()


@dataclass
class Shelf:
    """A verified source: it counts, can be held up, can be dead or have damaged chunks."""

    table: SmallTable
    reads: list[tuple[int, int]] = field(default_factory=list)
    damaged: set[int] = field(default_factory=set)
    fails: AenvError | None = None
    gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    def read(self, first: int, count: int) -> list[bytes]:
        self.reads.append((first, count))
        self.gate.wait()
        if self.fails is not None:
            raise self.fails
        if bad := self.damaged.intersection(range(first, first + count)):
            raise CorruptData(f"chunk {min(bad)} is damaged")
        return [self.table.chunk(index) for index in range(first, first + count)]

    def fetched(self) -> Counter[int]:
        """How often each chunk was read."""
        return Counter(index for first, count in self.reads for index in range(first, first + count))


@dataclass
class Served:
    """A served blob with all that belongs to it."""

    blob: ServedBlob
    shelf: Shelf
    fetcher: Fetcher
    budget: Budget
    told: list[AenvError | None]


def serve(path: Path, data: bytes, *, patience_s: float = 5.0) -> Served:
    """A blob of these bytes, of which nothing is here. Call it in a running loop."""
    table = SmallTable(data)
    shelf, fetcher, budget = Shelf(table), Fetcher(patience_s=patience_s), Budget()
    file = ChunkFile(path, table)
    budget.add_file(file)
    told: list[AenvError | None] = []
    blob = ServedBlob(
        file, [Supply(fetcher.supplier("shelf"), shelf)], fetcher, budget, told.append, lambda _: None
    )
    return Served(blob, shelf, fetcher, budget, told)
