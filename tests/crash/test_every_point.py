"""Every act that changes something, stopped or refused everywhere: all is whole, and a repeat works."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from aenv_run.errors import AenvError, NoSpace, StoreUnavailable
from aenv_run.store import Store
from aenv_run.store.faults import Crash, Fault
from aenv_run.store.memory import MemoryStore
from aenv_run.store.posix import PosixStore
from aenv_run.store.s3 import S3Store
from tests.crash.acts import ACTS, Act, World
from tests.crash.calls import CHANGES, NEEDS_ROOM, killed_at, no_room, watched
from tests.crash.faulty_store import FaultyStore
from tests.crash.table import Points
from tests.s3.server import Server

#: How many of an act's system calls are tried; `make soak` tries all.
SOME = int(os.environ.get("AENV_CRASH_POINTS") or 6)
WHENS = ("before", "half", "after")
every_act = pytest.mark.parametrize("act", ACTS, ids=lambda act: act.name.replace(" ", "-"))


@pytest.fixture
def place(memory_place: Path) -> Path:
    """Thousands of fsyncs would wait for a disk, and of what they promise a killed process shows nothing."""
    return memory_place


@pytest.fixture
def points(request: pytest.FixtureRequest) -> Points:
    return Points(request.node)


class Worlds:
    """New ones, all alike, each in a directory of its own that is empty again once the next is made."""

    def __init__(self, place: Path, act: Act, make: Callable[[Path], Store]) -> None:
        self._place, self._act, self._make = place / "world", act, make

    def new(self) -> World:
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir()
        world = World(self._place, self._make(self._place))
        self._act.prepare(world)
        world.reopen()
        return world


def memory(place: Path) -> Store:
    return MemoryStore()


def posix(place: Path) -> Store:
    return PosixStore(place / "store")


def look_and_repeat(world: World, act: Act) -> str:
    """What is there after it was stopped, and then done."""
    world.reopen()
    world.whole()
    outcome = "done" if act.is_done(world) else "as before"
    (act.repeat or act.run)(world)
    world.reopen()
    world.whole()
    assert act.is_done(world)
    return outcome


def some(count: int, most: int = SOME) -> list[int]:
    """The numbers of the points to try: all in the soak, else some that differ from run to run."""
    if count <= most:
        return list(range(1, count + 1))
    seed = int(os.environ.get("AENV_TEST_SEED") or time.time_ns() % 10**9)
    print(f"AENV_TEST_SEED={seed}")
    return sorted(random.Random(seed).sample(range(1, count + 1), most))


def stop(worlds: Worlds, points: Points, act: Act, way: str, whens: tuple[str, ...], most: int) -> None:
    """At the operations of the store."""
    world = worlds.new()
    before = world.store.operations  # type: ignore[attr-defined]
    act.run(world)
    count = world.store.operations - before  # type: ignore[attr-defined]
    for when in whens:
        for at in some(count, most):
            world = worlds.new()
            world.store.arm(Fault(at, when))  # type: ignore[attr-defined, arg-type]
            try:
                act.run(world)
            except Crash:
                world.store.restart()  # type: ignore[attr-defined]
                points.add(act.name, f"killed at an operation, {way}", look_and_repeat(world, act))


@every_act
def test_stopped_at_every_operation(place: Path, points: Points, act: Act) -> None:
    stop(Worlds(place, act, memory), points, act, "memory", WHENS, 3 * SOME)


@every_act
def test_stopped_at_every_operation_of_a_directory(place: Path, points: Points, act: Act) -> None:
    stop(Worlds(place, act, lambda place: FaultyStore(posix(place))), points, act, "posix", WHENS[::2], SOME)


@every_act
@pytest.mark.skipif(not os.environ.get("AENV_CRASH_POINTS"), reason="each takes a while over a wire: make soak")
def test_stopped_at_operations_of_a_bucket(place: Path, points: Points, act: Act, s3_server: Server) -> None:
    def bucket(place: Path) -> Store:
        return FaultyStore(S3Store(s3_server.place(uuid4().hex), lock=place / "lock"))

    stop(Worlds(place, act, bucket), points, act, "s3", WHENS[::2], 4)


@every_act
@pytest.mark.parametrize("error", [NoSpace("no space"), StoreUnavailable("timed out")], ids=lambda e: e.code)
def test_an_error_at_every_operation(place: Path, points: Points, act: Act, error: AenvError) -> None:
    worlds = Worlds(place, act, memory)
    world = worlds.new()
    before = world.store.operations  # type: ignore[attr-defined]
    act.run(world)
    for at in some(world.store.operations - before):  # type: ignore[attr-defined]
        for when in WHENS:
            world = worlds.new()
            world.store.arm(Fault(at, when, error))  # type: ignore[attr-defined, arg-type]
            try:
                act.run(world)
            except type(error):
                points.add(act.name, f"{error.code} at an operation", look_and_repeat(world, act))


@every_act
def test_killed_at_every_call(place: Path, points: Points, act: Act) -> None:
    worlds = Worlds(place, act, posix if act.changes_store else memory)
    world = worlds.new()
    with watched(CHANGES) as calls:
        act.run(world)
    for at in some(calls.count):
        world = worlds.new()
        if killed_at(at, lambda world=world: act.run(world)):  # type: ignore[misc]
            points.add(act.name, "killed at a system call", look_and_repeat(world, act))


@every_act
def test_no_room_at_every_call(place: Path, points: Points, act: Act) -> None:
    worlds = Worlds(place, act, posix if act.changes_store else memory)
    world = worlds.new()
    with watched(NEEDS_ROOM) as calls:
        act.run(world)
    for at in some(calls.count):
        world = worlds.new()
        try:
            with watched(NEEDS_ROOM, at, no_room):
                act.run(world)
        except NoSpace as error:
            assert error.fix
            points.add(act.name, "no room at a system call", look_and_repeat(world, act))
        else:  # it could do without
            points.add(act.name, "no room at a system call", look_and_repeat(world, act))
