"""Forms of a recipe that a Dockerfile needs: bases of steps, several sources, modes, archives, variables."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from aenv_build.language.expansion import Unknown, expand, literal, parse, render, resolve
from aenv_build.planning.keys import HostFacts
from aenv_build.planning.plan import make_plan
from aenv_run.errors import AenvError, RecipeError, StepFailed
from tests.unit.build_site import HEAD, BuildSite
from tests.unit.pretend_build import ARCHITECTURE
from tests.unit.pretend_engine import FACTS, ZERO


@pytest.fixture
def site(tmp_path: Path) -> BuildSite:
    return BuildSite.make(tmp_path)


def sent(site: BuildSite) -> list[tuple[str, list[tuple[str, int]]]]:
    """Where each archive went, and the names and modes in it."""
    found = []
    for path, data in site.engine.put:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            found.append((path, [(member.name, member.mode) for member in tar]))
    return found


async def test_several_sources_go_into_one_folder_each_by_its_name(site: BuildSite) -> None:
    (site.folder / "a.txt").write_text("a")
    (site.folder / "dir").mkdir()
    (site.folder / "dir/b.sh").write_text("b")
    (site.folder / "dir/b.sh").chmod(0o755)
    await site.build(HEAD + "steps: [{copy: {from: [a.txt, dir], to: /srv, mode: 640}}]\n")
    assert sent(site) == [("/srv", [("a.txt", 0o640), ("b.sh", 0o640)])]


async def test_a_file_goes_into_a_directory_that_is_there(site: BuildSite) -> None:
    (site.folder / "tool").write_text("x")
    site.engine.there["/usr/local/bin"] = "FILE_TYPE_DIRECTORY"
    steps = "steps: [{copy: {from: tool, to: /usr/local/bin}}, {copy: {from: tool, to: /usr/local/new}}]\n"
    await site.build(HEAD + steps)
    assert sent(site) == [("/usr/local/bin", [("tool", 0o644)]), ("/usr/local", [("new", 0o644)])]


async def test_an_archive_is_unpacked_whole_and_nothing_else_is_taken_for_one(site: BuildSite) -> None:
    with tarfile.open(site.folder / "app.tgz", "w:gz") as tar:
        member = tarfile.TarInfo("lib/x")
        member.size, member.mode = 3, 0o755
        tar.addfile(member, io.BytesIO(b"abc"))
    await site.build(HEAD + "steps: [{copy: {from: app.tgz, to: /opt, unpack: true}}]\n")
    assert sent(site) == [("/opt", [("lib/x", 0o755)])]
    (site.folder / "plain").write_text("no archive, and long enough to be read as a header" * 20)
    with pytest.raises(StepFailed, match="plain cannot be unpacked"):
        await site.build(HEAD + "steps: [{copy: {from: plain, to: /opt, unpack: true}}]\n")
    assert site.clean()


async def test_steps_on_a_base_of_their_own_and_on_the_recipes(site: BuildSite) -> None:
    text = HEAD + (
        "steps:\n"
        "  - {id: other, base: {snapshot: tiny}}\n"
        "  - {id: compile, run: compile}\n"
        "  - {id: take, needs: [], copy: {from: {step: compile, path: /out}, to: /srv/}}\n"
    )
    path = site.folder / "recipe.yaml"
    path.write_text(text)
    from aenv_build.commands.prepare import Preparation
    from aenv_build.language.load import load
    from aenv_build.planning.lock import Lock
    from aenv_build.running.execute import build

    work = Preparation(site.home, site.repository, Lock())
    plan = await work.plan(load(path), site.engine)
    assert [plan.stages[step].parent for step in ("other", "compile", "take")] == [None, "other", None]
    with tarfile.open(fileobj=(packed := io.BytesIO()), mode="w") as tar:
        tar.addfile(tarfile.TarInfo("out"))
    site.engine.archives["/out"] = packed.getvalue()
    result = await build(plan, site.workshop)
    assert (result.misses, site.commands) == (2, ["compile"])
    again = await build(await work.plan(load(path), site.engine), site.workshop)
    assert again.misses == 0 and again.outputs[0].snapshot.id == result.outputs[0].snapshot.id
    assert site.clean()


async def test_a_directory_is_made_once_and_belongs_to_the_user(site: BuildSite) -> None:
    steps = "steps: [{user: app}, {workdir: /srv}, {mkdir: data}, {mkdir: {path: data, user: root}}]\n"
    (plan,) = site.plans(HEAD + steps)
    made = [stage.inputs.values for stage in plan.stages.values() if stage.step.mkdir]
    assert [(each["path"], each["user"]) for each in made] == [('"/srv/data"', '"app"'), ('"/srv/data"', '"root"')]
    assert (await site.build(HEAD + steps)).misses == 2


async def test_a_started_command_that_ends_well_may_have_left_a_daemon(site: BuildSite) -> None:
    steps = "steps: [{start: launch, ready: {command: is up}}]\noutputs: [{memory: true}]\n"
    await site.build(HEAD + steps)
    assert site.commands[:2] == ["launch", "is up"]
    site.engine.outcomes["fails"] = 3
    with pytest.raises(StepFailed, match="ended with 3 before it was ready"):
        site.engine.outcomes["is never up"] = 1
        await site.build(HEAD + "steps: [{start: fails, ready: is never up, timeout: 10}]\n")
    assert site.clean()


def test_env_is_expanded_by_what_was_before(site: BuildSite) -> None:
    steps = (
        "env: {PATH: /bin}\nsteps:\n"
        "  - {expand: true, env: {PATH: '/opt:$PATH', PRICE: '$$5', LIB: '/l${LIB:+:$LIB}',"
        " HOME: '${HOME:-/root}'}}\n"
        "  - {env: {PLAIN: $PATH}}\n"
    )
    (plan,) = site.plans(HEAD + steps)
    assert plan.outputs[0].context.env == {
        "A": "image",
        "PATH": "/opt:/bin", "PRICE": "$5", "LIB": "/l", "HOME": "/root", "PLAIN": "$PATH",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("{needs: [a], base: {empty: true}}", "a base stands on no step"),
        ("{base: {empty: true, snapshot: tiny}}", "base takes exactly one of"),
        ("{run: x, expand: true}", "'expand' belongs to a step with 'env'"),
        ("{env: {A: '${A'}, expand: true}", "the closing brace is missing"),
        ("{copy: {from: [a, b], to: /x, unpack: true}}", "'unpack' takes one archive"),
        ("{copy: {from: x, to: /x, mode: 9}}", "not a file mode"),
    ],
)
def test_what_is_refused(site: BuildSite, step: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        site.plans(f"{HEAD}steps:\n  - {{id: a, run: x}}\n  - {step}\n")


def test_rules_of_a_named_file_hold_in_its_folder(site: BuildSite) -> None:
    (site.folder / "ctx").mkdir()
    for name in ("keep", "drop"):
        (site.folder / "ctx" / name).write_text(name)
    (site.folder / "ctx/.dockerignore").write_text("drop\n")
    text = HEAD + "steps: [{id: c, copy: {from: ctx, to: /srv, ignore: ctx/.dockerignore}}]\n"
    (first,) = site.plans(text)
    (site.folder / "ctx/drop").write_text("another")
    (second,) = site.plans(text)
    assert first.stages["c"].key == second.stages["c"].key
    with pytest.raises(AenvError, match="does not lie in the folder"):
        site.plans(HEAD + "steps: [{copy: {from: recipe.yaml, to: /srv, ignore: ctx/.dockerignore}}]\n")


def test_a_base_of_nothing_has_a_key_of_its_own(site: BuildSite) -> None:
    from aenv_build.language.load import load

    path = site.folder / "recipe.yaml"
    path.write_text("version: 1\nname: made\nbase: {empty: true}\n")
    plan = make_plan(load(path), HostFacts(ARCHITECTURE, ZERO, FACTS))
    assert plan.base.inputs.values["type"] == '"aenv.base/empty/1"'


def test_what_is_unknown_stays_a_reference() -> None:
    def lookup(name: str) -> str | None:
        if name == "PATH":
            raise Unknown
        return {"A": "a$"}.get(name)

    parts = resolve(parse("$A:$PATH:${B:-b}:${PATH:+$A}$$"), lookup)
    assert literal(parts) is None
    assert render(parts) == "a$$:${PATH}:b:${PATH:+a$$}$$"
    assert expand(render(parts), {"PATH": "p"}.get) == "a$:p:b:a$$"
    with pytest.raises(ValueError, match="is not set: please"):
        expand("${X:?please}", {}.get)
