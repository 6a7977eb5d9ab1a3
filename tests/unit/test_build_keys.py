"""Stage keys: what misses, what hits, and that nothing leaves the key without a reason."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from aenv_build.language.load import load
from aenv_build.language.recipe import Step
from aenv_build.language.verbs import Apt, Copy, Git, Pip, Ready, Run, Verify
from aenv_build.planning.keys import EXCLUSIONS, HostFacts
from aenv_build.planning.plan import Plan, make_plan
from aenv_run.types import Architecture, Digest

FACTS = HostFacts(Architecture("amd64"), Digest("sha256:" + "0" * 64))
RECIPE = """
version: 1
name: keys
vars: {used: a, unused: b}
base: {archive: root.tar}
machine: {cpus: 1, memory: 512MiB, disk: 1GiB}
steps:
  - {id: files, copy: {from: files, to: /srv}}
  - {id: work, run: {command: "echo {{ vars.used }}", timeout: 60}}
  - {id: text, write: {to: /srv/t, content: "t {{ vars.used }}"}}
  - {id: debs, apt: [git, curl]}
  - {id: wheels, pip: {packages: [six], requirements: req.txt}}
  - {id: check, verify: {run: "true"}}
  - {id: clone, git: {url: "https://a.example/r", commit: "0123456789012345678901234567890123456789", to: /srv/r}}
  - {id: service, start: "serve", ready: {port: 80}}
