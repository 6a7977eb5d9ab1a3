"""What the catalog's refs hold, and where they are. docs/snapshot-format.md describes them."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Literal, Self

from pydantic import Field, model_validator

from aenv_run.errors import InvalidInput
from aenv_run.store import StoreKey
from aenv_run.text import Line, Moment, ShortLine
from aenv_run.types import Digest, Model, Name, SnapshotId, Tag

MAX_VERSION = 10**9 - 1
#: How often a publisher or a tagger that lost a race tries again before it gives up.
RACE_TRIES = 100
#: A tag's record holds its last moves, fewer than twice as many as a page, since every launch by a tag reads it;
#: the older ones are in pages. No record or page of any version of aenv holds more than ``MAX_MOVES``.
PAGE_MOVES, MAX_MOVES = 16, 256
MAX_ACTOR = 64
#: The last part of a page's key.
FIRST_MOVE = re.compile(r"[1-9][0-9]{0,8}")

Version = int
Act = Literal["publish", "tag", "promote", "rollback", "untag", "remove"]


class Built(Model):
    """How a version was built: a note of the builder about it, no part of the snapshot, whose id it leaves alone.

    So time, host and commit may differ between two builds whose result is the same snapshot.
    """

    recipe_digest: Digest | None = None
    source_commit: Line | None = Field(
        None, max_length=64, description="of the git checkout that the recipe is in"
    )
    source_dirty: bool | None = Field(None, description="whether that had changes; null when that is not known")
    base: Line = Field("", max_length=512, description="in a few words")
    base_digest: Digest | None = Field(None, description="of the image, the archive or the base's disk layer")
    builder: Line = Field("", max_length=128)
    driver: Line = Field("", max_length=128)
    host: ShortLine = ""
    at: Moment = Field("", description="RFC 3339, UTC, seconds")
    verified: tuple[ShortLine, ...] = Field((), max_length=512, description="steps of kind verify that held")


class VersionRecord(Model):
    """Content of ``refs/names/<name>/<version>``. Format 1 says neither by whom nor how."""

    format: Literal["aenv.version/1", "aenv.version/2"] = "aenv.version/2"
    snapshot_id: SnapshotId
    created_at: Moment = Field(description="RFC 3339, UTC, seconds")
    by: Line = Field("", max_length=MAX_ACTOR, description="who published it, as that one said")
    built: Built | None = None

    @property
    def verified(self) -> frozenset[str]:
        """The verify steps that held when it was built."""
        return frozenset(self.built.verified if self.built else ())


class Move(Model):
    """One move of a tag; a version is None where it was or is nowhere. ``number`` counts from 1."""

    number: int = Field(ge=1, le=MAX_VERSION)
    act: Act
    at: Moment = Field(description="RFC 3339, UTC, seconds; never before the move before")
    by: Line = Field("", max_length=MAX_ACTOR, description="who did it, as that one said")
    from_version: int | None = Field(ge=1, le=MAX_VERSION)
    to_version: int | None = Field(ge=1, le=MAX_VERSION)


class TagRecord(Model):
    """Content of ``refs/tags/<name>/<tag>``. Format 1 has no moves; in format 2 None is a tag that was removed."""

    format: Literal["aenv.tag/1", "aenv.tag/2"] = "aenv.tag/2"
    version: int | None = Field(ge=1, le=MAX_VERSION)
    moves: tuple[Move, ...] = Field((), max_length=MAX_MOVES, description="the last ones, oldest first")

    @model_validator(mode="after")
    def _of_its_format(self) -> Self:
        if self.format == "aenv.tag/1" and (self.version is None or self.moves):
            raise ValueError("a tag of format 1 has a version and no moves")
        if self.moves and self.moves[-1].to_version != self.version:
            raise ValueError("the last move led to another version than the tag is at")
        _require_consecutive(self.moves)
        return self


class MovesPage(Model):
    """Content of ``refs/moves/<name>/<tag>/<number of the first>``: older moves of a tag, never changed."""

    format: Literal["aenv.moves/1"] = "aenv.moves/1"
    moves: tuple[Move, ...] = Field(min_length=1, max_length=MAX_MOVES)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        _require_consecutive(self.moves)
        return self


class RemovedRecord(Model):
    """Content of ``refs/removed/<name>/<version>``. Format 2 also says what the version had been."""

    format: Literal["aenv.removed/1", "aenv.removed/2"] = "aenv.removed/2"
    removed_at: Moment = Field(description="RFC 3339, UTC, seconds")
    by: Line = Field("", max_length=MAX_ACTOR, description="who removed it, as that one said")
    version: VersionRecord | None = Field(None, description="what was removed; null where it was unreadable")


def version_key(name: Name, version: Version) -> StoreKey:
    """Where a version's ref is."""
    return StoreKey(f"refs/names/{name}/{checked(version)}")


def removed_key(name: Name, version: Version) -> StoreKey:
    """Where a version's removal is."""
    return StoreKey(f"refs/removed/{name}/{checked(version)}")


def tag_key(name: Name, tag: Tag) -> StoreKey:
    """Where a tag's ref is."""
    return StoreKey(f"refs/tags/{name}/{tag}")


def moves_key(name: Name, tag: Tag, first: int) -> StoreKey:
    """Where the page is that begins with move ``first``."""
    return StoreKey(f"refs/moves/{name}/{tag}/{first}")


def now() -> str:
    """The present time as records write it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def checked(number: int) -> Version:
    """The version; ``InvalidInput`` for a number that is none."""
    if not 1 <= number <= MAX_VERSION:
        raise InvalidInput(f"{number} is no version: they count from 1 to {MAX_VERSION}")
    return number


def named(key: StoreKey, under: str) -> tuple[Name, Version] | None:
    """Name and version of a key; None for a key of another form (check reports it)."""
    name, _, number = key.removeprefix(under).partition("/")
    if not re.fullmatch(r"[1-9][0-9]{0,8}", number):
        return None
    try:
        return Name(name), int(number)
    except InvalidInput:
        return None


def _require_consecutive(moves: tuple[Move, ...]) -> None:
    if any(move.number != moves[0].number + index for index, move in enumerate(moves)):
        raise ValueError("the moves are not in the order of their numbers")
