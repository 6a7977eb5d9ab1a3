"""Names of snapshots: immutable versions, tags that move, lineage.

``refs/names/<name>/<version>`` says which snapshot a version is and never changes. ``refs/tags/<name>/<tag>``
says which version a tag is now. ``refs/removed/<name>/<version>`` takes a version back for ever: writing it is
the one act of a removal, the rest is tidying, and the number is not given out again.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from pydantic import Field

from aenv_run.digest import canonical_json
from aenv_run.errors import AenvError, Conflict, CorruptData, InvalidInput, NotFound, Unsupported
from aenv_run.repository import MAX_RECORD_BYTES, Repository
from aenv_run.snapshot import Snapshot
from aenv_run.store import StoreKey
from aenv_run.types import Model, Name, SnapshotId, Tag

MAX_VERSION = 10**9 - 1
#: How often a publisher or a tagger that lost a race tries again before it gives up.
RACE_TRIES = 100
MAX_LINEAGE = 10_000
DEFAULT_TAG = Tag("latest")

Version = int


class VersionRecord(Model):
    """Content of ``refs/names/<name>/<version>``."""

    format: Literal["aenv.version/1"] = "aenv.version/1"
    snapshot_id: SnapshotId
    created_at: str = Field(description="RFC 3339, UTC, seconds")


class TagRecord(Model):
    """Content of ``refs/tags/<name>/<tag>``."""

    format: Literal["aenv.tag/1"] = "aenv.tag/1"
    version: int = Field(ge=1, le=MAX_VERSION)


class RemovedRecord(Model):
    """Content of ``refs/removed/<name>/<version>``."""

    format: Literal["aenv.removed/1"] = "aenv.removed/1"
    removed_at: str = Field(description="RFC 3339, UTC, seconds")


class Resolved(Model):
    """What a reference means now."""

    snapshot_id: SnapshotId
    name: Name | None = None
    version: Version | None = None


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
    problem: str | None = None

    @property
    def reference(self) -> str:
        """How people write it."""
        return f"{self.name}:{self.tags[0] if self.version is None else self.version}"


@dataclass(frozen=True)
class Reference:
    """How people write a snapshot: ``swe-task``, ``swe-task:3``, ``swe-task:latest``, an id or its start.

    Hex digits alone, 12 or more, are always an id: no name may look so.
    """

    id_prefix: str | None = None
    name: Name | None = None
    version: Version | None = None
    tag: Tag | None = None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """``InvalidInput`` says what is allowed."""
        if _looks_like_id(text):
            return cls(id_prefix=text)
        name, colon, rest = text.partition(":")
        try:
            if not colon:
                return cls(name=Name(name))
            if rest.isascii() and rest.isdigit():
                return cls(name=Name(name), version=_version(int(rest[:20])))
            return cls(name=Name(name), tag=Tag(rest))
        except InvalidInput as error:
            raise InvalidInput(
                f"{text[:120]!r} names no snapshot: {error.message}",
                fix="write NAME, NAME:VERSION, NAME:TAG, or the first 12 or more digits of a snapshot id",
            ) from None


class Catalog:
    """Blocking and thread-safe, as the repository is."""

    def __init__(self, repository: Repository) -> None:
        self.repository = repository
        self._store = repository.store

    def publish(self, name: Name, snapshot_id: SnapshotId, tags: Iterable[Tag] = ()) -> Version:
        """Give the snapshot the next version of ``name`` and move ``tags`` to it; the ref that makes it seen.

        If the highest version is that snapshot already, it is that version again, so a repeat changes nothing.
        Of two publishers at once the higher version keeps the tags, whoever is slower.
        """
        require_publishable(name)
        self.repository.snapshot(snapshot_id)
        version = self._claim(name, snapshot_id)
        for tag in tags:
            self._move_tag(name, tag, version, forward_only=True)
        return version

    def resolve(self, reference: str) -> Resolved:
        """Which snapshot it is; ``NotFound`` says what exists. A name alone is its ``latest``, or the highest."""
        wanted = Reference.parse(reference)
        if wanted.id_prefix is not None:
            return Resolved(snapshot_id=self.repository.find(wanted.id_prefix))
        assert wanted.name is not None
        live = self._live(wanted.name)
        if not live:
            raise self._unknown_name(wanted.name)
        if wanted.version is not None:
            version = wanted.version
        else:
            tagged = self._read_tag(wanted.name, wanted.tag or DEFAULT_TAG)
            if tagged not in live:
                tagged = None  # its version was removed: as good as no tag
            if tagged is None and wanted.tag is not None:
                raise self._unknown_part(wanted.name, reference, live)
            version = tagged if tagged is not None else live[-1]
        record = self._read_version(wanted.name, version) if version in live else None
        if record is None:
            raise self._unknown_part(wanted.name, reference, live)
        return Resolved(snapshot_id=record.snapshot_id, name=wanted.name, version=version)

    def tag(self, name: Name, tag: Tag, version: Version) -> None:
        """Move ``tag`` to ``version``, which must exist."""
        self._move_tag(name, tag, _version(version), forward_only=False)

    def untag(self, name: Name, tag: Tag) -> None:
        """Remove the tag; the version stays."""
        if self._read_bytes(tag_key(name, tag)) is None:
            live = self._live(name)
            raise self._unknown_part(name, f"{name}:{tag}", live) if live else self._unknown_name(name)
        self._store.delete(tag_key(name, tag))

    def remove(self, name: Name, version: Version | None = None) -> tuple[Version, ...]:
        """Take back one version, or all, with the tags that point there; returns them. Blobs stay until gc."""
        live = self._live(name)
        if not live:
            raise self._unknown_name(name)
        if version is not None and version not in live:
            raise self._unknown_part(name, f"{name}:{version}", live)
        going = live if version is None else (version,)
        for gone in going:
            record = RemovedRecord(removed_at=now())
            self._store.put_new(removed_key(name, gone), canonical_json(record))
        for tag in self.tags(name):
            tagged = self._tagged(name, tag)
            if tagged in going or (tagged is None and version is None):
                self._store.delete(tag_key(name, tag))
        for gone in going:
            self._store.delete(version_key(name, gone))
        return going

    def names(self) -> tuple[Name, ...]:
        """Every name that has a version, sorted."""
        return tuple(sorted({name for name, _ in self._all_live()}))

    def versions(self, name: Name) -> tuple[Version, ...]:
        """The versions of ``name``, lowest first."""
        return self._live(name)

    def tags(self, name: Name) -> tuple[Tag, ...]:
        """The tags of ``name``, sorted, also those whose version was removed."""
        found = (_parts(info.key, "refs/tags/", Tag) for info in self._store.list(f"refs/tags/{name}/"))
        return tuple(sorted(part[1] for part in found if part is not None))

    def entries(self, name: Name | None = None) -> list[Entry]:
        """Every version of every name (or of one), by name and version."""
        rows = self._all_live() if name is None else [(name, version) for version in self._live(name)]
        tags: dict[Name, dict[Version, list[Tag]]] = {}
        entries: list[Entry] = []
        for row_name, version in rows:
            if row_name not in tags:
                tags[row_name], damaged = self._sorted_tags(row_name)
                entries += damaged
            entry = self._entry(row_name, version, tuple(tags[row_name].get(version, ())))
            if entry is not None:  # None: removed meanwhile
                entries.append(entry)
        if name is not None and not entries:
            raise self._unknown_name(name)
        return entries

    def lineage(self, id: SnapshotId) -> list[Snapshot]:
        """The snapshot, its parent, and so on to the root."""
        chain = [self.repository.snapshot(id)]
        while (parent := chain[-1].parent) is not None:
            if len(chain) >= MAX_LINEAGE:
                raise CorruptData(f"snapshot {id} has more than {MAX_LINEAGE} ancestors")
            chain.append(self.repository.snapshot(parent))
        return chain

    # Pieces

    def _claim(self, name: Name, snapshot_id: SnapshotId) -> Version:
        data = canonical_json(VersionRecord(snapshot_id=snapshot_id, created_at=now()))
        for _ in range(RACE_TRIES):
            live, removed = self._live(name), self._numbers("refs/removed/", name)
            if live:
                try:
                    highest = self._read_version(name, live[-1])
                except CorruptData:
                    highest = None  # its number is taken all the same
                if highest is not None and highest.snapshot_id == snapshot_id:
                    return live[-1]
            version = _version(max((0, *live, *removed)) + 1)
            # After the ref, look again for its removal: a slow publisher must not bring a number back.
            if self._store.put_new(version_key(name, version), data) and version in self._live(name):
                return version
        raise Conflict(f"too many others publish versions of {name} at the same time", fix="try again")

    def _move_tag(self, name: Name, tag: Tag, version: Version, *, forward_only: bool) -> None:
        key = tag_key(name, tag)
        data = canonical_json(TagRecord(version=version))
        for _ in range(RACE_TRIES):
            live = self._live(name)
            if version not in live:
                raise self._unknown_part(name, f"{name}:{version}", live) if live else self._unknown_name(name)
            present = self._read_bytes(key)
            if forward_only and present is not None:
                tagged = self._tagged(name, tag)
                if tagged is not None and tagged > version and tagged in live:
                    return
            if present == data or self._store.swap(key, data, expected=present):
                return
        raise Conflict(f"the tag {name}:{tag} is being moved by others all the time", fix="try again")

    def _entry(self, name: Name, version: Version, tags: tuple[Tag, ...]) -> Entry | None:
        try:
            record = self._read_version(name, version)
        except (CorruptData, Unsupported) as error:
            return Entry(name=name, version=version, tags=tags, snapshot_id=None, problem=error.message)
        if record is None:
            return None
        row = Entry(
            name=name, version=version, tags=tags, snapshot_id=record.snapshot_id, created_at=record.created_at
        )
        try:
            snapshot = self.repository.snapshot(record.snapshot_id)
        except (NotFound, CorruptData, Unsupported) as error:
            return row.model_copy(update={"problem": error.message})
        size = sum({blob.digest: blob.size_bytes for blob in snapshot.blobs()}.values())
        return row.model_copy(update={"size_bytes": size, "has_memory": snapshot.memory is not None})

    def _live(self, name: Name) -> tuple[Version, ...]:
        # Removals are read second: a removed version then is never taken for a live one.
        named = self._numbers("refs/names/", name)
        removed = set(self._numbers("refs/removed/", name))
        return tuple(sorted(version for version in named if version not in removed))

    def _all_live(self) -> list[tuple[Name, Version]]:
        names = {part[0] for info in self._store.list("refs/names/") if (part := _named(info.key, "refs/names/"))}
        return [(name, version) for name in sorted(names) for version in self._live(name)]

    def _numbers(self, under: str, name: Name) -> list[Version]:
        found = (_named(info.key, under) for info in self._store.list(f"{under}{name}/"))
        return [part[1] for part in found if part is not None]

    def _sorted_tags(self, name: Name) -> tuple[dict[Version, list[Tag]], list[Entry]]:
        """The tags by version, and a row for each that cannot be read."""
        by_version: dict[Version, list[Tag]] = {}
        damaged = []
        for tag in self.tags(name):
            try:
                version = self._read_tag(name, tag)
            except (CorruptData, Unsupported) as error:
                damaged.append(
                    Entry(name=name, version=None, tags=(tag,), snapshot_id=None, problem=error.message)
                )
                continue
            if version is not None:
                by_version.setdefault(version, []).append(tag)
        return by_version, damaged

    def _tagged(self, name: Name, tag: Tag) -> Version | None:
        """The tag's version; a damaged tag has none, and may be replaced or removed."""
        try:
            return self._read_tag(name, tag)
        except CorruptData:
            return None

    def _read_version(self, name: Name, version: Version) -> VersionRecord | None:
        return self.repository.read_ref(version_key(name, version), VersionRecord)

    def _read_tag(self, name: Name, tag: Tag) -> Version | None:
        record = self.repository.read_ref(tag_key(name, tag), TagRecord)
        return record.version if record else None

    def _read_bytes(self, key: StoreKey) -> bytes | None:
        try:
            return self._store.read(key, limit_bytes=MAX_RECORD_BYTES)
        except NotFound:
            return None

    def _unknown_name(self, name: Name) -> AenvError:
        names = self.names()
        if not names:
            return NotFound(f"no snapshot is named {name}; the catalog is empty", fix="build one with aenv-build")
        near = difflib.get_close_matches(name, names, n=3)
        others = [other for other in names if other not in near]
        shown = [*near, *others][:10]
        more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
        fix = f"did you mean {near[0]}?" if near else ""
        return NotFound(f"no snapshot is named {name}; there are {', '.join(shown)}{more}", fix=fix)

    def _unknown_part(self, name: Name, reference: str, live: tuple[Version, ...]) -> AenvError:
        tags = [f"{tag} -> {version}" for version, some in self._sorted_tags(name)[0].items() for tag in some]
        versions = ", ".join(str(version) for version in live[-10:])
        first = f" (the last of {len(live)})" if len(live) > 10 else ""
        return NotFound(
            f"{reference} does not exist; {name} has the versions {versions}{first} "
            f"and {'the tags ' + ', '.join(tags[:10]) if tags else 'no tags'}"
        )


