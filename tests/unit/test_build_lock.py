"""``recipe.lock``: what moving names mean is written down, used, and compared with what they mean today."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from aenv_build.bases.release import require_release
from aenv_build.commands.prepare import Preparation
from aenv_build.language.load import Source, load
from aenv_build.language.recipe import Debootstrap
from aenv_build.planning.lock import Lock, Pin, lock_path, read_lock, require_same, write_lock
from aenv_build.planning.pins import pins_today
from aenv_build.planning.plan import Plan
from aenv_run.digest import digest_bytes
from aenv_run.errors import BaseUnavailable, Conflict, NotFound, RecipeError, Unsupported
from aenv_run.types import Digest, Name
from tests.cases.image_layers import file
from tests.images import Layout
from tests.unit.build_site import BuildSite

COMMIT = "c" * 40


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and its address on loopback."""
    folder = tmp_path / "served"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield folder, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def recipe(site: BuildSite, base: str, steps: str = "[{run: x}]") -> Path:
    path = site.folder / "recipe.yaml"
    path.write_text(f"version: 1\nname: n\nbase: {base}\nsteps: {steps}\n")
    return path


async def today(site: BuildSite, path: Path) -> Lock:
    return await pins_today([load(path)], site.home, site.repository)


async def planned(site: BuildSite, path: Path, lock: Lock | None) -> Plan:
    return await Preparation(site.home, site.repository, lock or Lock()).plan(load(path), site.engine)


async def test_a_tag_that_moves_is_seen_by_locked_and_not_followed_by_a_build(tmp_path: Path) -> None:
    site = BuildSite.make(tmp_path)
    layout = Layout(tmp_path / "layout")
    one = layout.name("app", layout.image([file("1")]))
    path = recipe(site, "{image: 'oci:layout:app'}")
    lock = await today(site, path)
    assert lock.pins == (Pin(kind="image", name="oci:layout:app", pin=one["digest"]),)
    assert write_lock(path, lock) == tmp_path / "recipe.lock"
    assert read_lock(path) == lock
    require_same(path, read_lock(path), await today(site, path))

    two = layout.image([file("2")])
    index = tmp_path / "layout/index.json"
    document = json.loads(index.read_text())
    document["manifests"][0] |= two
    index.write_text(json.dumps(document))
    moved = await today(site, path)
    with pytest.raises(Conflict) as told:
        require_same(path, lock, moved)
    assert f"image oci:layout:app is locked to {one['digest']}; today it is {two['digest']}" in told.value.message
    pinned, free = await planned(site, path, lock), await planned(site, path, None)
    assert pinned.base.image is not None and pinned.base.image.manifest_digest == one["digest"]
    assert free.base.image is not None and free.base.image.manifest_digest == two["digest"]


async def test_a_snapshot_stays_what_it_was(tmp_path: Path) -> None:
    site = BuildSite.make(tmp_path)
    path = recipe(site, "{snapshot: tiny}")
    lock = await today(site, path)
    result = await site.build("version: 1\nname: other\nbase: {snapshot: tiny}\nsteps: [{run: x}]\n")
    site.site.tools.catalog.publish(Name("tiny"), result.outputs[0].snapshot.id, ())
    recipe(site, "{snapshot: 'tiny:2'}")
    assert (await today(site, path)).pins[0].pin == result.outputs[0].snapshot.id
    recipe(site, "{snapshot: 'tiny:1'}")
    first = (await today(site, path)).pins[0].pin
    named = Lock.of([Pin(kind="snapshot", name="tiny:2", pin=first)])
    recipe(site, "{snapshot: 'tiny:2'}")
    assert (await planned(site, path, named)).base.snapshot == first == lock.pins[0].pin


async def test_another_archive_than_the_locked_one_is_refused_at_its_line(tmp_path: Path) -> None:
    site = BuildSite.make(tmp_path)
    (tmp_path / "root.tar").write_bytes(b"one")
    path = recipe(site, "{archive: root.tar}")
    lock = await today(site, path)
    plain = await planned(site, path, None)
    assert (await planned(site, path, lock)).base.key == plain.base.key
    (tmp_path / "root.tar").write_bytes(b"two")
    with pytest.raises(RecipeError, match=r"recipe\.yaml:3:17: root\.tar is locked to sha256:.* today") as told:
        await planned(site, path, lock)
    assert "aenv-build lock" in told.value.fix


