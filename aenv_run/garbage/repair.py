"""``aenv check --repair``: what is damaged is moved to ``quarantine/``, with all that cannot be without it.

Nothing is deleted: each object is first whole at its new place. Stopped anywhere, the next repair goes on.
"""

from __future__ import annotations

import re
import secrets
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, runtime_checkable

from aenv_run.catalog.records import named, version_key
from aenv_run.catalog.versions import Versions
from aenv_run.check import Problem, Report, check, look
from aenv_run.digest import READ_BYTES, digest_bytes
from aenv_run.errors import AenvError, CorruptData, InvalidInput, NotFound
from aenv_run.garbage.lock import CollectorLock
from aenv_run.repository import Repository, manifest_key
from aenv_run.snapshot import Snapshot
from aenv_run.store import StoreKey, Stray
from aenv_run.store.reserve import freeing
from aenv_run.types import Digest, Model, SnapshotId

#: Each round finds what the one before has orphaned: blob, manifest, ref. More are for what changes meanwhile.
MAX_ROUNDS = 10
#: Where a repository has directories. A link in such a place is no damage: somebody moved the data.
DIRECTORIES = re.compile(
    r"refs|leases|snapshots|collected|blobs|packed|signatures|refs/[a-z]+|refs/(names|tags|moves|labels|removed)/[^/]+"
    r"|(snapshots|collected|signatures)/[0-9a-f]{2}|(blobs|packed)/sha256(/[0-9a-f]{2})?"
)
ACTOR = "aenv check --repair"


@runtime_checkable
class SetsAside(Protocol):
    """A store that can move what is no object of its own out of the way."""

    def set_aside(self, stray: Stray) -> str:
        """Where it is now; ``strays`` does not show it any more."""


class Moved(Model):
    """One object that was put away, and why."""

    key: str
    to: str
    why: str


class Repaired(Model):
    """What was done; ``lost`` are versions that are gone by it; ``left``: what could not be moved."""

    moved: tuple[Moved, ...]
    lost: tuple[str, ...]
    report: Report

    @property
    def next_steps(self) -> tuple[str, ...]:
        """What people do now."""
        steps: list[str] = []
        if self.lost:
            steps.append(f"build again, or import from a copy: {', '.join(self.lost[:20])}")
        if any(one.key.startswith(("refs/stages/", "refs/outputs/")) for one in self.moved):
            steps.append("the next build makes the lost results of the build cache again by itself")
        steps += [f"{one.detail}; {one.fix}" for one in self.report.warnings if one.about != "repository"]
        if self.moved:
            steps.append("when nothing of it is wanted any more: aenv gc --quarantine-older-than 0s")
        return tuple(steps)


def repair(
    repository: Repository, *, deep: bool = False, tell: Callable[[str], None] = lambda line: None
) -> Repaired:
    """Check, and move away what is wrong, until a check is clean. Nobody deletes or commits meanwhile."""
    with freeing(repository.store):
        return _Repair(repository, tell).run(deep=deep)