def require_publishable(name: Name) -> None:
    """``InvalidInput`` for a name that would be read as an id; to be asked before the work for it is done."""
    if _looks_like_id(name):
        raise InvalidInput(f"{name!r} cannot be a name: it reads like a snapshot id", fix="add a letter g-z")


def version_key(name: Name, version: Version) -> StoreKey:
    """Where a version's ref is."""
    return StoreKey(f"refs/names/{name}/{_version(version)}")


def removed_key(name: Name, version: Version) -> StoreKey:
    """Where a version's removal is."""
    return StoreKey(f"refs/removed/{name}/{_version(version)}")


def tag_key(name: Name, tag: Tag) -> StoreKey:
    """Where a tag's ref is."""
    return StoreKey(f"refs/tags/{name}/{tag}")


def now() -> str:
    """The present time as records write it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _looks_like_id(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{12,64}", text) is not None


def _version(number: int) -> Version:
    if not 1 <= number <= MAX_VERSION:
        raise InvalidInput(f"{number} is no version: they count from 1 to {MAX_VERSION}")
    return number


def _named(key: StoreKey, under: str) -> tuple[Name, Version] | None:
    """Name and version of a key; None for a key of another form (check reports it)."""
    name, _, number = key.removeprefix(under).partition("/")
    if not re.fullmatch(r"[1-9][0-9]{0,8}", number):
        return None
    try:
        return Name(name), int(number)
    except InvalidInput:
        return None


def _parts(key: StoreKey, under: str, last: type[Tag]) -> tuple[Name, Tag] | None:
    name, _, rest = key.removeprefix(under).partition("/")
    try:
        return Name(name), last(rest)
    except InvalidInput:
        return None
