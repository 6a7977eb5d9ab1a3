""".aenvignore, which is to behave as .dockerignore does."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from aenv_build.planning.files import examine, write_tar
from aenv_build.planning.ignore import Ignore, parse
from aenv_run.errors import InvalidInput


def hidden(rules: str, *paths: str) -> list[str]:
    ignore = Ignore(Path("x"), parse(rules, "x"))
    return [path for path in paths if ignore.hides(path)]


@pytest.mark.parametrize(
    ("rules", "left_out", "taken"),
    [
        ("a", ["a", "a/b", "a/b/c"], ["ab", "b/a"]),
        ("/a/", ["a", "a/b"], ["b/a"]),
        ("*.md", ["x.md"], ["d/x.md", "md"]),
        ("*/x", ["a/x", "a/x/y"], ["x", "a/b/x"]),
        ("**/x", ["x", "a/x", "a/b/x/c"], ["xx", "a/xx"]),
        ("a/**", ["a/b", "a/b/c"], ["a", "b"]),
        ("a/**/z", ["a/z", "a/b/z", "a/b/c/z"], ["z", "a/b"]),
        ("**", ["a", "a/b"], []),
        ("te?t", ["test", "text"], ["te/t", "tet"]),
        ("[a-c]x", ["ax", "cx"], ["dx"]),
        ("[^a]x", ["bx"], ["ax"]),
        (r"\*", ["*"], ["a"]),
        (r"\#x", ["#x"], []),
        ("# comment\n\n  b  ", ["b"], ["# comment", "comment"]),
        ("./a/../b", ["b"], ["a"]),
        (".", [], ["a"]),
        ("*.md\n!README.md", ["x.md"], ["README.md"]),
        ("*.md\n!README*.md\nREADME-secret.md", ["README-secret.md", "x.md"], ["README.md"]),
        ("!a\na", ["a"], []),
        ("d\n!d/keep", ["d", "d/x"], ["d/keep", "d/keep/y"]),
        ("a.b", ["a.b"], ["axb"]),
        ("a+(b)", ["a+(b)"], ["aab"]),
    ],
)
def test_as_docker_has_it(rules: str, left_out: list[str], taken: list[str]) -> None:
    assert hidden(rules, *left_out, *taken) == left_out


@pytest.mark.parametrize("rules", ["ok\n[", "ok\n[a", "ok\n[z-a]", "ok\n!", "ok\na\\"])
def test_a_pattern_that_is_none_is_named_by_its_line(rules: str) -> None:
    with pytest.raises(InvalidInput, match=r"^x:2: "):
        parse(rules, "x")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("app/main.py", "app/data/big", "app/data/sub/seed.sql", "app/__pycache__/x.pyc", "other/y"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / ".aenvignore").write_text("**/__pycache__\napp/data\n!app/data/sub/seed.sql\n")
    return tmp_path


def names(folder: Path, copied: Path, tmp_path: Path) -> list[str]:
    files = examine(copied, Ignore.beside(folder, copied))
    write_tar(files, tmp_path / "t.tar")
    with tarfile.open(tmp_path / "t.tar") as tar:
        return [member.name for member in tar]


def test_a_copy_brings_the_rest_and_the_folders_of_what_is_taken_in_again(folder: Path, tmp_path: Path) -> None:
    assert names(folder, folder / "app", tmp_path) == ["data", "data/sub", "data/sub/seed.sql", "main.py"]
    assert names(folder, folder / "other", tmp_path) == ["y"]


def test_what_is_left_out_does_not_count_and_may_be_anything(folder: Path) -> None:
    def digest() -> str:
        return str(examine(folder / "app", Ignore.beside(folder, folder / "app")).digest)

    before = digest()
    (folder / "app/data/big").write_text("changed")
    os.mkfifo(folder / "app/data/pipe")
    assert digest() == before
    (folder / "app/data/sub/seed.sql").write_text("changed")
    assert digest() != before


def test_a_directory_elsewhere_has_its_own(folder: Path, tmp_path: Path) -> None:
    recipe = folder / "recipes"
    recipe.mkdir()
    (folder / "app/.aenvignore").write_text("data\n__pycache__\n")
    assert names(recipe, folder / "app", tmp_path) == [".aenvignore", "main.py"]
    assert names(recipe, folder / "other", tmp_path) == ["y"]


def test_all_of_it_left_out_is_an_error(folder: Path) -> None:
    (folder / ".aenvignore").write_text("app\nother/y\n")
    for copied in ("app", "app/main.py", "other/y"):
        with pytest.raises(InvalidInput, match="leaves out all of it"):
            examine(folder / copied, Ignore.beside(folder, folder / copied))
