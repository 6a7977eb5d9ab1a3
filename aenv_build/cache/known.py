"""Which results of a plan exist already, and which of them are too old to count."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from aenv_build.cache.elsewhere import Kept
from aenv_build.cache.ledger import BASE, Ledger
from aenv_build.language.recipe_values import seconds_of
from aenv_build.planning.plan import Plan, Stage
from aenv_build.planning.schedule import copied_from, state_of, state_parent
from aenv_build.reports.wording import duration
from aenv_run.errors import InvalidInput
from aenv_run.repository import Repository
from aenv_run.snapshot import Snapshot
from aenv_run.types import StageKey


@dataclass(frozen=True)
class Old:
    """When the results were made that do not count, by step and by position of an output: to know newer ones."""

    steps: dict[str, datetime]
    outputs: dict[int, datetime]


@dataclass(frozen=True)
class Known:
    """What the ledger has of a plan. ``too_old``: by step, why a result that exists does not count.

    ``origins``: by step, the other repository that has it, or from which it was just copied.
    """

    base: Snapshot | None
    stages: dict[str, Snapshot]
    outputs: dict[int, Snapshot]
    too_old: dict[str, str] = field(default_factory=dict)
    old: Old = field(default_factory=lambda: Old({}, {}))
    origins: dict[str, str] = field(default_factory=dict)

    def all(self) -> Iterator[Snapshot]:
        """Every result."""
        yield from (self.base,) if self.base is not None else ()
        yield from self.stages.values()
        yield from self.outputs.values()


@dataclass(frozen=True)
class Freshness:
    """``now`` is when the build began. ``since``: nothing that was made before counts. ``nothing``: nothing does.

    ``made``: keys of what other cells of this very build have made; that counts in any case.
    """

    now: datetime
    since: datetime | None = None
    nothing: bool = False
    made: AbstractSet[StageKey] = frozenset()

    @property
    def ages_all(self) -> bool:
        """Whether results of steps without a ``ttl`` may be too old."""
        return self.nothing or self.since is not None

    def too_old(self, key: StageKey, ttl_s: int | None, at: datetime) -> str:
        """Why a result of that moment does not count; empty if it does."""
        if key in self.made:
            return ""
        if self.nothing:
            return "the cache is not used"
        if self.since is not None and at < self.since:
            return f"older than {self.since.astimezone(UTC):%Y-%m-%d %H:%M}"
        if ttl_s is not None and self.now - at > timedelta(seconds=ttl_s):
            return f"older than {duration(ttl_s)}"
        return ""


def parse_since(text: str | None) -> datetime | None:
    """A date, a moment (UTC unless it says another zone), or an age: ``7d``."""
    if text is None:
        return None
    try:
        return datetime.now(UTC) - timedelta(seconds=seconds_of(text))
    except ValueError:
        pass
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(
            f"--since {text[:80]}: not a date", fix="write 2026-11-30, 2026-11-30T12:00Z, or an age such as 7d"
        ) from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def look_up(plan: Plan, ledger: Ledger, repository: Repository, freshness: Freshness | None = None) -> Known:
    """Every result that counts, now. Blocking; reads only."""
    return _Looking(plan, ledger, repository, freshness or Freshness(datetime.now(UTC))).known()


class _Looking:
    def __init__(self, plan: Plan, ledger: Ledger, repository: Repository, freshness: Freshness) -> None:
        self._plan = plan
        self._ledger = ledger
        self._repository = repository
        self._freshness = freshness
        self._kept: dict[str | None, Kept] = {}
        self._too_old: dict[str | None, str] = {}
        #: Steps whose results may get too old, with all that stands on them.
        self._ages: set[str | None] = {None} if freshness.ages_all else set()
        self._old = Old({}, {})

    def known(self) -> Known:
        base = self._base()
        for stage in self._plan.stages.values():  # each follows what it needs
            if stage.step.ttl is not None or self._freshness.ages_all:
                self._ages.add(stage.id)
            if not self._ages.isdisjoint(self._below(stage)):
                self._ages.add(stage.id)
            if stage.makes_state or stage.step.verb == "verify":
                self._look(stage)
        outputs = {}
        for position, out in enumerate(self._plan.outputs):
            kept = self._ledger.recall("outputs", out.key)
            state = state_of(self._plan, out.state)
            if kept is None:
                continue
            if self._freshness.too_old(out.key, None, kept.at) or self._stands_on_old(
                kept, state, state in self._ages
            ):
                self._old.outputs[position] = kept.at
            else:
                outputs[position] = kept.snapshot
        stages = {step: kept.snapshot for step, kept in self._kept.items() if step is not None}
        too_old = {step or BASE: why for step, why in self._too_old.items()}
        origins = {step or BASE: kept.origin for step, kept in self._kept.items() if kept.origin}
        return Known(base, stages, outputs, too_old, self._old, origins)

    def _base(self) -> Snapshot | None:
        if self._plan.base.snapshot is not None:
            self._ages.discard(None)
            return self._repository.snapshot(self._plan.base.snapshot)
        kept = self._ledger.recall("stages", self._plan.base.key)
        if kept is None:
            return None
        if why := self._freshness.too_old(self._plan.base.key, None, kept.at):
            self._too_old[None] = why
            self._old.steps[BASE] = kept.at
            return None
        self._kept[None] = kept
        return kept.snapshot

    def _look(self, stage: Stage) -> None:
        if stage.base is not None and stage.is_base and stage.base.snapshot is not None:
            snapshot = self._repository.snapshot(stage.base.snapshot)
            self._kept[stage.id] = Kept(snapshot, datetime.min.replace(tzinfo=UTC))
            return
        kept = self._ledger.recall("stages", stage.key)
        if kept is None:
            return
        why = self._freshness.too_old(stage.key, stage.step.ttl, kept.at)
        if not why and stage.id in self._ages:
            below = "" if stage.is_base else self._stands_on_old(kept, state_parent(self._plan, stage), True)
            why = below or self._copies_old(kept, stage)
        if why:
            self._too_old[stage.id] = why
            self._old.steps[stage.id] = kept.at
        else:
            self._kept[stage.id] = kept

    def _stands_on_old(self, kept: Kept, state: str | None, ages: bool) -> str:
        """Whether the state below is made again, or was since this result."""
        if state in self._too_old:
            return "the state it starts from is made again"
        below = self._kept.get(state)
        if ages and below is not None and below.snapshot.id not in {kept.snapshot.id, kept.snapshot.parent}:
            return "the state it starts from was made again"
        return ""

    def _copies_old(self, kept: Kept, stage: Stage) -> str:
        for step in copied_from(stage):
            state = state_of(self._plan, step)
            source = self._kept.get(state)
            if state in self._too_old or (source is not None and kept.at < source.at):
                return "the files that it copies are made again"
        return ""

    def _below(self, stage: Stage) -> Iterator[str | None]:
        if not stage.is_base:
            yield state_parent(self._plan, stage)
        yield from (state_of(self._plan, step) for step in copied_from(stage))
