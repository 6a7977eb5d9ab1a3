"""Layers of disks as engines open them: a file where there is one, and otherwise served, held by a link.

Blocking: call from a thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aenv_run.blocks.exports import SERVED, Export, Exports, read_export
from aenv_run.blocks.starting import BlockServerProcess
from aenv_run.cache import BlobCache
from aenv_run.errors import AenvError
from aenv_run.nbd import DiskLayer, ServedLayer
from aenv_run.paths import Home
from aenv_run.snapshot import Blob

FILE = ".qcow2"


@dataclass(frozen=True)
class Layers:
    """Of one repository, by its name (``config.repository_name``), for machines of one home."""

    home: Home
    cache: BlobCache
    repository: str
    server: BlockServerProcess
    on_demand: bool = True

    @classmethod
    def of(cls, home: Home, cache: BlobCache, repository: str, *, on_demand: bool) -> Layers:
        """With the home's block server, which is not started yet."""
        return cls(home, cache, repository, BlockServerProcess(home, repository), on_demand)

    def prepare(self) -> None:
        """Before the first launch: where layers will be served, the server is there and has met the store."""
        if self.on_demand and not self.cache.is_beside_files:
            self.server.hold()

    def is_far(self, blob: Blob) -> bool:
        """Whether the layer would be served: it can be read by range, and nothing here is all of it."""
        return self.on_demand and blob.table is not None and not self.cache.holds(blob)

    def open(self, blob: Blob, directory: Path, name: str, *, served: bool) -> DiskLayer:
        """The layer, valid for as long as what this puts into ``directory`` is there.

        ``served``: whether it need not be a file. ``CorruptData``, ``StoreUnavailable`` when it cannot be had.
        """
        if not (served and self.is_far(blob)):
            path = directory / f"{name}{FILE}"
            self.cache.link(blob, path)
            return path
        export = Export(blob=blob, repository=self.repository)
        Exports(self.home.cache).add(export, directory / f"{name}{SERVED}")
        self.server.hold()
        return ServedLayer(socket=self.home.block_socket, export=export.name, size_bytes=blob.size_bytes)

    def go_on(self, directory: Path) -> None:
        """A machine of a former process is taken over: its layers are served on."""
        if any(directory.glob(f"*{SERVED}")):
            self.server.hold()

    def troubles(self, directory: Path) -> list[AenvError]:
        """Why layers that are held there cannot be read now."""
        found = []
        for path in sorted(directory.glob(f"*{SERVED}")):
            export = read_export(path)
            if export is None:
                continue
            if (trouble := Exports(self.home.cache).trouble(export.name)) is not None:
                found.append(trouble.error())
        return found
