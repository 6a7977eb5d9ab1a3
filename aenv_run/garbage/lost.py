"""Holds that were lost: a lease that somebody removed, or that was damaged and put away by a repair.

What it held is needed, and nobody says so. Until its holder writes it again, or an administrator drops it by name,
nothing is collected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress

from aenv_run.errors import AenvError, CorruptData, NotFound
from aenv_run.garbage.leases import MARKS, MAX_LEASE_BYTES, NodeMark, holder_key, mark_key
from aenv_run.printable import printable
from aenv_run.repository import Repository, manifest_key
from aenv_run.store import StoreKey
from aenv_run.types import Model, SnapshotId

PUT_AWAY = re.compile(r"quarantine/[^/]+/leases/(?:holder|node)/([0-9a-f]{32})")
MARK = re.compile(r"leases/node/([0-9a-f]{32})")
#: Of a damaged lease no more snapshots are told.
MAX_TOLD = 20


class LostHold(Model):
    """A holder without a lease. ``snapshots``: what is left of it names these, of those that are there."""

    id: str
    who: str
    snapshots: tuple[SnapshotId, ...] = ()
    put_away: tuple[str, ...] = ()

    def __str__(self) -> str:
        how = f"was damaged, and lies in {self.put_away[0]}" if self.put_away else "was removed by somebody"
        held = f"; what is left names {', '.join(id.short for id in self.snapshots)}" if self.snapshots else ""
        return f"the lease of the holder {self.id[:8]} ({self.who}) {how}{held}"

    @property
    def fix(self) -> str:
        """What people do."""
        return (
            "run `aenv ls` with its home: its node writes the lease again; if it will never come back: "
            f"aenv gc --drop-holder {self.id[:8]}"
        )


def lost_holds(repository: Repository) -> list[LostHold]:
    """All. A lease that is there and cannot be read is none of them yet."""
    put_away: dict[str, list[StoreKey]] = {}
    for info in repository.store.list("quarantine/"):
        if match := PUT_AWAY.fullmatch(info.key):
            put_away.setdefault(match[1], []).append(info.key)
    marked = {match[1] for info in repository.store.list(MARKS) if (match := MARK.fullmatch(info.key))}
    return [
        _describe(repository, id, put_away.get(id, []))
        for id in sorted(marked | put_away.keys())
        if _is_missing(repository, id, id in put_away)
    ]


def _is_missing(repository: Repository, id: str, put_away: bool) -> bool:
    """Not one that comes or goes just now: the mark is written after the lease and removed before it."""
    for _ in range(2):
        if repository.store.stat(holder_key(id)) is not None:
            return False
        if not put_away and repository.store.stat(mark_key(id)) is None:
            return False
    return True


def require_none_lost(repository: Repository) -> None:
    """``CorruptData`` while something is held that no lease names."""
    lost = lost_holds(repository)
    if lost:
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        raise CorruptData(
            f"nothing is collected, since it is not known what is needed: {lost[0]}{more}", fix=lost[0].fix
        )


def clear_traces(repository: Repository, id: str) -> None:
    """What a repair put away of that lease: it is of no use any more."""
    for info in list(repository.store.list("quarantine/")):
        if (match := PUT_AWAY.fullmatch(info.key)) and match[1] == id:
            repository.store.delete(info.key)


def _describe(repository: Repository, id: str, put_away: list[StoreKey]) -> LostHold:
    who = ""
    with suppress(AenvError):
        mark = repository.read_ref(mark_key(id), NodeMark)
        who = str(mark) if mark is not None else ""
    snapshots: dict[SnapshotId, None] = {}
    for key in put_away:
        with suppress(AenvError):
            text = repository.store.read(key, limit_bytes=MAX_LEASE_BYTES).decode("utf-8", "replace")
            who = who or _who(text)
            snapshots.update(dict.fromkeys(_named(repository, text)))
    return LostHold(
        id=id,
        who=printable(who) or "of whom nothing is known",
        snapshots=tuple(snapshots)[:MAX_TOLD],
        put_away=tuple(put_away),
    )


def _who(text: str) -> str:
    """Whatever a damaged lease still says."""
    parts = [re.search(rf'"{name}":"([^"]{{1,200}})"', text) for name in ("kind", "host", "home")]
    return ", ".join(part[1] for part in parts if part is not None)


def _named(repository: Repository, text: str) -> Iterator[SnapshotId]:
    left = MAX_TOLD
    for match in re.finditer(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])", text):
        with suppress(NotFound):
            if left and repository.store.stat(manifest_key(SnapshotId(match[0]))) is not None:
                left -= 1
                yield SnapshotId(match[0])
