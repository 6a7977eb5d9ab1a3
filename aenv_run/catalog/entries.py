"""Rows of the catalog: each version with what is known of it.

Listings say which versions, tags and labels there are. What a version is never changes, nor does its snapshot:
both can be remembered, so that a server with thousands of them asks a far store for little each time.
"""

from __future__ import annotations

from pydantic import Field

from aenv_run.catalog.labels import Labels
from aenv_run.catalog.records import Built, Version
from aenv_run.catalog.tags import Tags
from aenv_run.catalog.versions import Versions
from aenv_run.errors import CorruptData, NotFound, Unsupported
from aenv_run.repository import Repository
from aenv_run.types import MachineSpec, Model, Name, SnapshotId, Tag

#: Rows that are remembered, about 1 KB each; beyond, all are forgotten.
MAX_KNOWN = 20_000


class Entry(Model):
    """One row of the catalog. ``problem`` says why the snapshot could not be read, then sizes are 0.

    Of a damaged version ref ``snapshot_id`` is None; a damaged tag ref is a row of its own, without a version.
    """

    name: Name
    version: Version | None
    tags: tuple[Tag, ...] = ()
    snapshot_id: SnapshotId | None
    created_at: str = ""
    size_bytes: int = 0
    has_memory: bool = False
    machine: MachineSpec | None = Field(None, description="what its machines have; null where it cannot be read")
    labels: dict[str, str] = Field(
        default_factory=dict, description="of the snapshot, and above them the version's"
    )
    recipe_name: str | None = None
    by: str = ""
    built: Built | None = None
    problem: str | None = None

    @property
    def reference(self) -> str:
        """How people write it."""
        return f"{self.name}:{self.tags[0] if self.version is None else self.version}"


class Entries:
    """Blocking and thread-safe. With ``remember`` damage that comes after the first look is not seen."""

    def __init__(
        self, repository: Repository, versions: Versions, tags: Tags, labels: Labels, *, remember: bool
    ) -> None:
        self._repository, self._remember = repository, remember
        self._versions, self._tags, self._labels = versions, tags, labels
        self._known: dict[tuple[Name, Version], Entry] = {}

    def read(self, name: Name | None = None) -> list[Entry]:
        """Every version of every name (or of one), by name and version."""
        live = self._versions.by_name(name)
        tagged, labelled = self._tags.by_name(name), self._labels.keys(name)
        entries: list[Entry] = []
        for row_name, versions in live.items():
            tags, damaged = self._tags.by_version(row_name, tagged.get(row_name, []))
            entries += [
                Entry(name=row_name, version=None, tags=(bad.tag,), snapshot_id=None, problem=bad.problem)
                for bad in damaged
            ]
            for version in versions:
                entry = self._fixed(row_name, version)
                if entry is None:
                    continue  # removed meanwhile
                changes: dict[str, object] = {"tags": tuple(tags.get(version, ()))}
                if entry.snapshot_id is not None and (row_name, version) in labelled:
                    changes |= self._labelled(entry, row_name, version)
                entries.append(entry.model_copy(update=changes))
        return entries

    def fixed(self) -> list[Entry]:
        """As ``read``, without what may change: tags, and labels of versions. When remembered, two listings."""
        live = self._versions.by_name()
        found = [self._fixed(name, version) for name, versions in live.items() for version in versions]
        return [entry for entry in found if entry is not None]

    def is_live(self, id: SnapshotId) -> bool:
        """Whether some version is that snapshot."""
        for (name, version), entry in list(self._known.items()):
            if entry.snapshot_id == id and version in self._versions.live(name):
                return True
        return any(entry.snapshot_id == id for entry in self.fixed())

    def _labelled(self, entry: Entry, name: Name, version: Version) -> dict[str, object]:
        own, problem = self._labels.shown(name, version)
        return {"labels": {**entry.labels, **own}, "problem": entry.problem or problem}

    def _fixed(self, name: Name, version: Version) -> Entry | None:
        """What cannot change of a version; None where there is none."""
        if (known := self._known.get((name, version))) is not None:
            return known
        try:
            record = self._versions.read(name, version)
        except (CorruptData, Unsupported) as error:
            return Entry(name=name, version=version, snapshot_id=None, problem=error.message)
        if record is None:
            return None
        row = Entry(
            name=name, version=version, snapshot_id=record.snapshot_id, created_at=record.created_at,
            by=record.by, built=record.built,
        )  # fmt: skip
        try:
            snapshot = self._repository.snapshot(record.snapshot_id)
        except (NotFound, CorruptData, Unsupported) as error:
            return row.model_copy(update={"problem": error.message})
        facts = {
            "size_bytes": sum({blob.digest: blob.size_bytes for blob in snapshot.blobs()}.values()),
            "has_memory": snapshot.memory is not None,
            "machine": snapshot.machine,
            "labels": snapshot.labels,
            "recipe_name": snapshot.provenance.recipe_name,
        }
        entry = row.model_copy(update=facts)
        if self._remember:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[name, version] = entry
        return entry
