"""Commits and publishes until it is killed; says each on standard output once it is durable."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from aenv_run.catalog import Catalog
from aenv_run.repository import Repository
from aenv_run.store.posix import PosixStore
from aenv_run.types import Name, Tag
from tests.bytes_half import capture, draft


def main(root: Path, scratch: Path, seed: int) -> None:
    """Never returns."""
    source = random.Random(seed)
    repository = Repository(PosixStore(root))
    catalog = Catalog(repository)
    parent = None
    print("ready", flush=True)
    while True:
        captured = capture(scratch, source.randbytes(source.randrange(1, 300_000)), ram=source.randbytes(50_000))
        snapshot = repository.commit(captured, draft(parent))
        print("committed", snapshot.id, flush=True)
        version = catalog.publish(Name("loop"), snapshot.id, [Tag("latest")])
        print("published", version, snapshot.id, flush=True)
        catalog.label(Name("loop"), version, {"seed": str(seed)})
        if version % 3 == 0:
            catalog.promote(Name("loop"), Tag("stable"), version)
            print("promoted", version, flush=True)
        if version % 9 == 0:
            move = catalog.rollback(Name("loop"), Tag("stable"))
            print("rolled back", move.to_version, flush=True)
        if version % 7 == 3:
            catalog.remove(Name("loop"), version)
            print("removed", version, flush=True)
        parent = snapshot if len(snapshot.disk) < 8 else None


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
