"""A writer and a collector as processes on one directory, each killed or stopped at a random moment, in rounds.

What was published and not removed is whole after each. AENV_CRASH_ROUNDS: how many rounds; AENV_SEED repeats them.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from aenv_run.catalog import Catalog
from aenv_run.check import check
from aenv_run.errors import Conflict, CorruptData, NotFound
from aenv_run.garbage.collect import Rules, collect
from aenv_run.garbage.state import Gate, Timing
from aenv_run.repository import Repository
from aenv_run.store.posix import PosixStore
from aenv_run.types import Name, SnapshotId
from tests.bytes_half import capture, draft

ROUNDS = int(os.environ.get("AENV_CRASH_ROUNDS") or 10)
NAME = Name("env")
#: Nobody is stopped for as long as a collector waits before it looks: nothing here is young, so that a writer that
#: was stopped for longer and is then killed leaves a manifest without its blobs (docs/decisions/018-garbage.md).
TIMING = Timing(settle_s=0.5, poll_s=0.005, patience_s=20)
#: Few enough that what one commit leaves another one finds there, mostly just when it goes.
CONTENTS = [bytes([number]) * (1000 + number) for number in range(10)]


def opened(root: Path) -> Repository:
    store = PosixStore(root)
    return Repository(store, Gate(store, TIMING))


def write(root: Path, place: Path, seed: int) -> None:
    """Commits and publishes, removes now and then, and says so: before a removal, after a publication."""
    chance = random.Random(seed)
    repository = opened(root)
    catalog = Catalog(repository, by="x")
    with (place / "said").open("a") as said:
        while True:
            live = catalog.version_log.live(NAME)
            try:
                parent = None
                if live and chance.random() < 0.5:
                    parent = repository.snapshot(catalog.resolve(f"{NAME}:{chance.choice(live)}").snapshot_id)
                    parent = parent if len(parent.disk) < 6 else None
                layers = chance.sample(CONTENTS, chance.randint(1, 2))
                snapshot = repository.commit(capture(place, *layers), draft(parent, seed=str(chance.randrange(4))))
                version = catalog.publish(NAME, snapshot.id)
            except (NotFound, Conflict, CorruptData):
                continue  # it was collected before it had a name: nothing held it, and nothing young stays here
            print("published", version, snapshot.id, file=said, flush=True)
            if len(live) > 5:
                gone = chance.choice(live)
                print("removing", gone, file=said, flush=True)
                catalog.remove(NAME, gone)


def sweep(root: Path, place: Path, seed: int) -> None:
    """Collects without end; nothing is too young."""
    while True:
        collect(opened(root), Rules(grace_s=0), dict)


def published(place: Path) -> dict[int, SnapshotId]:
    found: dict[int, SnapshotId] = {}
    for line in (place / "said").read_text().splitlines() if (place / "said").exists() else ():
        match line.split():
            case ["published", number, id]:
                found[int(number)] = SnapshotId(id)
            case ["removing", number]:
                found.pop(int(number), None)
    return found


def test_killed_at_random_moments(tmp_path: Path) -> None:
    seed = int(os.environ.get("AENV_SEED") or random.SystemRandom().randrange(10**9))
    print(f"AENV_SEED={seed}")
    chance = random.Random(seed)
    fork = multiprocessing.get_context("fork")
    root, outcomes = tmp_path / "store", Counter[str]()
    for number in range(ROUNDS):
        works: dict[str, Callable[[Path, Path, int], None]] = {"writer": write, "collector": sweep}
        running = {
            name: fork.Process(target=work, args=(root, tmp_path, seed + number)) for name, work in works.items()
        }
        for process in running.values():
            process.start()
        try:
            time.sleep(chance.uniform(0.4, 1.2))
            first, second = chance.sample(sorted(running), 2)
            if chance.random() < 0.3:
                os.kill(running[first].pid or 0, signal.SIGSTOP)
                time.sleep(chance.uniform(0.02, 0.1))
                os.kill(running[first].pid or 0, signal.SIGCONT)
                outcomes[f"{first} stopped"] += 1
            running[first].kill()
            running[first].join()
            time.sleep(chance.uniform(0, 0.2))
            assert running[second].is_alive(), f"the {second} ended by itself"
            outcomes[f"{first} killed first"] += 1
        finally:
            for process in running.values():
                process.kill()
                process.join()
        repository = opened(root)
        report = check(repository, deep=True)
        assert report.ok, (seed, number, report.problems)
        for version, id in published(tmp_path).items():
            assert Catalog(repository).resolve(f"{NAME}:{version}").snapshot_id == id
            repository.require_whole(repository.snapshot(id))
    collect(opened(root), Rules(grace_s=0), dict)
    assert check(opened(root), deep=True).ok
    assert published(tmp_path), "nothing was published in all rounds"
    print(dict(outcomes), len(published(tmp_path)))
