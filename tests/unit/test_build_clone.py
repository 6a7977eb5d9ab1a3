"""git: its command, run here on repositories of the test's own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from aenv_build.language.verbs import Git
from aenv_build.planning import clone

ENV = {
    "PATH": os.environ["PATH"],
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    **{f"GIT_{who}_{what}": "test@a.example" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
}


def git(folder: Path, *words: str, **env: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=folder, env={**ENV, **env}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    """A repository of three commits and an annotated tag of the first."""
    folder = tmp_path / "origin"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    for number in range(3):
        (folder / "file").write_text(str(number))
        git(folder, "add", "file")
        git(folder, "commit", "-q", "-m", f"number {number}")
        if number == 0:
            git(folder, "tag", "-a", "-m", "first", "v0")
    return folder


def cloned(origin: Path, to: Path, commit: str, depth: int = 1) -> subprocess.CompletedProcess[str]:
    work = clone.git(Git(url=f"file://{origin}", commit=commit, to=str(to), depth=depth), str(to), [])
    return subprocess.run(work.argv, env={**ENV, **work.env}, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("depth", "history"), [(1, "1"), (0, "2")])
def test_a_commit_in_the_middle(origin: Path, tmp_path: Path, depth: int, history: str) -> None:
    commit = git(origin, "rev-parse", "main~1")
    done = cloned(origin, tmp_path / "a/b", commit, depth)
    assert (done.returncode, done.stdout) == (0, f"{commit} number 1\n"), done.stderr
    assert (tmp_path / "a/b/file").read_text() == "1"
    assert git(tmp_path / "a/b", "rev-list", "--count", "HEAD") == history


def test_a_server_that_gives_no_commit_by_its_id(origin: Path, tmp_path: Path) -> None:
    git(origin, "config", "uploadpack.allowAnySHA1InWant", "false")
    git(origin, "config", "protocol.version", "0")
    commit = git(origin, "rev-parse", "main~1")
    work = clone.git(Git(url=f"file://{origin}", commit=commit, to="/x"), str(tmp_path / "c"), [])
    env = {**ENV, **work.env, "GIT_CONFIG_COUNT": "3", "GIT_CONFIG_KEY_2": "protocol.version"}
    env["GIT_CONFIG_VALUE_2"] = "0"
    done = subprocess.run(work.argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and (tmp_path / "c/file").read_text() == "1", done.stderr


def test_what_is_no_such_commit_fails(origin: Path, tmp_path: Path) -> None:
    assert cloned(origin, tmp_path / "a", "0" * 40).returncode != 0
    done = cloned(origin, tmp_path / "b", git(origin, "rev-parse", "v0"))  # the tag's own id
    assert done.returncode == 1 and "not the commit" in done.stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").touch()
    done = cloned(origin, tmp_path / "full", git(origin, "rev-parse", "main"))
    assert done.returncode == 1 and "is there and not empty" in done.stderr


@pytest.mark.parametrize(("ref", "content"), [("main", "2"), ("v0", "0")])
def test_a_branch_or_tag_as_it_is_today(origin: Path, tmp_path: Path, ref: str, content: str) -> None:
    work = clone.git(Git(url=f"file://{origin}", ref=ref, to="/x"), str(tmp_path / "c"), [])
    done = subprocess.run(work.argv, env={**ENV, **work.env}, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and (tmp_path / "c/file").read_text() == content, done.stderr


def test_a_secret_is_the_password_of_its_host_alone(tmp_path: Path) -> None:
    step = Git(url="https://a.example:8/r", commit="0" * 40, to="/r")
    env = {**clone.git(step, "/r", ["TOKEN"]).env, "TOKEN": "s3cret-value"}
    assert "s3cret" not in str(clone.git(step, "/r", ["TOKEN"]))

    def fill(host: str) -> subprocess.CompletedProcess[str]:
        asked = f"protocol=https\nhost={host}\n\n"
        return subprocess.run(
            ["git", "credential", "fill"],
            cwd=tmp_path, env={**ENV, **env}, input=asked, capture_output=True, text=True, check=False,
        )  # fmt: skip

    assert "password=s3cret-value\n" in fill("a.example:8").stdout
    assert fill("b.example").returncode != 0
    assert "GIT_CONFIG_KEY_2" not in clone.git(step, "/r", []).env