async def test_a_release_is_bound_to_its_signed_file(tmp_path: Path, mirror: tuple[Path, str]) -> None:
    folder, url = mirror
    release = folder / "debian/dists/bookworm/InRelease"
    release.parent.mkdir(parents=True)
    release.write_bytes(b"signed")
    site = BuildSite.make(tmp_path)
    path = recipe(site, f"{{debootstrap: {{suite: bookworm, mirror: '{url}/debian'}}}}")
    lock = await today(site, path)
    assert lock.pins[0] == Pin(kind="release", name=f"{url}/debian bookworm", pin=digest_bytes(b"signed"))
    plan, plain = await planned(site, path, lock), await planned(site, path, None)
    assert plan.base.release == digest_bytes(b"signed") and plan.base.key != plain.base.key

    base = Debootstrap(suite="bookworm", mirror=f"{url}/debian")
    await require_release(base, digest_bytes(b"signed"))
    release.write_bytes(b"later")
    with pytest.raises(BaseUnavailable, match="the archive moved on"):
        await require_release(base, Digest(digest_bytes(b"signed")))
    path = recipe(site, f"{{debootstrap: {{suite: gone, mirror: '{url}/debian'}}}}")
    with pytest.raises(BaseUnavailable, match=r"recipe\.yaml:3:\d+: http.*InRelease answers 404"):
        await today(site, path)
    with pytest.raises(Unsupported, match=r"recipe\.yaml:3:\d+: a release of the default mirror cannot be locked"):
        await today(site, recipe(site, "{debootstrap: {suite: bookworm}}"))


def two_commits(folder: Path) -> tuple[str, str]:
    """A repository served by its files; the tag v1 is of the first commit, main of the second."""

    def git(*words: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        argv = ["git", "-C", str(folder), *who, *words]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q", "-b", "main")
    git("commit", "-q", "--allow-empty", "-m", "one")
    git("tag", "-a", "v1", "-m", "tagged")
    git("commit", "-q", "--allow-empty", "-m", "two")
    git("update-server-info")
    return git("rev-parse", "main~1"), git("rev-parse", "main")


async def test_refs_of_git_become_commits(tmp_path: Path, mirror: tuple[Path, str]) -> None:
    folder, url = mirror
    one, two = two_commits(folder)
    site = BuildSite.make(tmp_path)
    step = f"{{git: {{url: '{url}/.git', commit: {COMMIT}, to: /srv}}}}"
    path = recipe(site, "{snapshot: tiny}", f"[{step}, {step}, {step}]")

    def with_refs(*refs: str) -> Source:
        source = load(path)
        steps = tuple(
            step.model_copy(update={"git": step.git and step.git.model_copy(update={"commit": None, "ref": ref})})
            for step, ref in zip(source.recipe.steps, refs, strict=False)
        )
        return replace(source, recipe=source.recipe.model_copy(update={"steps": steps}))

    lock = await pins_today([with_refs("main", "v1")], site.home, site.repository)
    assert [pin.pin for pin in lock.pins if pin.kind == "git"] == [two, one]
    plan = await Preparation(site.home, site.repository, lock).plan(with_refs("main", "v1"), site.engine)
    assert [stage.step.git and stage.step.git.commit for stage in plan.stages.values()] == [two, one]
    with pytest.raises(NotFound, match=r"recipe\.yaml:4:\d+: http.* has no branch or tag gone"):
        await pins_today([with_refs("gone")], site.home, site.repository)


def test_of_some_cells_what_others_have_locked_is_not_left_over(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    one, other = (Pin(kind="archive", name=name, pin=f"sha256:{'1' * 64}") for name in ("a.tar", "b.tar"))
    moved = Pin(kind="archive", name="a.tar", pin=f"sha256:{'2' * 64}")
    require_same(path, Lock.of([one, other]), Lock.of([one]), whole=False)
    with pytest.raises(Conflict, match=r"a\.tar is locked to sha256:1"):
        require_same(path, Lock.of([one, other]), Lock.of([moved]), whole=False)


def test_locked_names_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    a, b = (Pin(kind="git", name=name, pin=COMMIT) for name in ("a main", "b main"))
    with pytest.raises(NotFound, match="there is no"):
        require_same(path, None, Lock())
    with pytest.raises(Conflict) as told:
        require_same(path, Lock.of([a]), Lock.of([b]))
    assert told.value.message.splitlines()[1:] == [
        "  git a main is locked, and nothing in the recipe is called so",
        f"  git b main is not locked; today it is {COMMIT}",
    ]
    require_same(path, Lock.of([a, b]), Lock.of([b, a, a]))


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"format": "aenv.lock/2"}', '{"pins": [{"kind": "git", "name": "x", "pin": "-x"}]}', "[" * 9999],
)
def test_what_is_no_lock_is_told_with_its_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recipe.yaml"
    lock_path(path).write_text(text)
    with pytest.raises(RecipeError, match=r"recipe\.lock:1:1: this is no lock"):
        read_lock(path)
    lock_path(path).unlink()
    assert read_lock(path) is None
