"""The catalog: what people call snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

from aenv_run.actor import actor
from aenv_run.catalog.entries import Entries, Entry
from aenv_run.catalog.labels import Labels, labels_key
from aenv_run.catalog.records import Built, Move, Version, VersionRecord, checked, now, version_key
from aenv_run.catalog.reference import Reference, require_publishable
from aenv_run.catalog.tags import Tags
from aenv_run.catalog.versions import Versions
from aenv_run.errors import AenvError, Conflict, CorruptData, Unsupported
from aenv_run.garbage.refer import refer
from aenv_run.repository import Repository
from aenv_run.snapshot import Snapshot
from aenv_run.store.reserve import freeing
from aenv_run.types import Model, Name, SnapshotId, Tag

MAX_LINEAGE = 10_000
DEFAULT_TAG = Tag("latest")


class Resolved(Model):
    """What a reference means now."""

    snapshot_id: SnapshotId
    name: Name | None = None
    version: Version | None = None


class Catalog:
    """Blocking and thread-safe, as the repository is. ``by`` is who changes it, for the history.

    ``remember`` is for who looks at ``entries`` again and again: see there.
    """

    def __init__(self, repository: Repository, *, by: str | None = None, remember: bool = False) -> None:
        self.repository = repository
        self.by = actor() if by is None else by
        self._store = repository.store
        #: What each version is, and was.
        self.version_log = Versions(repository)
        #: Where each tag is, and was.
        self.tag_log = Tags(repository, self.version_log, self.by)
        #: What people note about versions.
        self.labels = Labels(repository)
        #: The rows.
        self.all = Entries(repository, self.version_log, self.tag_log, self.labels, remember=remember)

    def publish(
        self, name: Name, snapshot_id: SnapshotId, tags: Iterable[Tag] = (), *, built: Built | None = None
    ) -> Version:
        """Give the snapshot the next version of ``name`` and move ``tags`` to it; the ref that makes it seen.

        If the highest version is that snapshot already, it is that version again, so a repeat changes nothing;
        only where more was verified than then it is a new one. ``built`` is the builder's note of how.
        Of two publishers at once the higher version keeps the tags, whoever is slower.
        """
        require_publishable(name)
        record = VersionRecord(snapshot_id=snapshot_id, created_at=now(), by=self.by, built=built)
        version = refer(
            self.repository,
            snapshot_id,
            lambda: self.version_log.claim(name, record),
            undo=lambda version: self.remove(name, version),
        )
        for tag in tags:
            self.tag_log.move(name, tag, version, "publish")
        return version

    def resolve(self, reference: str) -> Resolved:
        """Which snapshot it is; ``NotFound`` says what exists. A name alone is its ``latest``, or the highest."""
        wanted = Reference.parse(reference)
        if wanted.id_prefix is not None:
            return Resolved(snapshot_id=self.repository.find(wanted.id_prefix))
        assert wanted.name is not None
        live = self.version_log.live(wanted.name)
        if not live:
            raise self.version_log.unknown(wanted.name)
        if wanted.version is not None:
            version = wanted.version
        else:
            tagged = self.tag_log.read(wanted.name, wanted.tag or DEFAULT_TAG)
            if tagged not in live:
                tagged = None  # its version was removed: as good as no tag
            if tagged is None and wanted.tag is not None:
                raise self.tag_log.unknown_part(wanted.name, reference, live)
            version = tagged if tagged is not None else live[-1]
        record = self.version_log.read(wanted.name, version) if version in live else None
        if record is None:
            raise self.tag_log.unknown_part(wanted.name, reference, live)
        return Resolved(snapshot_id=record.snapshot_id, name=wanted.name, version=version)

    # Tags

    def tag(self, name: Name, tag: Tag, version: Version) -> None:
        """Move ``tag`` to ``version``, which must exist."""
        self.tag_log.move(name, tag, checked(version), "tag")

    def untag(self, name: Name, tag: Tag) -> None:
        """Remove the tag; the version stays."""
        if tag not in self.tag_log.of(name):
            raise self.missing(name, f"{name}:{tag}")
        self.tag_log.drop(name, tag, "untag", None)

    def promote(self, name: Name, tag: Tag, version: Version, *, verified: bool = False) -> bool:
        """Move ``tag`` forward to ``version``; whether it was elsewhere. ``Conflict`` when that is backwards.

        With ``verified`` also when no verify step of its recipe held as it was built.
        """
        record = self.version_log.read(name, checked(version)) if verified else None
        if record is not None and not record.verified:
            raise Conflict(
                f"{name}:{version} was not verified when it was built, so {name}:{tag} was not moved",
                fix="give its recipe a step with 'verify' and build it again, which makes a new version",
            )
        return self.tag_log.move(name, tag, checked(version), "promote")

    def rollback(self, name: Name, tag: Tag, version: Version | None = None) -> Move:
        """Move ``tag`` back to where it was before, or to ``version``; ``Conflict`` when there is no such place.

        A second one goes further back. Versions that were removed meanwhile are passed over.
        """
        return self.tag_log.rollback(name, tag, None if version is None else checked(version))

    def remove(self, name: Name, version: Version | None = None) -> tuple[Version, ...]:
        """Take back one version, or all, with the tags that point there; returns them. Blobs stay until gc."""
        with freeing(self._store):
            return self._remove(name, version)

    def _remove(self, name: Name, version: Version | None) -> tuple[Version, ...]:
        live = self.version_log.live(name)
        if not live:
            raise self.version_log.unknown(name)
        if version is not None and version not in live:
            raise self.tag_log.unknown_part(name, f"{name}:{version}", live)
        going = live if version is None else (version,)
        for gone in going:
            self.version_log.bury(name, gone, self.by)
        by_version, damaged = self.tag_log.by_version(name)
        for gone in going:
            for tag in by_version.get(gone, ()):
                self.tag_log.drop(name, tag, "remove", going)
        for bad in damaged if version is None else ():
            with suppress(Unsupported):  # without a version it counts as no tag
                self.tag_log.drop(name, bad.tag, "remove", going)
        for gone in going:
            self._store.delete(labels_key(name, gone))
            self._store.delete(version_key(name, gone))
        return going

    def label(
        self, name: Name, version: Version, new: Mapping[str, str], without: Iterable[str] = ()
    ) -> dict[str, str]:
        """Set and remove labels of a version; all that it has of its own then. The snapshot's are for ever."""
        if version not in self.version_log.live(name):
            raise self.missing(name, f"{name}:{version}")
        return self.labels.change(name, version, new, without)

    # Reading

    def names(self) -> tuple[Name, ...]:
        """Every name that has a version, sorted."""
        return self.version_log.names()

    def versions(self, name: Name) -> tuple[Version, ...]:
        """The versions of ``name``, lowest first."""
        return self.version_log.live(name)

    def tags(self, name: Name) -> tuple[Tag, ...]:
        """The tags of ``name``, sorted, also those whose version was removed."""
        return self.tag_log.of(name)

    def entries(self, name: Name | None = None) -> list[Entry]:
        """Every version of every name (or of one), by name and version."""
        found = self.all.read(name)
        if name is not None and not found:
            raise self.version_log.unknown(name)
        return found

    def missing(self, name: Name, reference: str) -> AenvError:
        """``NotFound`` for what does not exist, with what does."""
        live = self.version_log.live(name)
        return self.tag_log.unknown_part(name, reference, live) if live else self.version_log.unknown(name)

    def lineage(self, id: SnapshotId) -> list[Snapshot]:
        """The snapshot, its parent, and so on to the root."""
        chain = [self.repository.snapshot(id)]
        while (parent := chain[-1].parent) is not None:
            if len(chain) >= MAX_LINEAGE:
                raise CorruptData(f"snapshot {id} has more than {MAX_LINEAGE} ancestors")
            chain.append(self.repository.ancestor(parent))
        return chain
