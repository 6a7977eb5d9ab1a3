"""aenv template, pull and build: of a home without a server, and what is passed on to the builder's programs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from aenv_run.cli.command import run
from aenv_run.cli.template_api import TemplateApi
from aenv_run.cli.templates import default_name, follow
from aenv_run.errors import CommandTimeout, StepFailed
from tests.unit.node_site import Site
from tests.unit.test_templates_api import begin, ended, serving
from tests.unit.test_templates_api import run as step


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("debian:12", "debian"), ("ghcr.io/Team/App:3", "app"), ("host:5000/x/y_z@sha256:" + "0" * 64, "y_z"),
        ("docker://a/b.c", "b.c"), ("://", "image"),
    ],
)  # fmt: skip
def test_a_template_is_named_like_its_image(image: str, name: str) -> None:
    assert default_name(image) == name


async def test_the_log_of_a_build_is_shown_to_its_end(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(site) as api:
        remote = TemplateApi(api.http, remote=True)
        build_id = await begin(api, step("talk"))
        await follow(remote, "made", build_id, None)
        said = capsys.readouterr().err
        assert said.count("line 249\n") == 1 and said.endswith("Build succeeded: made\n")
        with pytest.raises(StepFailed, match=r"Build failed: exited with 3 \(step: 1\)"):
            await follow(remote, "made", await begin(api, step("fail")), None)
        with pytest.raises(CommandTimeout, match="aenv template watch made"):
            await follow(remote, "made", await begin(api, step("hang")), 0.1)


def test_templates_of_a_home_without_a_server(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AENV_HOME", str(site.home.root))

    async def make() -> None:
        async with serving(site) as api:
            await ended(api, await begin(api, step("ok")))

    asyncio.run(make())
    assert run(["template", "list"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:3] for row in rows[1:]] == [["made", "made", "ready"], ["tiny", "tiny", "ready"]]
    assert run(["template", "tag", "made", "stable"]) == 0
    assert run(["template", "tag", "made", "stable", "--delete"]) == 0
    assert run(["template", "tag", "made", "stable", "--delete"]) == 66
    assert run(["template", "watch", "made"]) == 0
    assert "Build succeeded: made" in capsys.readouterr().err
    assert run(["template", "delete", "made"]) == 0
    assert run(["template", "delete", "made"]) == 66
    assert run(["pull", "debian:12", "--detach"]) == 69
    assert run(["pull", "not an image"]) == 64


def test_a_dockerfile_is_translated_in_its_own_program(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian:12\nARG A\nRUN echo $A\n")
    out = tmp_path / "recipe.yaml"
    options = ["--name", "made", "--build-arg", "A=1", "--image", "debian:12=snapshot:tiny", "--mem", "256"]
    assert run(["build", str(tmp_path), "-o", str(out), *options]) == 0
    text = out.read_text()
    assert "name: made" in text and "snapshot: tiny" in text and "memory: 256MiB" in text and "A: '1'" in text
    (tmp_path / "Dockerfile").write_text("FROM debian:12\nONBUILD RUN x\n")
    assert run(["build", str(tmp_path), "-o", str(out)]) == 64
    assert "Dockerfile:2: ONBUILD" in capfd.readouterr().err
