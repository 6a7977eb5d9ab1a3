"""Secrets: given to the steps that name them, and nowhere else."""

from __future__ import annotations

import base64
import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from aenv_build.planning.lent import FOLDER as LENT_FOLDER
from aenv_build.planning.lent import Lent
from aenv_build.reports import events
from aenv_build.running.execute import build
from aenv_build.running.redact import Redactor
from aenv_build.running.secret_values import FOLDER, Secrets
from aenv_run.errors import InvalidInput, RecipeError, StepFailed
from tests.unit.node_site import Site
from tests.unit.pretend_build import plan_of, workshop
from tests.unit.pretend_engine import Ran

VALUE = "s3cret value/with+signs"
RECIPE = """\
version: 1
name: shop
base: {snapshot: tiny}
machine: {internet: true}
env: {TOKEN: of the recipe, http_proxy: of the recipe}
secrets: [TOKEN, UNUSED]
steps:
  - {id: fetch, run: fetch, secrets: [TOKEN]}
  - {id: plain, run: plain}
  - {id: check, verify: check, secrets: [TOKEN]}
"""


async def run(site: Site, recipe: Path, secrets: Secrets, *, keep: bool = False) -> list[events.BuildEvent]:
    """Build it; the events, also of a build that fails."""
    told: list[events.BuildEvent] = []
    lent = Lent(proxy="http://proxy.example", certificates=b"PEM")
    shop = replace(workshop(site, told.append), secrets=secrets, lent=lent, keep=keep)
    await build(plan_of(site, recipe), shop)
    return told


def ran_by(site: Site, commands: list[Ran]) -> None:
    """Remember all that guests run, and say the variables that they have."""

    def output(ran: Ran) -> list[tuple[str, bytes]]:
        commands.append(ran)
        said = json.dumps(ran.env).encode() + b"\n"
        return [("stdout", said[:40]), ("stdout", said[40:41]), ("stderr", said), ("stdout", said[41:])]

    site.engine.output = output


async def test_given_to_the_steps_that_name_them_and_shown_nowhere(site: Site, recipe: Path) -> None:
    commands: list[Ran] = []
    ran_by(site, commands)
    told = await run(site, recipe, Secrets({"TOKEN": VALUE}))
    env = {ran.command: ran.env for ran in commands}
    assert env["fetch"]["TOKEN"] == env["check"]["TOKEN"] == VALUE and env["plain"]["TOKEN"] == "of the recipe"
    assert env["plain"]["https_proxy"] == "http://proxy.example" and env["plain"]["http_proxy"] == "of the recipe"
    put = [path for path, _ in site.engine.put]
    assert put.count(FOLDER) == 2 and site.engine.removed.count(FOLDER) == 2
    assert site.engine.removed.count(LENT_FOLDER) == 3
    shown = "".join(event.model_dump_json() for event in told)
    assert '\\"TOKEN\\": \\"***\\"' in shown and VALUE not in shown
    nowhere(site, VALUE)


