"""Layers of disks as engines open them: a file where there is one, and otherwise served, held by a link.

Blocking: call from a thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from aenv_run.blocks.exports import SERVED, Export, Exports, Trouble, read_export
from aenv_run.blocks.starting import BlockServerProcess
from aenv_run.cache import BlobCache
from aenv_run.errors import AenvError, StoreUnavailable
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

    def watch(self, blobs: Iterable[Blob]) -> Watch:
        """From here on: could machines that read these layers read all of them? Take it before they are opened."""
        names = [Export(blob=blob, repository=self.repository).name for blob in blobs if blob.table is not None]
        exports = Exports(self.home.cache)
        return Watch(exports, {name: exports.unread(name) for name in names})


@dataclass(frozen=True)
class Watch:
    """Whether engines of this home were told I/O errors of layers. Such an error is gone when its store answers
    again, but what a guest made of it is not, and a guest may go on as if nothing was."""

    exports: Exports
    before: Mapping[str, bytes]

    def unread(self, what: str) -> AenvError | None:
        """Why ``what`` must not be kept; None: everything that was wanted could be read."""
        for name, before in self.before.items():
            if (now := self.exports.unread(name)) in (b"", before):
                continue
            why: AenvError = StoreUnavailable("see blocks.log")
            with suppress(ValueError):
                why = Trouble.model_validate_json(now).error()
            return type(why)(
                f"{what} is not kept, since its disk could not be read: {why.message}", fix=why.fix or "try again"
            )
        return None
