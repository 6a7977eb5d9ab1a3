"""Tags: where each is now and how it came there. One swap of its record moves a tag and says so.

The record holds the last moves. When it would hold too many, the oldest become a page of their own, written
before the record lets go of them: a crash in between leaves them in both, never in neither. A tag that is
removed keeps its record, so that its moves are not lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from aenv_run.catalog.records import (
    FIRST_MOVE,
    PAGE_MOVES,
    RACE_TRIES,
    Act,
    Move,
    MovesPage,
    TagRecord,
    Version,
    moves_key,
    now,
    tag_key,
)
from aenv_run.catalog.versions import Versions
from aenv_run.digest import canonical_json
from aenv_run.errors import AenvError, Conflict, CorruptData, InvalidInput, NotFound, Unsupported
from aenv_run.repository import MAX_RECORD_BYTES, Repository
from aenv_run.store import StoreKey
from aenv_run.types import Name, Tag


@dataclass(frozen=True)
class Damaged:
    """A tag whose record cannot be read, and why."""

    tag: Tag
    problem: str


class Tags:
    """Blocking and thread-safe, as the repository is. ``by`` is written into every move."""

    def __init__(self, repository: Repository, versions: Versions, by: str) -> None:
        self._repository = repository
        self._store = repository.store
        self._versions = versions
        self._by = by

    def of(self, name: Name) -> tuple[Tag, ...]:
        """Sorted; also those whose version was removed or whose record is damaged, not those that were removed."""
        by_version, damaged = self.by_version(name)
        return tuple(sorted([*(tag for some in by_version.values() for tag in some), *(d.tag for d in damaged)]))

    def known(self, name: Name) -> list[Tag]:
        """As ``of``, and also those that were removed: they have moves."""
        return self.by_name(name).get(name, [])

    def by_name(self, name: Name | None = None) -> dict[Name, list[Tag]]:
        """The known ones of every name that has any (or of one), sorted."""
        under = "refs/tags/" if name is None else f"refs/tags/{name}/"
        found: dict[Name, list[Tag]] = {}
        for one, tag in sorted(pair for info in self._store.list(under) if (pair := _tag_of(info.key))):
            found.setdefault(one, []).append(tag)
        return found

    def by_version(
        self, name: Name, known: list[Tag] | None = None
    ) -> tuple[dict[Version, list[Tag]], list[Damaged]]:
        """The tags of each version, and those that cannot be read. ``known``: as ``by_name`` has them."""
        by_version: dict[Version, list[Tag]] = {}
        damaged = []
        for tag in self.known(name) if known is None else known:
            try:
                version = self.read(name, tag)
            except (CorruptData, Unsupported) as error:
                damaged.append(Damaged(tag, error.message))
                continue
            if version is not None:
                by_version.setdefault(version, []).append(tag)
        return by_version, damaged

    def read(self, name: Name, tag: Tag) -> Version | None:
        """Where it is now; None when there is no such tag."""
        record = self._repository.read_ref(tag_key(name, tag), TagRecord)
        return record.version if record else None

    def moves(self, name: Name, tag: Tag) -> Iterator[Move]:
        """Newest first. Pages are read as they are asked for."""
        record = self._record(name, tag)
        yield from reversed(record.moves)
        yield from self._paged(name, tag, record.moves[0].number if record.moves else None)

    def _paged(self, name: Name, tag: Tag, below: int | None) -> Iterator[Move]:
        """Those of the pages, newest first, from under number ``below``."""
        prefix = f"refs/moves/{name}/{tag}/"
        found = (info.key.removeprefix(prefix) for info in self._store.list(prefix))
        for first in sorted((int(part) for part in found if FIRST_MOVE.fullmatch(part)), reverse=True):
            page = self._repository.read_ref(moves_key(name, tag, first), MovesPage)
            for move in reversed(page.moves if page else ()):
                if below is None or move.number < below:
                    yield move
                    below = move.number

    # Moving

    def move(self, name: Name, tag: Tag, version: Version, act: Act) -> bool:
        """To ``version``, which must exist; whether it was elsewhere. A publisher never moves a tag backwards."""

        def decide(record: TagRecord) -> Version | None:
            live = self._versions.live(name)
            if version not in live:
                raise self._missing(name, f"{name}:{version}", live)
            if act in ("publish", "promote") and record.version in live and (record.version or 0) > version:
                if act == "publish":
                    return record.version
                raise Conflict(
                    f"{name}:{tag} is at version {record.version}, after {version}: that would be no promotion",
                    fix=f"to go back: aenv catalog rollback {name} {tag} --to {version}",
                )
            return version

        return self._change(name, tag, act, decide) is not None

    def rollback(self, name: Name, tag: Tag, version: Version | None) -> Move:
        """Back to where it was before, or to ``version``; the move that was made."""

        def decide(record: TagRecord) -> Version | None:
            live = self._versions.live(name)
            if record.version is None or record.version not in live:
                raise self._missing(name, f"{name}:{tag}", live)
            wanted = version if version is not None else _before(record.moves, record.version, live)
            if wanted is None:
                raise Conflict(
                    f"{name}:{tag} has been at no other version that still exists",
                    fix=f"say which: aenv catalog rollback {name} {tag} --to VERSION",
                )
            if wanted not in live:
                raise self.unknown_part(name, f"{name}:{wanted}", live)
            return wanted

        move = self._change(name, tag, "rollback", decide)
        if move is None:
            raise Conflict(
                f"{name}:{tag} is at version {version} already", fix=f"aenv catalog history {name}:{tag}"
            )
        return move

    def drop(self, name: Name, tag: Tag, act: Act, going: tuple[Version, ...] | None) -> bool:
        """Remove it: always, or if it is at one of ``going`` (or cannot be read); whether it was there."""

        def decide(record: TagRecord) -> Version | None:
            return None if going is None or record.version in going else record.version

        return self._change(name, tag, act, decide) is not None

    def _change(
        self, name: Name, tag: Tag, act: Act, decide: Callable[[TagRecord], Version | None]
    ) -> Move | None:
        """Swap its record for one with another move; None, and nothing written, where it already is."""
        key = tag_key(name, tag)
        for _ in range(RACE_TRIES):
            data = self._read_bytes(key)
            record, damaged = self._record_or_new(name, tag)
            to = decide(record)
            if to == record.version and not damaged:
                return None
            last = record.moves[-1] if record.moves else next(self._paged(name, tag, None), None)
            move = Move(
                number=last.number + 1 if last else 1,
                act=act,
                at=max(now(), last.at) if last else now(),
                by=self._by,
                from_version=record.version,
                to_version=to,
            )
            kept = record.moves
            if len(kept) >= 2 * PAGE_MOVES - 1:
                page = MovesPage(moves=kept[:PAGE_MOVES])
                self._store.put_new(moves_key(name, tag, kept[0].number), canonical_json(page))
                kept = kept[PAGE_MOVES:]
            new = canonical_json(TagRecord(version=to, moves=(*kept, move)))
            if self._store.swap(key, new, expected=data):
                return move
        raise Conflict(f"the tag {name}:{tag} is being moved by others all the time", fix="try again")

    def _record_or_new(self, name: Name, tag: Tag) -> tuple[TagRecord, bool]:
        """A damaged record counts as none, and may be replaced; its older moves are still there."""
        try:
            return self._record(name, tag), False
        except CorruptData:
            return TagRecord(version=None), True

    def _record(self, name: Name, tag: Tag) -> TagRecord:
        return self._repository.read_ref(tag_key(name, tag), TagRecord) or TagRecord(version=None)

    def _read_bytes(self, key: StoreKey) -> bytes | None:
        try:
            return self._store.read(key, limit_bytes=MAX_RECORD_BYTES)
        except NotFound:
            return None

    def _missing(self, name: Name, reference: str, live: tuple[Version, ...]) -> AenvError:
        return self.unknown_part(name, reference, live) if live else self._versions.unknown(name)

    def unknown_part(self, name: Name, reference: str, live: tuple[Version, ...]) -> AenvError:
        """``NotFound`` for a version or a tag that ``name`` does not have, with those that it has."""
        tags = [f"{tag} -> {version}" for version, some in self.by_version(name)[0].items() for tag in some]
        versions = ", ".join(str(version) for version in live[-10:])
        first = f" (the last of {len(live)})" if len(live) > 10 else ""
        return NotFound(
            f"{reference} does not exist; {name} has the versions {versions}{first} "
            f"and {'the tags ' + ', '.join(tags[:10]) if tags else 'no tags'}"
        )


def _before(moves: tuple[Move, ...], present: Version, live: tuple[Version, ...]) -> Version | None:
    """Where it was before it came to ``present``: a rollback takes back what it went over."""
    been: list[Version] = []
    for move in moves:
        if not been and move.from_version is not None:
            been.append(move.from_version)
        if move.to_version is None:
            continue
        if move.act == "rollback" and move.to_version in been:
            del been[len(been) - been[::-1].index(move.to_version) :]
        else:
            been.append(move.to_version)
    return next((version for version in reversed(been) if version != present and version in live), None)


def _tag_of(key: StoreKey) -> tuple[Name, Tag] | None:
    """Name and tag of a key; None for a key of another form (check reports it)."""
    name, _, tag = key.removeprefix("refs/tags/").partition("/")
    try:
        return Name(name), Tag(tag)
    except InvalidInput:
        return None
