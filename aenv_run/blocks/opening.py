"""Blobs of repositories, opened to be read by range."""

from __future__ import annotations

import hashlib
import secrets
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from aenv_run.blocks.exports import Export
from aenv_run.cache import BlobCache
from aenv_run.chunk_table import ChunkTable
from aenv_run.chunks import ChunkReader
from aenv_run.config import open_repository
from aenv_run.errors import AenvError, CorruptData
from aenv_run.paths import Home
from aenv_run.repository import Repository
from aenv_run.snapshot import Blob
from aenv_run.store.protocol import StoreKey


@dataclass(frozen=True)
class BlobChunks:
    """The chunks of one blob."""

    reader: ChunkReader
    blob: Blob
    table: ChunkTable

    def read(self, first: int, count: int) -> list[bytes]:
        """``count`` neighbouring chunks from ``first``, each verified."""
        return self.reader.read(self.blob, self.table, first, count)


@dataclass
class Repositories:
    """Those that exports name; each is opened once. Blocking, for several threads."""

    home: Home
    _open: dict[str, Repository] = field(default_factory=dict)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def opened(self, export: Export, kept_table: Path) -> tuple[ChunkTable, BlobChunks]:
        """The blob's table, verified, from ``kept_table`` if it is there, and its chunks."""
        reader = ChunkReader(self._repository(export))
        table = _kept(export, kept_table)
        if table is None:
            table = reader.table(export.blob)
            if table is None:
                raise CorruptData(f"blob {export.blob.digest} has no chunk table")
            _keep(table, kept_table)
        return table, BlobChunks(reader, export.blob, table)

    def meet(self, name: str) -> None:
        """Load what its store needs and make a connection; whatever fails is told to those who need it."""
        with suppress(AenvError):
            self._named(name).store.stat(StoreKey("refs"))

    def take_in(self, export: Export, path: Path) -> None:
        """Make a whole file a blob of the cache; ``CorruptData`` if it is not that blob."""
        BlobCache(self.home.cache, self._repository(export)).take_in(export.blob, path)

    def _repository(self, export: Export) -> Repository:
        return self._named(export.repository)

    def _named(self, name: str) -> Repository:
        with self._guard:
            if name not in self._open:
                self._open[name] = open_repository(name, self.home)
            return self._open[name]


def _kept(export: Export, path: Path) -> ChunkTable | None:
    blob = export.blob
    assert blob.table is not None
    try:
        with path.open("rb") as file:
            data = file.read(blob.table.size_bytes + 1)
    except OSError:
        return None
    if hashlib.sha256(data).hexdigest() != blob.table.digest.hex:
        return None
    with suppress(AenvError):
        return ChunkTable.parse(data, blob.size_bytes, str(path))
    return None


def _keep(table: ChunkTable, path: Path) -> None:
    """One that cannot be kept is fetched again."""
    temporary = path.with_name(f".{secrets.token_hex(8)}")
    with suppress(OSError):
        try:
            temporary.write_bytes(table.encoded())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
