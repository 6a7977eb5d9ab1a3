"""What a repository has and who needs it: the marking half of garbage collection. Reads only.

A survey is made again for every batch, under the lock. It remembers what cannot change, so only the first one
reads every manifest. Whatever it cannot read makes it refuse: what that needs is not known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from aenv_run.catalog.records import VersionRecord
from aenv_run.errors import Conflict, CorruptData, InvalidInput, NotFound, Unsupported
from aenv_run.garbage.holder import TTL_S
from aenv_run.garbage.leases import Found, read_leases
from aenv_run.garbage.lost import require_none_lost
from aenv_run.repository import MAX_RECORD_BYTES, RECORD_KINDS, Repository
from aenv_run.snapshot import Snapshot
from aenv_run.store import KeyInfo, StoreKey
from aenv_run.types import SnapshotId

#: Refs that name no snapshot of their own.
OTHER_REFS = ("tags", "moves", "labels", "removed")
#: A store's times may be as coarse as a second: younger than this, a ref may have changed under one time.
SETTLED_S = 3.0
#: Below these is what says what is needed. What lies there and cannot be read might name anything.
TELLING = ("refs", "leases", "snapshots", "collected")
REPAIR_FIX = "`aenv check` tells more; `aenv check --repair` moves what is damaged away; then collect again"


@dataclass(frozen=True)
class Needs:
    """What a manifest says that counts here; digests as bytes, since there may be very many."""

    parent: SnapshotId | None
    blobs: tuple[bytes, ...]

    @classmethod
    def of(cls, snapshot: Snapshot) -> Needs:
        """Of a manifest."""
        return cls(snapshot.parent, tuple(bytes.fromhex(blob.digest.hex) for blob in snapshot.blobs()))


@dataclass
class Survey:
    """``manifests``: all, with the store's time of each. ``kept``: those that stay, each with who holds it.

    ``referenced``: those of them that a version or a record of the build cache names. ``collected``: remembered
    manifests. ``old_records`` and ``buried`` are refs that go. ``dead`` are leases that go.
    """

    present_s: float
    refs: int = 0
    manifests: dict[SnapshotId, float] = field(default_factory=dict)
    kept: dict[SnapshotId, list[str]] = field(default_factory=dict)
    referenced: set[SnapshotId] = field(default_factory=set)
    versions: int = 0
    records: int = 0
    collected: dict[SnapshotId, float] = field(default_factory=dict)
    old_records: list[StoreKey] = field(default_factory=list)
    buried: list[StoreKey] = field(default_factory=list)
    leases: list[Found] = field(default_factory=list)
    dead: list[Found] = field(default_factory=list)

    def keep(self, id: SnapshotId, who: str) -> None:
        """One more holder."""
        if id in self.manifests:
            users = self.kept.setdefault(id, [])
            if len(users) < 20 and who not in users:
                users.append(who)


class Surveyor:
    """``used``: what the sandboxes and pools of this home use, by their own records.

    ``alive`` is called all the time, for whoever must show that it goes on.
    """

    def __init__(
        self,
        repository: Repository,
        used: Callable[[], Mapping[SnapshotId, str]],
        *,
        grace_s: float,
        records_older_s: float | None = None,
        require_refs: bool = False,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._repository, self._used, self._alive = repository, used, alive
        self._grace_s, self._records_older_s = grace_s, records_older_s
        self._require_refs = require_refs
        self._all_readable = False
        self._needs: dict[SnapshotId, Needs] = {}
        self._remembered: dict[SnapshotId, Needs] = {}
        self._refs: dict[StoreKey, tuple[KeyInfo, SnapshotId | None]] = {}

    def needs(self, id: SnapshotId) -> Needs:
        """Of a manifest or a remembered one that the last survey saw."""
        return self._needs[id] if id in self._needs else self._remembered[id]

    def survey(self, present_s: float, *, dead: frozenset[str] = frozenset()) -> Survey:
        """How it is now. ``dead``: leases of builds that were seen not to stir."""
        found = Survey(present_s)
        self._require_readable()
        self._leases(found, dead)
        self._manifests(found)
        self._remembrances(found)
        self._names_and_records(found)
        self._holders(found)
        for id, user in self._used().items():
            found.keep(id, f"{user} of this home")
        for id, modified_s in found.manifests.items():
            if present_s - modified_s < self._grace_s:
                found.keep(id, "young")
        unheld = len(found.manifests.keys() - found.kept.keys())
        if self._require_refs and unheld and not found.refs:
            raise Conflict(
                f"the repository shows no ref at all, and {unheld} snapshots that nothing else holds: more likely "
                "its refs are lost or not shown than that all is garbage, so nothing is collected",
                fix="look with `aenv check` and at the store; if all may go: `aenv gc --allow-no-refs`",
            )
        return found

    # -- pieces --------------------------------------------------------------------------------------------

    def _list(self, prefix: str) -> Iterator[KeyInfo]:
        for info in self._repository.store.list(prefix):
            self._alive()
            yield info

    def _require_readable(self) -> None:
        """Refuse where a listing cannot show all: it never follows a link. Once, since it looks at everything."""
        if self._all_readable:
            return
        for stray in self._repository.store.strays():
            self._alive()
            if stray.kind == "foreign" and stray.path.partition("/")[0] in TELLING:
                raise CorruptData(
                    f"{stray.path} in the repository {stray.detail}, so what it names is not known, "
                    "and nothing is collected",
                    fix="if data was moved elsewhere, move it back; else remove it",
                )
        self._all_readable = True

    def _manifests(self, found: Survey) -> None:
        for info in self._list("snapshots/"):
            if not re.fullmatch(r"snapshots/([0-9a-f]{2})/\1[0-9a-f]{62}", info.key):
                continue  # of no form that a snapshot has: check names it
            id = SnapshotId(info.key.rpartition("/")[2])
            if id not in self._needs:
                try:
                    self._needs[id] = Needs.of(self._repository.snapshot(id))
                except NotFound:
                    continue
                except CorruptData as error:
                    raise self._refusal(error) from None
            found.manifests[id] = info.modified_s
        for id in self._needs.keys() - found.manifests.keys():
            del self._needs[id]

    def _remembrances(self, found: Survey) -> None:
        for info in self._list("collected/"):
            if not re.fullmatch(r"collected/([0-9a-f]{2})/\1[0-9a-f]{62}", info.key):
                continue
            id = SnapshotId(info.key.rpartition("/")[2])
            if id not in self._remembered:
                try:
                    self._remembered[id] = Needs.of(self._repository.collected(id))
                except NotFound:
                    continue
                except CorruptData as error:
                    raise self._refusal(error) from None
            found.collected[id] = info.modified_s

    def _names_and_records(self, found: Survey) -> None:
        named: dict[str, tuple[StoreKey, SnapshotId]] = {}
        removed: set[str] = set()
        for info in self._list("refs/"):
            found.refs += 1
            kind, _, rest = info.key.removeprefix("refs/").partition("/")
            if kind == "removed":
                removed.add(rest)
            elif kind == "names":
                if (id := self._ref(info, found, self._version)) is not None:
                    named[rest] = (info.key, id)
            elif kind in RECORD_KINDS:
                if (id := self._ref(info, found, self._record)) is not None:
                    self._one_record(found, info, kind, id)
            elif kind not in OTHER_REFS:
                raise Unsupported(
                    f"{info.key} is a ref of a kind that this aenv does not know, so nothing is collected",
                    fix="use the version of aenv that wrote it, or a newer one; `aenv check` lists such keys",
                )
        for rest, (key, id) in named.items():
            if rest in removed:
                found.buried.append(key)  # its removal was not finished
            else:
                found.versions += 1
                found.referenced.add(id)
                found.keep(id, rest.replace("/", ":"))

    def _one_record(self, found: Survey, info: KeyInfo, kind: str, id: SnapshotId) -> None:
        if self._records_older_s is not None and found.present_s - info.modified_s > self._records_older_s:
            found.old_records.append(info.key)
            return
        found.records += 1
        found.referenced.add(id)
        found.keep(id, f"build cache ({kind})")

    def _ref(
        self, info: KeyInfo, found: Survey, read: Callable[[StoreKey], SnapshotId | None]
    ) -> SnapshotId | None:
        """Which snapshot a ref names, read again only if it may have changed."""
        before = self._refs.get(info.key)
        if before is not None and before[0] == info:
            return before[1]
        try:
            id = read(info.key)
        except CorruptData as error:
            raise self._refusal(error) from None
        if found.present_s - info.modified_s > SETTLED_S:
            self._refs[info.key] = (info, id)
        return id

    def _version(self, key: StoreKey) -> SnapshotId | None:
        record = self._repository.read_ref(key, VersionRecord)
        return record.snapshot_id if record is not None else None

    def _record(self, key: StoreKey) -> SnapshotId | None:
        """The builder owns these: all that is known here is that they may name a snapshot."""
        try:
            value = json.loads(self._repository.store.read(key, limit_bytes=MAX_RECORD_BYTES))
            id = value.get("snapshot_id") if isinstance(value, dict) else None
            return SnapshotId(id) if isinstance(id, str) else None
        except NotFound:
            return None
        except (ValueError, RecursionError, InvalidInput) as error:
            raise CorruptData(f"{key} is damaged: {error}") from None

    def _leases(self, found: Survey, dead: frozenset[str]) -> None:
        """Before refs are listed: one who is dead by now has written its refs, and the list shows them."""
        try:
            found.leases = list(read_leases(self._repository))
        except CorruptData as error:
            raise self._refusal(error) from None
        require_none_lost(self._repository)
        found.dead = [
            one for one in found.leases if one.lease.runs_out and (one.lease.owner.is_dead or one.id in dead)
        ]

    def _holders(self, found: Survey) -> None:
        ended = {one.id for one in found.dead}
        for one in found.leases:
            if one.id in ended:
                continue
            for id, users in one.lease.held.items():
                for user in users:
                    found.keep(id, f"{user} ({one.lease})" if user else str(one.lease))
            if one.lease.kind == "build":
                since_s = one.renewed_s if one.lease.since_s is None else one.lease.since_s
                for id, modified_s in found.manifests.items():
                    if modified_s >= since_s:
                        found.keep(id, f"made since it began ({one.lease})")

    def _refusal(self, error: CorruptData) -> CorruptData:
        return CorruptData(
            f"nothing is collected, since it is not known what is needed: {error.message}", fix=REPAIR_FIX
        )


def looks_dead(found: Found, present_s: float) -> bool:
    """Whether a build's lease is so old that its builder must be watched: its machine or the store's clock is off.

    One of this machine needs no watching: whether its process runs is known.
    """
    lease = found.lease
    return lease.runs_out and not lease.owner.is_here and present_s - found.renewed_s > TTL_S
