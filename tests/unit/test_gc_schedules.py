"""A collector and writers at once, in every order of their steps that is worth trying, and in many random ones.

What was committed and named must be whole, whatever the order. AENV_GC_SCHEDULES: how many random orders (soak).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from aenv_run.catalog import Catalog
from aenv_run.check import check
from aenv_run.errors import Conflict, CorruptData, NotFound
from aenv_run.garbage.collect import Rules, collect
from aenv_run.garbage.holder import Holder
from aenv_run.garbage.state import Gate, Timing
from aenv_run.repository import Repository, manifest_key
from aenv_run.snapshot import Snapshot
from aenv_run.types import Name
from tests.bytes_half import capture, draft
from tests.unit.turns import Choose, Turns, TurnStore

RANDOM = int(os.environ.get("AENV_GC_SCHEDULES", "60"))
NAME = Name("env")
NOW = Timing(settle_s=0)


class Scene:
    """A base that has a name; beside it what nothing names: a snapshot, and a blob without one."""

    def __init__(self, place: Path) -> None:
        self.place, self.store = place, TurnStore()
        repository = self.open(NOW)
        self.base = repository.commit(capture(place, b"base"), draft())
        Catalog(repository, by="x").publish(NAME, self.base.id)
        self.lonely = repository.commit(capture(place, b"lonely"), draft())
        orphan = repository.commit(capture(place, b"orphan"), draft())
        self.store.delete(manifest_key(orphan.id))
        self.claimed: list[Snapshot] = []

    def open(self, timing: Timing) -> Repository:
        return Repository(self.store, Gate(self.store, timing))

    def whole(self, what: str) -> None:
        self.store.turns = None
        repository = self.open(NOW)
        report = check(repository, deep=True)
        assert report.ok, (what, report.problems)
        for snapshot in (self.base, *self.claimed):
            repository.require_whole(snapshot)


Writer = Callable[[Scene, Repository], None]


def commits_an_orphan_blob(scene: Scene, repository: Repository) -> None:
    made = repository.commit(capture(scene.place, b"orphan", b"more"), draft())
    Catalog(repository, by="x").publish(NAME, made.id)
    scene.claimed.append(made)


def commits_what_is_there(scene: Scene, repository: Repository) -> None:
    made = repository.commit(capture(scene.place, b"lonely"), draft())
    Catalog(repository, by="x").publish(NAME, made.id)
    scene.claimed.append(made)


def commits_on_the_base(scene: Scene, repository: Repository) -> None:
    made = repository.commit(capture(scene.place, b"orphan"), draft(scene.base))
    Catalog(repository, by="x").publish(NAME, made.id)
    scene.claimed.append(made)


def commits_on_what_nothing_names(scene: Scene, repository: Repository) -> None:
    try:
        made = repository.commit(capture(scene.place, b"orphan"), draft(scene.lonely))
        Catalog(repository, by="x").publish(NAME, made.id)
    except (NotFound, Conflict, CorruptData):
        return  # its parent was collected before: nobody held it
    scene.claimed.append(made)


def names_what_is_there(scene: Scene, repository: Repository) -> None:
    try:
        Catalog(repository, by="x").publish(NAME, scene.lonely.id)
    except (NotFound, Conflict):
        return  # it was collected before
    scene.claimed.append(scene.lonely)


def holds_what_is_there(scene: Scene, repository: Repository) -> None:
    Holder.of_node(repository, "h", "ab" * 16).hold({scene.lonely.id: ["sandbox"]})
    try:
        repository.snapshot(scene.lonely.id)
    except NotFound:
        return
    scene.claimed.append(scene.lonely)


WRITERS = (
    commits_an_orphan_blob,
    commits_what_is_there,
    commits_on_the_base,
    commits_on_what_nothing_names,
    names_what_is_there,
    holds_what_is_there,
)
#: A commit that is not yet named would be garbage with no grace at all: such writers need what is young to stay.
GRACE_S = 3600.0


def act(
    place: Path, writers: tuple[Writer, ...], choose: Choose, ttl_s: float = 1e9, *, atomic: bool = False
) -> Turns:
    """One collector and these writers, from a scene in which all is old."""
    scene = Scene(place)
    for info in list(scene.store.list("")):
        scene.store.age(info.key, 2 * GRACE_S)
    turns = Turns(choose, ttl_s=ttl_s, deletes_wait=not atomic)
    scene.store.turns = turns
    works: dict[str, Callable[[], object]] = {
        "gc": lambda: collect(scene.open(turns.timing), Rules(grace_s=GRACE_S), dict)
    }
    for number, writer in enumerate(writers):
        works[f"writer {number}"] = lambda writer=writer: writer(scene, scene.open(turns.timing))  # type: ignore[misc]
    turns.run(works)
    what = " ".join("g" if name == "gc" else name[-1] for name in turns.taken)
    lost = {name: error for name, error in turns.errors.items() if not (atomic and isinstance(error, Conflict))}
    assert not lost, (what, lost)
    scene.whole(what)
    collect(scene.open(NOW), Rules(grace_s=GRACE_S), dict)
    scene.whole(what)
    return turns


def switching(first: str, *at: int) -> Choose:
    """``first`` goes on until the first of these turns, then another, and so on; who cannot, lets others."""
    turn, current = 0, first

    def choose(names: list[str]) -> str:
        nonlocal turn, current
        if turn in at:
            current = next((name for name in names if name != current), current)
        turn += 1
        return current if current in names else names[0]

    return choose


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_the_collector_comes_between_any_two_steps_of_a_writer(tmp_path: Path, writer: Writer) -> None:
    alone = act(tmp_path / "alone", (writer,), switching("writer 0"))
    steps = alone.taken.count("writer 0")
    for at in range(steps + 1):
        act(tmp_path / f"w{at}", (writer,), switching("writer 0", at))


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_the_writer_comes_between_any_two_steps_of_the_collector(tmp_path: Path, writer: Writer) -> None:
    alone = act(tmp_path / "alone", (writer,), switching("gc"))
    steps = alone.taken.count("gc")
    for at in range(steps + 1):
        act(tmp_path / f"g{at}", (writer,), switching("gc", at))


@pytest.mark.parametrize("zombies", [False, True], ids=["lively", "collectors lose their lock"])
def test_random_orders(tmp_path: Path, zombies: bool) -> None:
    """With zombies a collector is taken for dead again and again, and comes back: it must delete nothing then."""
    seed = int(os.environ.get("AENV_SEED", random.SystemRandom().randrange(10**9)))
    print(f"AENV_SEED={seed}")
    chance = random.Random(seed)
    for number in range(RANDOM):
        writers = tuple(chance.choices(WRITERS, k=chance.randint(1, 2)))
        sticky = chance.choice((0.0, 0.5, 0.9))
        last = ""

        def choose(names: list[str], sticky: float = sticky) -> str:
            nonlocal last
            if last not in names or chance.random() >= sticky:
                last = chance.choice(names)
            return last

        ttl_s = chance.choice((0.01, 0.03, 0.1)) if zombies else 1e9
        act(tmp_path / str(number), writers, choose, ttl_s, atomic=zombies)
