"""Changes a repository and a cache until it is killed; says each change once it is durable."""

from __future__ import annotations

import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from aenv_run.cache import BlobCache
from aenv_run.cache_limit import trim
from aenv_run.catalog import Catalog
from aenv_run.catalog.intake import take_in
from aenv_run.digest import digest_file
from aenv_run.errors import Conflict
from aenv_run.garbage.collect import Rules, collect
from aenv_run.garbage.state import Gate, Timing
from aenv_run.repository import Repository
from aenv_run.store import Store
from aenv_run.types import Name, Tag
from tests.bytes_half import capture, draft

LOOP, IMPORTED, LATEST, STABLE = Name("loop"), Name("imported"), Tag("latest"), Tag("stable")


def work(store: Store, place: Path, layout: Path, seed: int, said: TextIO) -> None:
    """Never returns. ``place`` is its own; ``layout`` is an exported snapshot."""
    source = random.Random(seed)
    repository = Repository(store, Gate(store, Timing(settle_s=0.0)))
    catalog = Catalog(repository)
    cache = BlobCache(place / "cache", repository)

    def say(*words: object) -> None:
        print(*words, file=said, flush=True)

    parent = None
    say("ready")
    while True:
        layer, ram = source.randbytes(source.randrange(1, 300_000)), source.randbytes(50_000)
        captured = capture(place / "scratch", layer, ram=ram)
        snapshot = repository.commit(captured, draft(parent))
        say("committed", snapshot.id)
        version = catalog.publish(LOOP, snapshot.id, [LATEST])
        say("published", version, snapshot.id)
        catalog.label(LOOP, version, {"seed": str(seed)})
        for blob in snapshot.blobs():
            assert digest_file(cache.path(blob)) == blob.digest
        if version % 2 == 0:
            trim(cache.root, 400_000, grace_s=0.0)
        if version % 3 == 0:
            catalog.promote(LOOP, STABLE, version)
        if version % 9 == 0:
            with suppress(Conflict):  # all that it was at may have been removed
                catalog.rollback(LOOP, STABLE)
        if version % 5 == 2:
            import_it(catalog, layout, place / f"import-{version}")
        if version % 4 == 1:
            say("collecting")
            collect(repository, Rules(grace_s=0.0), dict)
        if version % 7 == 3:
            catalog.remove(LOOP, version)
            say("removed", version)
        parent = snapshot if len(snapshot.disk) < 8 else None


def import_it(catalog: Catalog, layout: Path, scratch: Path) -> None:
    """As whoever never had it: its version is taken back afterwards."""
    scratch.mkdir()
    take_in(catalog, layout, scratch, name=IMPORTED)
    shutil.rmtree(scratch)
    catalog.remove(IMPORTED)
