"""Versions of names: numbers that are given out once, each one snapshot for ever."""

from __future__ import annotations

import difflib

from aenv_run.catalog.records import (
    RACE_TRIES,
    RemovedRecord,
    Version,
    VersionRecord,
    checked,
    named,
    now,
    removed_key,
    version_key,
)
from aenv_run.digest import canonical_json
from aenv_run.errors import AenvError, Conflict, CorruptData, InvalidInput, NotFound, Unsupported
from aenv_run.repository import MAX_RECORD_BYTES, Repository
from aenv_run.types import Name

#: What begins the name of a snapshot that was given none: only what has a name is kept by a collection.
UNNAMED = "unnamed-snapshot-"


class Versions:
    """Blocking and thread-safe, as the repository is."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._store = repository.store

    def live(self, name: Name) -> tuple[Version, ...]:
        """Those of ``name`` that were not removed, lowest first."""
        return self.by_name(name).get(name, ())

    def by_name(self, name: Name | None = None) -> dict[Name, tuple[Version, ...]]:
        """The live ones of every name that has any (or of one), sorted."""
        # Removals are read second: a removed version then is never taken for a live one.
        published = self._named("refs/names/", name)
        removed = set(self._named("refs/removed/", name))
        found: dict[Name, list[Version]] = {}
        for one, version in sorted(published):
            if (one, version) not in removed:
                found.setdefault(one, []).append(version)
        return {one: tuple(versions) for one, versions in found.items()}

    def removed(self, name: Name) -> list[Version]:
        """Those of ``name`` that were."""
        return [version for _, version in self._named("refs/removed/", name)]

    def names(self) -> tuple[Name, ...]:
        """Every name that has a version, sorted."""
        return tuple(self.by_name())

    def read(self, name: Name, version: Version) -> VersionRecord | None:
        """None when there is no such version."""
        return self._repository.read_ref(version_key(name, version), VersionRecord)

    def read_removed(self, name: Name, version: Version) -> RemovedRecord | None:
        """None when it was not removed."""
        return self._repository.read_ref(removed_key(name, version), RemovedRecord)

    def claim(self, name: Name, record: VersionRecord) -> Version:
        """Write it under the next number, unless the highest version says as much: then it is that one."""
        data = canonical_json(record)
        if len(data) > MAX_RECORD_BYTES // 2:  # its removal holds it too
            raise InvalidInput(
                f"the record of a version of {name} would have {len(data)} bytes, more than a half of "
                f"{MAX_RECORD_BYTES}",
                fix="shorten what is noted of how it was built",
            )
        for _ in range(RACE_TRIES):
            live, removed = self.live(name), self.removed(name)
            if live:
                try:
                    highest = self.read(name, live[-1])
                except CorruptData:
                    highest = None  # its number is taken all the same
                if highest is not None and _says_as_much(highest, record):
                    return live[-1]
            version = checked(max((0, *live, *removed)) + 1)
            # After the ref, look again for its removal: a slow publisher must not bring a number back.
            if self._store.put_new(version_key(name, version), data) and version in self.live(name):
                return version
        raise Conflict(f"too many others publish versions of {name} at the same time", fix="try again")

    def bury(self, name: Name, version: Version, by: str) -> None:
        """Write that it was removed: from then on it is not live."""
        try:
            record = self.read(name, version)
        except (CorruptData, Unsupported):
            record = None
        removed = RemovedRecord(removed_at=now(), by=by, version=record)
        self._store.put_new(removed_key(name, version), canonical_json(removed))

    def unknown(self, name: Name) -> AenvError:
        """``NotFound`` for a name without versions, with the nearest that have some."""
        every = self.names()
        names = [other for other in every if not other.startswith(UNNAMED)]
        if every and not names:
            return NotFound(f"no snapshot is named {name}; those that there are have no names")
        if not names:
            return NotFound(f"no snapshot is named {name}; the catalog is empty", fix="build one with aenv-build")
        near = difflib.get_close_matches(name, names, n=3)
        others = [other for other in names if other not in near]
        shown = [*near, *others][:10]
        more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
        fix = f"did you mean {near[0]}?" if near else ""
        return NotFound(f"no snapshot is named {name}; there are {', '.join(shown)}{more}", fix=fix)

    def _named(self, under: str, name: Name | None) -> list[tuple[Name, Version]]:
        found = (named(info.key, under) for info in self._store.list(under if name is None else f"{under}{name}/"))
        return [part for part in found if part is not None]


def _says_as_much(record: VersionRecord, new: VersionRecord) -> bool:
    """Whether it is the same snapshot, and no verify held now that had not been there then."""
    return record.snapshot_id == new.snapshot_id and new.verified <= record.verified