class _Repair:
    def __init__(self, repository: Repository, tell: Callable[[str], None]) -> None:
        self._repository, self._store, self._tell = repository, repository.store, tell
        self._lock = CollectorLock(repository.gate, "repair", lambda who: tell(f"waiting for {who}"))
        self._place = f"quarantine/{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"
        self._moved: list[Moved] = []
        self._lost: list[str] = []

    def run(self, *, deep: bool) -> Repaired:
        """All of it."""
        report = check(self._repository, deep=deep)  # without the lock: it may read every blob
        if report.ok:
            return self._result(report)
        self._require_directories()
        self._lock.acquire()
        try:
            self._repository.gate.timing.sleep(self._repository.gate.timing.settle_s)
            for problem in report.problems:
                if problem.kind in ("damaged_blob", "wrong_size"):
                    self._blob(problem)
            for _ in range(MAX_ROUNDS):
                report = look(self._repository)
                before = len(self._moved)
                for problem in report.problems:
                    self._lock.require()
                    self._one(problem)
                if report.ok or len(self._moved) == before:
                    break
        finally:
            self._lock.release()
        return self._result(report)

    def _require_directories(self) -> None:
        """Else all that lies behind a link would count as missing, and what needs it would be put away."""
        for stray in self._store.strays():
            if stray.kind == "foreign" and DIRECTORIES.fullmatch(stray.path):
                raise CorruptData(
                    f"{stray.path} in the repository {stray.detail}: what lies behind it is not seen, "
                    "and nothing was repaired",
                    fix="move the data back to where the link is (or mount a file system there)",
                )

    def _result(self, report: Report) -> Repaired:
        return Repaired(moved=tuple(self._moved), lost=tuple(dict.fromkeys(self._lost)), report=report)

    def _one(self, problem: Problem) -> None:
        match problem.kind:
            case "wrong_size" | "damaged_blob":
                self._blob(problem)
            case "missing_blob":
                self._manifests_with(Digest(f"sha256:{problem.key[-64:]}"), "a blob that it needs is missing")
            case "missing_manifest":
                self._referrer(problem)
            case "unknown_file" if (key := _as_key(problem.key)) is None or not self._has(key):
                self._stray(problem)
            case "unavailable" | "unknown_format":
                pass  # not damaged: it stays where it is, and is told
            case _:
                self._move(StoreKey(problem.key), problem.detail)

    def _blob(self, problem: Problem) -> None:
        """A form whose bytes are not those of its name goes; where they are, a manifest says what is not so."""
        key = StoreKey(problem.key)
        digest = Digest(f"sha256:{key[-64:]}")
        form = next((one for one in self._repository.blobs.forms(digest) if one.info.key == key), None)
        if form is None:
            return
        if form.packed:
            try:
                self._repository.blobs.index(form)
            except CorruptData as error:
                self._move(key, error.message)
                return
        try:
            with self._repository.blobs.open(digest, form) as reader:
                while reader.read(READ_BYTES):
                    self._lock.require()
        except NotFound:
            return
        except CorruptData as error:
            self._move(key, error.message)
            return
        self._manifests_with(digest, "what it says of a blob is not so", whole_ones_stay=True)

    def _manifests_with(self, digest: Digest, why: str, *, whole_ones_stay: bool = False) -> None:
        for id in list(self._repository.ids()):
            self._lock.require()
            try:
                snapshot = self._repository.snapshot(id)
            except AenvError:
                continue  # told by itself
            blobs = [blob for blob in snapshot.blobs() if digest in (blob.digest, blob.chunks)]
            if blobs and not (whole_ones_stay and self._are_whole(snapshot)):
                self._move(manifest_key(id), f"{why}: {digest}")

    def _are_whole(self, snapshot: Snapshot) -> bool:
        try:
            for blob in snapshot.blobs():
                self._repository.verify_blob(blob)
                self._lock.require()
        except CorruptData:
            return False
        return True

    def _referrer(self, problem: Problem) -> None:
        """A ref to a snapshot that is not there goes. One that grew from it stays: it needs its blobs alone."""
        key = StoreKey(problem.key)
        if not key.startswith("snapshots/"):
            self._move(key, problem.detail)
            return
        parent = self._repository.snapshot(SnapshotId(key.rpartition("/")[2])).parent
        if parent is not None:
            marker = StoreKey(f"{self._place}/lost/{parent}")
            self._store.put_new(marker, b"")
            self._moved.append(
                Moved(key=manifest_key(parent), to=marker, why="it is missing; others grew from it")
            )

    def _stray(self, problem: Problem) -> None:
        for stray in self._store.strays():
            if stray.path == problem.key and isinstance(self._store, SetsAside):
                to = self._store.set_aside(stray)
                self._moved.append(Moved(key=stray.path, to=to, why=stray.detail))
                return

    def _move(self, key: StoreKey, why: str) -> None:
        """To the quarantine: there first, then away from here."""
        if not self._has(key):
            return
        self._tell(f"moving {key}: {why}")
        target = self._target(key)
        if (path := self._store.local_path(key)) is not None:
            self._store.put_file(target, path, consume=True)  # the very file gets another name
        else:
            with tempfile.TemporaryDirectory(prefix="aenv-repair-") as scratch:
                copy = Path(scratch, "object")
                with self._store.open(key) as source, copy.open("wb") as file:
                    while data := source.read(READ_BYTES):
                        file.write(data)
                        self._lock.require()
                self._store.put_file(target, copy)
        self._lock.require()
        self._moved.append(Moved(key=key, to=target, why=why))
        if (removal := named(key, "refs/removed/")) is not None and key.startswith("refs/removed/"):
            self._store.delete(version_key(*removal))  # else it would come back for a moment
        self._bury(key)
        self._store.delete(key)
        self._bury(key)

    def _bury(self, key: StoreKey) -> None:
        """A version's number is never given out again, whatever became of its ref."""
        for under in ("refs/names/", "refs/removed/"):
            if key.startswith(under) and (version := named(key, under)) is not None:
                Versions(self._repository).bury(*version, ACTOR)
                if under == "refs/names/":
                    self._lost.append(f"{version[0]}:{version[1]}")

    def _has(self, key: StoreKey) -> bool:
        try:
            return self._store.stat(key) is not None
        except CorruptData:
            return False  # a link, say: it is a stray

    def _target(self, key: StoreKey) -> StoreKey:
        target = _as_key(f"{self._place}/{key}")
        return target or StoreKey(f"{self._place}/deep/{digest_bytes(key.encode()).hex}")


def _as_key(text: str) -> StoreKey | None:
    try:
        return StoreKey(text) if re.fullmatch(r"[\x20-\x7e]+", text) else None
    except InvalidInput:
        return None