def nowhere(site: Site, value: str) -> None:
    """No file of the home, the repository in it, holds the value."""
    files = [path for path in site.home.root.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert value.encode() not in path.read_bytes(), path


async def test_a_step_that_names_none_shows_none(site: Site, recipe: Path) -> None:
    site.engine.output = lambda ran: [("stdout", f"left in a file by another: {VALUE}\n".encode())]
    told: list[events.BuildEvent] = []
    await build(plan_of(site, recipe), replace(workshop(site, told.append), secrets=Secrets({"TOKEN": VALUE})))
    shown = "".join(event.model_dump_json() for event in told)
    assert shown.count("left in a file by another: ***") == 3 and VALUE not in shown


async def test_another_value_is_a_hit_and_another_name_is_not(site: Site, recipe: Path) -> None:
    first = plan_of(site, recipe).stages
    await run(site, recipe, Secrets({"TOKEN": VALUE}))
    assert [
        event for event in await run(site, recipe, Secrets({})) if isinstance(event, events.StageStarted)
    ] == []
    recipe.write_text(RECIPE.replace("run: fetch, secrets: [TOKEN]", "run: fetch, secrets: [UNUSED]"))
    second = plan_of(site, recipe).stages
    assert first["fetch"].key != second["fetch"].key
    recipe.write_text(RECIPE.replace("run: plain", "run: plain, secrets: []"))
    assert plan_of(site, recipe).stages["plain"].key == first["plain"].key


async def test_a_missing_one_is_an_error_at_its_line_before_anything_runs(site: Site, recipe: Path) -> None:
    with pytest.raises(RecipeError, match=r"shop.yaml:8:39: the step 'fetch' needs the secret 'TOKEN'") as caught:
        await run(site, recipe, Secrets({"UNUSED": VALUE}))
    assert "--secret TOKEN=FILE or TOKEN=env:VARIABLE" in caught.value.fix
    assert next(site.engine.launches) == 0


@pytest.mark.parametrize("keep", [False, True])
async def test_a_failure_shows_none_and_keeps_none(site: Site, recipe: Path, keep: bool) -> None:
    site.engine.outcomes["fetch"] = 3
    ran_by(site, [])
    with pytest.raises(StepFailed) as caught:
        await run(site, recipe, Secrets({"TOKEN": VALUE}), keep=keep)
    assert "***" in caught.value.message and VALUE not in f"{caught.value.message}{caught.value.fix}"
    nowhere(site, VALUE)
    kept = [
        path for path in site.home.repository.rglob("*") if path.is_file() and b"failed-step" in path.read_bytes()
    ]
    assert bool(kept) is keep
    assert not any(b'"memory":{' in path.read_bytes() for path in kept)


async def test_no_state_with_memory_sees_one(site: Site, recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("  - {id: fetch", "  - {id: up, start: serve}\n  - {id: fetch"))
    with pytest.raises(RecipeError, match=r"shop.yaml:9:29: this step's state has memory"):
        plan_of(site, recipe)


def test_where_values_come_from(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("of a file\n")
    environ = {"A": "of the environment", "OTHER": "of another", "SHORT": "abc"}
    found = Secrets.read([f"B={tmp_path}/file", "C=env:OTHER"], ["A", "B", "C", "D"], environ)
    assert found.values == {"A": "of the environment", "B": "of a file", "C": "of another"}
    assert "of a file" not in repr(found)
    for options, declared in (
        (["A"], ["A"]),
        (["E=env:A"], ["A"]),
        (["A=env:NONE"], ["A"]),
        (["A=/nonexistent"], ["A"]),
        ([], ["SHORT"]),
    ):
        with pytest.raises(InvalidInput) as caught:
            Secrets.read(options, declared, environ)
        assert "abc" not in caught.value.message


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a_value_split_over_pieces_is_taken_out(size: int) -> None:
    value = "-----BEGIN-----\nline one\nline two\n-----END-----"
    said = f"x{value}y line one z {value[:20]}line t-line two {base64.b64encode(value.encode()).decode()}".encode()
    stream = Redactor([value]).stream()
    shown = b"".join(stream.feed(said[at : at + size]) for at in range(0, len(said), size)) + stream.end()
    assert shown == b"x***y *** z ***\nline line t-*** ***" or b"line one" not in shown
    assert b"line two" not in shown and shown.startswith(b"x***y *** z ***")


def test_text_of_errors_is_redacted_too() -> None:
    redactor = Redactor([VALUE])
    assert redactor.text(f"a {VALUE} b s3cret%20value%2Fwith%2Bsigns") == "a *** b ***"
    assert Redactor().text("as it is") == "as it is"


def test_bytes_that_are_no_text_are_refused_without_showing_them() -> None:
    with pytest.raises(InvalidInput, match="the secret TOKEN is not UTF-8 text") as told:
        Secrets.read((), {"TOKEN"}, {"TOKEN": "value\udcffrest"})
    assert "value" not in told.value.message


async def test_a_note_about_a_cache_shows_none(site: Site, recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("run: fetch,", "run: fetch, cache: [/c],"))
    site.engine.archives["/c"] = tar_of_one_elsewhere(VALUE)
    told = await run(site, recipe, Secrets({"TOKEN": VALUE}))
    notes = [event.text for event in told if isinstance(event, events.StageNote)]
    assert len(notes) == 1 and "not kept" in notes[0] and "***" in notes[0] and VALUE not in notes[0]


def tar_of_one_elsewhere(name: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        top = tarfile.TarInfo("c")
        top.type = tarfile.DIRTYPE
        tar.addfile(top)
        tar.addfile(tarfile.TarInfo(f"elsewhere {name}"))
    return stream.getvalue()