"""


def make_folder(tmp_path: Path) -> Path:
    """A recipe with what it copies."""
    (tmp_path / "root.tar").write_bytes(b"archive")
    files = tmp_path / "files"
    files.mkdir()
    (files / "a").write_text("a")
    (files / "link").symlink_to("a")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "req.txt").write_text("wheel")
    return tmp_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


def plan_of(folder: Path, facts: HostFacts = FACTS, variables: dict[str, str] | None = None) -> Plan:
    return make_plan(load(folder / "recipe.yaml", variables), facts)


def keys(plan: Plan) -> dict[str, str]:
    found = {stage.id: str(stage.key) for stage in plan.stages.values()}
    return found | {"base": str(plan.base.key), "output": str(plan.outputs[0].key)}


def edit(old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / "recipe.yaml").read_text()
        assert old in text
        (folder / "recipe.yaml").write_text(text.replace(old, new))

    return change


def relink(folder: Path) -> None:
    (folder / "files/link").unlink()
    (folder / "files/link").symlink_to("b")


@pytest.mark.parametrize(
    ("change", "first_miss"),
    [
        (lambda folder: (folder / "files/a").write_text("b"), "files"),
        (lambda folder: (folder / "files/a").chmod(0o755), "files"),
        (lambda folder: (folder / "files/a").rename(folder / "files/b"), "files"),
        (lambda folder: (folder / "files/empty").mkdir(), "files"),
        (relink, "files"),
        (lambda folder: (folder / "root.tar").write_bytes(b"other"), "base"),
        (edit("disk: 1GiB", "disk: 2GiB"), "base"),
        (edit("to: /srv", "to: /opt"), "files"),
        (edit("timeout: 60", "timeout: 60, user: nobody"), "work"),
        (edit("timeout: 60", "timeout: 60, shell: bash"), "work"),
        (edit("id: work, run", "id: work, salt: two, run"), "work"),
        (edit("disk: 1GiB", "disk: 1GiB, internet: true"), "work"),
        (edit("used: a", "used: z"), "work"),
        (edit('content: "t', 'content: "u'), "text"),
        (edit("to: /srv/t,", "to: /srv/t, mode: 0600,"), "text"),
        (edit("[git, curl]", "{packages: [git, curl], recommends: true}"), "debs"),
        (edit("packages: [six]", "packages: [six], venv: /opt/v"), "wheels"),
        (lambda folder: (folder / "req.txt").write_text("other"), "wheels"),
        (edit('commit: "0', 'commit: "1'), "clone"),
        (edit("to: /srv/r", "to: /srv/r, submodules: true"), "clone"),
        (edit("port: 80", "port: 81"), "service"),
        (edit("cpus: 1", "cpus: 2"), "service"),
    ],
)
def test_misses_from_the_changed_step_on(folder: Path, change: Callable[[Path], object], first_miss: str) -> None:
    before = keys(plan_of(folder))
    change(folder)
    after = keys(plan_of(folder))
    order = ["base", "files", "work", "text", "debs", "wheels", "clone", "service"]
    changed = [step for step in order if before[step] != after[step]]
    assert changed == order[order.index(first_miss) :]


def test_a_changed_hook_is_another_output_of_the_same_state(folder: Path) -> None:
    plain = keys(plan_of(folder))
    outputs = []
    for command in ("reseed", "reseed --hard"):
        text = f"{RECIPE}outputs: [{{on_restore: ['{command}']}}]\n"
        (folder / "recipe.yaml").write_text(text)
        found = keys(plan_of(folder))
        assert {**found, "output": plain["output"]} == plain
        outputs.append(found["output"])
    assert len({plain["output"], *outputs}) == 3


def test_misses_on_architecture_and_daemon(folder: Path) -> None:
    first = keys(plan_of(folder))
    other = keys(plan_of(folder, HostFacts(Architecture("arm64"), FACTS.envd_digest)))
    assert not set(first.values()) & set(other.values())
    daemon = keys(plan_of(folder, HostFacts(FACTS.architecture, Digest("sha256:" + "1" * 64))))
    assert daemon["base"] == first["base"] and daemon["files"] != first["files"]


def test_env_and_user_of_the_context_count(folder: Path) -> None:
    before = keys(plan_of(folder))
    edit("  - {id: work", "  - {id: who, user: daemon}\n  - {id: work")(folder)
    after = keys(plan_of(folder))
    assert before["files"] == after["files"] == after["who"] and before["work"] != after["work"]


def test_hits_on_touch_umask_and_clone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    before = keys(plan_of(folder))
    os.utime(folder / "files/a", (1, 1))
    (folder / "files/a").chmod(0o600)
    (folder / "files").chmod(0o700)
    assert keys(plan_of(folder)) == before
    clone = tmp_path_factory.mktemp("clone") / "c"
    shutil.copytree(folder, clone, symlinks=True)
    assert keys(plan_of(clone)) == before


@pytest.mark.parametrize(
    "change",
    [
        edit("unused: b", "unused: c"),
        edit("id: work", "id: labour"),
        edit("timeout: 60", "timeout: 61"),
        edit("id: work, run", "id: work, ttl: 7d, retry: 3, run"),
        edit("[git, curl]", "[curl, git, curl]"),
        edit("[git, curl]", "{packages: [git, curl], update: true}"),
        edit("to: /srv/t,", "to: /srv/./t, mode: '0644',"),
        edit("to: /srv/r", "to: /srv/r/, depth: 1"),
        edit("name: keys", "name: other"),
        edit("{cpus: 1, ", "{cpus: 1, internet: false, "),
    ],
)
def test_hits_on_what_is_excluded(folder: Path, change: Callable[[Path], None]) -> None:
    before = keys(plan_of(folder))
    change(folder)
    assert sorted(keys(plan_of(folder)).values()) == sorted(before.values())


def test_a_field_leaves_the_key_only_with_a_reason() -> None:
    """Every field of a verb's model is in its inputs by name, or has an entry in EXCLUSIONS."""
    none = set[str]()
    for model, renamed in (
        (Run, {"command"}),
        (Verify, none),
        (Copy, none),
        (Ready, none),
        (Apt, none),
        (Pip, none),
    ):
        for name, field in model.model_fields.items():
            shown = field.alias or name
            value = {"shell": "part of run's argument list"}.get(
                shown, EXCLUSIONS.get(f"{model.__name__}.{shown}")
            )
            in_key = shown in _inputs_of(model) or shown in renamed
            assert in_key or value, f"{model.__name__}.{shown} is neither in the key nor excluded with a reason"
    in_key_of_all = {"ready", "salt"}
    verbs = set(Step.VERBS) | in_key_of_all
    for name, field in Step.model_fields.items():
        shown = field.alias or name
        assert shown in verbs or f"Step.{shown}" in EXCLUSIONS
    assert all(EXCLUSIONS.values())


def _inputs_of(model: type) -> set[str]:
    from aenv_build.planning.keys import fields

    examples = {
        Run: Run(command="x"),
        Verify: Verify(run="x"),
        Copy: Copy.model_validate({"from": "a", "to": "/b"}),
        Ready: Ready(port=1),
        Apt: Apt(packages=("git",)),
        Pip: Pip(packages=("six",)),
        Git: Git(url="/srv/r", commit="0" * 40, to="/r"),
    }
    return set(fields(examples[model]))


def test_the_name_of_a_file_counts_where_a_copy_puts_it_into_a_directory(folder: Path) -> None:
    found = {}
    for name in ("one", "two", "link"):
        (folder / name).symlink_to("one") if name == "link" else (folder / name).write_text("same")
        for to in ("/etc/", "/etc/conf", f"/etc/{name}"):
            text = RECIPE.replace("{from: files, to: /srv}", f"{{from: {name}, to: {to}}}")
            (folder / "recipe.yaml").write_text(text)
            found[name, to] = keys(plan_of(folder))["files"]
    assert len({found[name, "/etc/"] for name in ("one", "two", "link")}) == 3
    assert len({found[name, "/etc/conf"] for name in ("one", "two", "link")}) == 1
    assert all(found[name, "/etc/"] == found[name, f"/etc/{name}"] for name in ("one", "two", "link"))
