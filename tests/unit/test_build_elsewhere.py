"""``--cache-from``: results of another repository, which may be absent, cut or lie."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from aenv_build.cache.elsewhere import Elsewhere
from aenv_build.cache.known import look_up
from aenv_build.cache.ledger import Ledger
from aenv_build.reports.events import StageHit, StageNote
from aenv_run.check import check
from aenv_run.config import open_repository
from aenv_run.errors import InvalidInput, Unsupported
from tests.s3.server import Server
from tests.unit.build_site import HEAD, BuildSite

RECIPE = (
    HEAD
    + "steps:\n  - {id: a, run: a}\n  - {id: b, run: b}\n  - {id: check, verify: v}\n"
    + "  - {id: up, start: serve}\noutputs: [{from: b}, {from: up, name: up}]\n"
)


def notes(site: BuildSite) -> list[str]:
    return [event.text for event in site.told if isinstance(event, StageNote)]


async def both(tmp_path: Path) -> tuple[BuildSite, BuildSite, str]:
    """A home that has built the recipe, one that has not, and the first one's repository."""
    for name in ("theirs", "ours"):
        (tmp_path / name).mkdir()
    theirs, ours = BuildSite.make(tmp_path / "theirs"), BuildSite.make(tmp_path / "ours")
    await theirs.build(RECIPE)
    return theirs, ours, str(theirs.home.repository)


async def test_what_another_repository_has_is_copied_and_nothing_runs(tmp_path: Path) -> None:
    theirs, ours, url = await both(tmp_path)
    before = sorted(path.name for path in theirs.home.repository.rglob("*"))
    result = await ours.build(RECIPE, cache_from=(str(tmp_path / "none"), url))
    assert ours.commands == [] and (result.hits, result.misses) == (5, 0)
    hits = {event.step: event.why for event in ours.told if isinstance(event, StageHit)}
    assert hits == {"base": "cached"} | dict.fromkeys(("a", "b", "check", "up"), f"cached, copied from {url}")
    assert not check(ours.repository).problems and ours.clean()
    assert sorted(path.name for path in theirs.home.repository.rglob("*")) == before, "it is only read"

    await ours.build(RECIPE)
    assert ours.commands == [], "what was copied is ours from then on"


async def test_from_a_bucket_and_without_one_that_is_not_there(tmp_path: Path, s3_server: Server) -> None:
    theirs, ours, _ = await both(tmp_path)
    url = s3_server.url(uuid4().hex)
    bucket = open_repository(url, theirs.home).store
    for info in theirs.repository.store.list(""):
        bucket.put_new(info.key, theirs.repository.store.read(info.key, limit_bytes=1 << 24))
    dead = "s3://bucket?region=x&endpoint=http://127.0.0.1:1"
    await ours.build(RECIPE, cache_from=(dead, url))
    assert ours.commands == [] and not check(ours.repository).problems
    (note,) = notes(ours)
    assert note.startswith(f"--cache-from {dead}: ") and "cannot be reached" in note


async def test_a_plan_copies_nothing_and_says_where_it_is(tmp_path: Path) -> None:
    _, ours, url = await both(tmp_path)
    (plan,) = ours.plans(RECIPE)
    before = list(ours.repository.ids())
    ledger = Ledger(ours.repository, elsewhere=Elsewhere.opened((url,), ours.home))
    known = look_up(plan, ledger, ours.repository)
    assert set(known.stages) == {"a", "b", "check", "up"} == set(known.origins)
    assert list(ours.repository.ids()) == before


async def test_damaged_bytes_are_a_warning_and_the_step_runs(tmp_path: Path) -> None:
    theirs, ours, url = await both(tmp_path)
    (plan,) = theirs.plans(RECIPE)
    kept = Ledger(theirs.repository).recall("stages", plan.stages["b"].key)
    assert kept is not None
    layer = theirs.home.repository / theirs.repository.blob_key(kept.snapshot.disk[-1].digest)
    layer.chmod(0o600)
    layer.write_bytes(bytes(layer.stat().st_size))
    await ours.build(RECIPE, cache_from=(url,))
    assert sorted(ours.commands) == ["b", "serve", "v"], "a was copied before"
    (note,) = notes(ours)
    assert note.startswith(f"--cache-from {url}: ") and "is damaged" in note and "building without it" in note
    assert not check(ours.repository).problems and ours.clean()


async def test_a_blob_that_is_longer_than_it_should_be_is_not_read(tmp_path: Path) -> None:
    theirs, ours, url = await both(tmp_path)
    for path in (theirs.home.repository / "blobs").rglob("*"):
        if path.is_file():
            path.chmod(0o600)
            path.write_bytes(path.read_bytes() + b"more")
    await ours.build(RECIPE, cache_from=(url,))
    assert len(ours.commands) == 4 and "instead of" in notes(ours)[0]
    assert not check(ours.repository).problems


async def test_an_absent_one_is_a_warning(tmp_path: Path) -> None:
    site = BuildSite.make(tmp_path)
    await site.build(RECIPE, cache_from=(str(tmp_path / "none"),))
    assert len(site.commands) == 4
    assert notes(site) == [f"--cache-from {tmp_path / 'none'}: there is no such directory; building without it"]


def test_what_can_be_no_repository_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    site = BuildSite.make(tmp_path)
    with pytest.raises(Unsupported, match="ftp://"):
        Elsewhere.opened(("ftp://bucket",), site.home)
    with pytest.raises(InvalidInput):
        Elsewhere.opened(("posix://relative",), site.home)
