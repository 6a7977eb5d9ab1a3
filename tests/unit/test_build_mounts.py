"""Cache mounts: what a guest leaves comes to the next one, inside its directory, within bounds."""

from __future__ import annotations

import io
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from aenv_build.cache.cache_mounts import ASIDE, MountStore, mount_limit_bytes
from aenv_build.commands.cache_command import cache
from aenv_build.reports import events
from aenv_build.running.execute import build
from aenv_run.errors import InvalidInput, StepFailed
from tests.unit.node_site import Site
from tests.unit.pretend_build import plan_of, workshop

PATH = "/root/.cache/pip"
RECIPE = f"""\
version: 1
name: shop
base: {{snapshot: tiny}}
steps:
  - {{id: make, run: "make 1", cache: [{PATH}]}}
"""


def tar_of(*names: str, size: int = 4) -> bytes:
    """As a guest gives a directory called pip; the names may be of any kind."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        top = tarfile.TarInfo("pip")
        top.type = tarfile.DIRTYPE
        tar.addfile(top)
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.uid = size, 1000
            tar.addfile(member, io.BytesIO(b"x" * size))
    return stream.getvalue()


async def run(site: Site, recipe: Path, *, limit: int = 1 << 30) -> list[str]:
    """Build; the notes."""
    told: list[events.BuildEvent] = []
    await build(plan_of(site, recipe), replace(workshop(site, told.append), mount_limit_bytes=limit))
    return [event.text for event in told if isinstance(event, events.StageNote)]


def given(site: Site) -> list[list[str]]:
    """The names in each archive that a guest got for the directory."""
    return [tarfile.open(fileobj=io.BytesIO(data)).getnames() for path, data in site.engine.put if path == PATH]


async def test_the_next_build_finds_it_and_no_state_has_it(site: Site, recipe: Path) -> None:
    site.engine.archives[PATH] = tar_of("pip/a", "pip/sub/b")
    await run(site, recipe)
    assert given(site) == [] and site.engine.removed == [PATH] and site.engine.moved == []
    recipe.write_text(RECIPE.replace("make 1", "make 2"))
    await run(site, recipe)
    assert given(site) == [["a", "sub/b"]]
    with tarfile.open(fileobj=io.BytesIO(site.engine.put[-1][1])) as tar:
        assert {member.uid for member in tar} == {1000}
    assert site.engine.removed == [PATH, PATH]


async def test_it_is_in_no_key(site: Site, recipe: Path) -> None:
    keyed = plan_of(site, recipe).stages["make"].key
    recipe.write_text(RECIPE.replace(f", cache: [{PATH}]", ""))
    assert plan_of(site, recipe).stages["make"].key == keyed


async def test_what_the_image_has_there_waits_aside(site: Site, recipe: Path) -> None:
    site.engine.archives[PATH] = tar_of("pip/a")
    site.engine.there[PATH] = "FILE_TYPE_DIRECTORY"
    await run(site, recipe)
    assert site.engine.moved == [(PATH, PATH + ASIDE), (PATH + ASIDE, PATH)]
    recipe.write_text(RECIPE.replace("make 1", "make 2"))
    site.engine.there[PATH] = "FILE_TYPE_FILE"
    with pytest.raises(StepFailed, match="is no directory in the image"):
        await run(site, recipe)


async def test_sockets_and_fifos_stay_behind_and_the_rest_is_kept(site: Site, recipe: Path) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        kinds = {"pip": tarfile.DIRTYPE, "pip/fifo": tarfile.FIFOTYPE, "pip/hard": tarfile.LNKTYPE}
        for name, kind in {**kinds, "pip/null": tarfile.CHRTYPE, "pip/a": tarfile.REGTYPE}.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "pip/fifo" if kind == tarfile.LNKTYPE else ""
            tar.addfile(member)
    site.engine.archives[PATH] = stream.getvalue()
    assert await run(site, recipe) == []
    recipe.write_text(RECIPE.replace("make 1", "make 2"))
    await run(site, recipe)
    assert given(site) == [["a"]]


async def test_of_a_step_that_fails_nothing_is_kept(site: Site, recipe: Path) -> None:
    site.engine.archives[PATH] = tar_of("pip/a")
    site.engine.outcomes["make 1"] = 1
    with pytest.raises(StepFailed):
        await run(site, recipe)
    assert site.engine.removed == [PATH]
    assert not list((site.home.cache / "mounts").glob("*"))


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"no tar at all" * 100, "not kept"),
        (tar_of("pip")[512:], "is no directory any more"),
        (tar_of("pip/a", size=3000)[:2000], "not kept"),
        (tar_of("pip/a", "pip/../../etc/passwd"), "has an entry elsewhere"),
        (tar_of("other/file"), "has an entry elsewhere"),
        (tar_of("/etc/shadow"), "has an entry elsewhere"),
        (tar_of("pip/big", size=600_000), "more than half of what cache mounts may keep"),
    ],
)
async def test_what_cannot_be_kept_costs_no_build(site: Site, recipe: Path, sent: bytes, why: str) -> None:
    site.engine.archives[PATH] = sent
    (note,) = await run(site, recipe, limit=1 << 20)
    assert PATH in note and why in note
    assert not list((site.home.cache / "mounts").glob("*"))


def test_the_least_recently_used_go_first_and_all_can_be_removed(tmp_path: Path) -> None:
    store = MountStore(tmp_path / "cache/mounts", 1000)
    for number, name in enumerate(("/a", "/b", "/c")):
        content = store.scratch()
        content.write_bytes(bytes(400))
        store.keep("recipe r", name, content)
        for one in (tmp_path / "cache/mounts").glob("*.tar"):
            os.utime(one, (number, number))
        assert store.find("recipe r", "/a") is not None  # used now
    assert {one.path for one in store.show()} == {"/a", "/c"}
    assert store.find("recipe other", "/a") is None and store.find("recipe r", "/b") is None

    (tmp_path / "cache/mounts/.new-left").write_bytes(b"left by a killed builder")
    shown = CliRunner().invoke(cache, ["--home", str(tmp_path)])
    assert shown.exit_code == 0 and "recipe r  /a" in shown.output and "800 B of at most 10.0 GiB" in shown.output
    cleared = CliRunner().invoke(cache, ["--home", str(tmp_path), "--clear"])
    assert "removed 824 B" in cleared.output and not list((tmp_path / "cache/mounts").iterdir())


def test_the_limit_is_a_setting() -> None:
    assert mount_limit_bytes({}) == 10 << 30
    assert mount_limit_bytes({"AENV_BUILD_CACHE_MIB": "5"}) == 5 << 20
    with pytest.raises(InvalidInput, match="AENV_BUILD_CACHE_MIB"):
        mount_limit_bytes({"AENV_BUILD_CACHE_MIB": "a lot"})
