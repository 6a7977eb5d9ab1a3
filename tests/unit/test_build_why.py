"""``--explain`` names the reason of each miss, and says of a cached step that it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from aenv_build.bases.image import ResolvedImage
from aenv_build.bases.image_documents import Config, RootFs
from aenv_build.cache.ledger import BASE, Notes
from aenv_build.language.image_reference import parse_image
from aenv_build.language.load import load
from aenv_build.planning.keys import HostFacts
from aenv_build.planning.plan import Plan, make_plan
from aenv_build.reports.events import StageHit, StageStarted
from aenv_run.errors import StepFailed
from aenv_run.paths import Home
from aenv_run.types import Architecture, Digest
from tests.unit.build_site import HEAD, BuildSite
from tests.unit.test_build_keys import FACTS, RECIPE, edit, make_folder, relink


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


def plan_of(folder: Path, facts: HostFacts = FACTS) -> Plan:
    return make_plan(load(folder / "recipe.yaml"), facts)


def reasons(home: Home, before: Plan, after: Plan) -> dict[str, str]:
    """Of each step that is missed: what is said of it, where its predecessor was built here."""
    Notes.of(home, before.source).write(before, {BASE, *before.stages})
    notes = Notes.of(home, after.source)
    former = {BASE: before.base.key} | {stage.id: stage.key for stage in before.stages.values()}
    now = {BASE: after.base.inputs} | {stage.id: stage.inputs for stage in after.stages.values()}
    return {step: notes.why_missed(step, inputs) for step, inputs in now.items() if former.get(step) != inputs.key}


@pytest.mark.parametrize(
    ("change", "first", "reason"),
    [
        (lambda folder: (folder / "files/a").write_text("b"), "files", "changed: the copied files"),
        (lambda folder: (folder / "files/a").chmod(0o755), "files", "changed: the copied files"),
        (relink, "files", "changed: the copied files"),
        (lambda folder: (folder / "root.tar").write_bytes(b"other"), BASE, "changed: the archive"),
        (edit("disk: 1GiB", "disk: 2GiB"), BASE, "changed: disk_mib (1024 -> 2048)"),
        (edit("to: /srv}", "to: /opt}"), "files", "changed: to (/srv -> /opt)"),
        (edit("timeout: 60", "timeout: 60, user: nobody"), "work", "changed: user (root -> nobody)"),
        (edit("id: work, run", "id: work, salt: two, run"), "work", "changed: salt (nothing -> two)"),
        (edit("used: a", "used: z"), "work", 'changed: run (["sh","-ec","echo a"] -> ["sh","-ec","echo z"])'),
        (edit("disk: 1GiB", "disk: 1GiB, internet: true"), "work", "changed: internet (false -> true)"),
    ],
)
def test_the_reason_is_named_and_the_steps_after_it_say_so(
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    change: Callable[[Path], object],
    first: str,
    reason: str,
) -> None:
    before = plan_of(folder)
    change(folder)
    found = reasons(Home(tmp_path_factory.mktemp("home")), before, plan_of(folder))
    assert found[first] == reason
    after = [why for step, why in found.items() if step != first]
    assert after and all("the state it starts from" in why for why in after)


def test_architecture_and_daemon(folder: Path, tmp_path: Path) -> None:
    before = plan_of(folder)
    other = plan_of(folder, HostFacts(Architecture("arm64"), FACTS.envd_digest))
    assert reasons(Home(tmp_path / "h"), before, other)[BASE] == "changed: architecture (amd64 -> arm64)"
    daemon = plan_of(folder, HostFacts(FACTS.architecture, Digest("sha256:" + "1" * 64)))
    found = reasons(Home(tmp_path / "h"), before, daemon)
    assert BASE not in found and found["files"] == "changed: the guest daemon"


def image(name: str, digit: str) -> ResolvedImage:
    return ResolvedImage(
        parse_image(name), Digest("sha256:" + digit * 64), (), Config(rootfs=RootFs(type="layers", diff_ids=()))
    )


def test_a_tag_that_moved_is_a_miss_and_another_name_of_the_image_is_not(folder: Path, tmp_path: Path) -> None:
    (folder / "recipe.yaml").write_text(RECIPE.replace("{archive: root.tar}", "{image: 'docker://a:1'}"))
    source = load(folder / "recipe.yaml")
    before = make_plan(source, FACTS, image=image("docker://a:1", "1"))
    same = make_plan(source, FACTS, image=image("docker://b/c:2", "1"))
    moved = make_plan(source, FACTS, image=image("docker://a:1", "2"))
    home = Home(tmp_path / "h")
    assert reasons(home, before, same) == {}
    found = reasons(home, before, moved)
    assert found[BASE].startswith("changed: the image (sha256:1111") and found["files"].endswith("starts from")


def test_what_a_step_is_written_like_does_not_count(folder: Path, tmp_path: Path) -> None:
    """Comments, order of keys, a renamed var, a fragment, another id: the same step is a hit."""
    before = plan_of(folder)
    text = RECIPE.replace("used: a", "renamed: a").replace("vars.used", "vars.renamed")
    line = "  - {id: files, copy: {from: files, to: /srv}}\n"
    assert line in text
    (folder / "first.yaml").write_text("# a comment\nsteps:\n  - copy: {to: /srv, from: files}\n")
    (folder / "recipe.yaml").write_text(text.replace(line, "").replace("steps:", "include: first.yaml\nsteps:"))
    after = plan_of(folder)
    assert [stage.key for stage in after.stages.values()] == [stage.key for stage in before.stages.values()]
    assert next(iter(after.stages)) == "copy-1"


async def test_a_build_goes_on_from_the_last_good_stage(tmp_path: Path) -> None:
    site = BuildSite.make(tmp_path)
    text = HEAD + "steps:\n  - {id: a, run: a}\n  - {id: b, run: b}\n  - {id: c, run: c}\n"
    site.engine.first_outcomes["c"] = [1]
    with pytest.raises(StepFailed):
        await site.build(text)
    assert site.commands == ["a", "b", "c"] and site.clean()
    site.told.clear()
    await site.build(text)
    assert site.commands == ["a", "b", "c", "c"] and site.clean()
    hits = {event.step: event.why for event in site.told if isinstance(event, StageHit)}
    assert hits == {"base": "cached", "a": "cached", "b": "cached"}
    started = {event.step: event.why for event in site.told if isinstance(event, StageStarted)}
    assert started == {"c": "never built here"}
