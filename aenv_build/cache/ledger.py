"""What is known from before: results by key in the repository, and this node's notes of why a key changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from aenv_build.cache.elsewhere import Elsewhere, Kept, KeptResult
from aenv_build.language.load import Source
from aenv_build.language.matrix import Cell
from aenv_build.planning.keys import Inputs
from aenv_build.planning.plan import Plan
from aenv_run.digest import digest_bytes
from aenv_run.errors import AenvError, CorruptData, NotFound
from aenv_run.garbage.refer import refer
from aenv_run.paths import Home
from aenv_run.repository import Repository
from aenv_run.signatures import is_trusted
from aenv_run.snapshot import Snapshot
from aenv_run.types import Digest, Model, Name, StageKey

BASE = "base"
#: A record that was of use is marked so once in that time: `aenv gc --build-cache-older-than` looks at it.
USED_S = 86400.0
#: How many characters of a digest people are shown.
SHORT_DIGEST = len("sha256:") + 12


class Ledger:
    """Results by key. Blocking."""

    def __init__(
        self,
        repository: Repository,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._repository = repository
        self._elsewhere = elsewhere
        self._clock = clock
        self._there: set[Digest] = set()  # blobs that were looked for in this build

    def recall(self, kind: str, key: StageKey) -> Kept | None:
        """The kept result; one whose snapshot is gone, lacks a file or a signature that is required is none."""
        kept = self._repository.recall(kind, key, KeptResult)
        with suppress(NotFound):
            if kept is not None and self._is_usable(kind, key, kept):
                hit = kept.of(self._repository.snapshot(kept.snapshot_id))
                with suppress(AenvError):  # a repository that is only read
                    self._repository.touch(kind, key, older_than_s=USED_S)
                return hit
        if self._elsewhere is None or (found := self._elsewhere.bring(self._repository, kind, key)) is None:
            return None
        if self._elsewhere.copies:
            if kept is not None:  # a record that outlived its snapshot
                self._repository.forget(kind, key)
            self._record(kind, key, KeptResult(snapshot_id=found.snapshot.id, at=found.at))
        return found

    def _is_usable(self, kind: str, key: StageKey, kept: KeptResult) -> bool:
        """Whether it is signed as required, and all its blobs are there, by their sizes: else its record goes."""
        if not is_trusted(self._repository, kept.snapshot_id):
            return False
        for blob in self._repository.snapshot(kept.snapshot_id).blobs():
            if blob.digest in self._there:
                continue
            try:
                self._repository.require_blob(blob)
            except CorruptData:
                self._repository.forget(kind, key)
                return False
            self._there.add(blob.digest)
        return True

    def _record(self, kind: str, key: StageKey, value: KeptResult) -> KeptResult:
        """Keep it, and make sure that no garbage collector took the snapshot just before."""

        def undo(kept: KeptResult) -> None:
            if kept.snapshot_id == value.snapshot_id:
                self._repository.forget(kind, key)

        return refer(
            self._repository, value.snapshot_id, lambda: self._repository.record(kind, key, value), undo=undo
        )

    def keep(self, kind: str, key: StageKey, snapshot: Snapshot, *, replace: bool = False) -> Snapshot:
        """Record it; of two builders one wins and both go on with that one's. ``replace`` what is too old."""
        mine = KeptResult(snapshot_id=snapshot.id, at=self._clock())
        if replace:
            self._repository.forget(kind, key)
        kept = self._record(kind, key, mine)
        if kept.snapshot_id == mine.snapshot_id:
            return snapshot
        with suppress(NotFound):
            if is_trusted(self._repository, kept.snapshot_id):
                return self._repository.snapshot(kept.snapshot_id)
        # The record outlived its snapshot, or is of somebody whom nobody vouches for.
        self._repository.forget(kind, key)
        self._record(kind, key, mine)
        return snapshot


class _Notes(Model):
    steps: dict[str, dict[str, str]]


class Notes:
    """The inputs of the last build per recipe name and step, so that a miss can name what differs."""

    def __init__(self, folder: Path, recipe: Name, cell: Cell) -> None:
        # Cells may share a name; what one was made of explains nothing of another.
        suffix = f"+{digest_bytes(str(cell).encode()).hex[:12]}" if cell.values else ""
        self._path = folder / f"{recipe}{suffix}.json"
        self._former = self._read()

    @classmethod
    def of(cls, home: Home, source: Source) -> Self:
        """Those of the recipe's cell in that home."""
        return cls(home.cache / "explain", source.recipe.name, source.cell)

    def why_missed(self, step: str, inputs: Inputs) -> str:
        """One phrase for people."""
        former = self._former.get(step)
        if former is None:
            return "never built here"
        changed = inputs.differences(former)
        if not changed:
            return "its result is no longer in the repository, or lacks a file there"
        return "changed: " + ", ".join(_phrase(name, former, inputs.values) for name in changed)

    def write(self, plan: Plan, done: AbstractSet[str]) -> None:
        """Remember the inputs of the steps that are done. Losing them costs an explanation, no correctness."""
        now = {BASE: dict(plan.base.inputs.values)}
        now |= {stage.id: dict(stage.inputs.values) for stage in plan.stages.values()}
        former = {step: inputs for step, inputs in self._former.items() if step in now}
        steps = former | {step: inputs for step, inputs in now.items() if step in done}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        temporary.write_text(_Notes(steps=steps).model_dump_json())
        temporary.replace(self._path)

    def _read(self) -> dict[str, dict[str, str]]:
        try:
            return _Notes.model_validate_json(self._path.read_bytes()).steps
        except (OSError, ValidationError):
            return {}


def _phrase(name: str, former: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The input's name, and both values where they are short and readable."""
    if name == "parent":
        return "the state it starts from"
    before, after = _plain(former.get(name, "nothing")), _plain(now.get(name, "nothing"))
    words = {"from": "the copied files", "content": "the archive", "envd": "the guest daemon"}
    shown = words.get(name, "the image" if name == "manifest" else name)
    return shown if name in words or len(before) + len(after) > 120 else f"{shown} ({before} -> {after})"


def _plain(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if isinstance(value, str):
        return value[:SHORT_DIGEST] if value.startswith("sha256:") else value
    return text
