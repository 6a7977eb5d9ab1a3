"""A directory of the repository that somebody moved and linked: nothing behind it is taken for missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from aenv_run.catalog import Catalog
from aenv_run.check import check
from aenv_run.errors import CorruptData
from aenv_run.garbage.collect import Rules, collect
from aenv_run.garbage.repair import repair
from aenv_run.garbage.state import Gate, Timing
from aenv_run.repository import Repository
from aenv_run.store.posix import PosixStore
from aenv_run.types import Name
from tests.bytes_half import commit

NOW = Timing(ttl_s=0.05, settle_s=0, poll_s=0.001)


@pytest.mark.parametrize("moved", ["refs", "refs/names", "refs/names/a", "snapshots", "blobs/sha256"])
def test_what_lies_behind_a_link_is_not_missing(tmp_path: Path, moved: str) -> None:
    store = PosixStore(tmp_path / "r")
    repository = Repository(store, Gate(store, NOW))
    snapshot = commit(repository, tmp_path, b"base")
    Catalog(repository).publish(Name("a"), snapshot.id)
    place, away = store.root / moved, tmp_path / "away"
    place.rename(away)
    place.symlink_to(away)
    before = {path for path in tmp_path.rglob("*") if path.is_file() and ".lock" not in path.name}
    assert not check(repository).ok
    with pytest.raises(CorruptData, match=moved) as raised:
        repair(repository)
    assert "move the data back" in str(raised.value)
    if not moved.startswith("blobs"):
        for dry_run in (True, False):
            with pytest.raises(CorruptData, match=moved):
                collect(repository, Rules(grace_s=0, dry_run=dry_run), dict)
    assert before <= set(tmp_path.rglob("*"))
    place.unlink()
    away.rename(place)
    assert check(repository, deep=True).ok
    assert collect(repository, Rules(grace_s=0), dict).snapshots == 0
