"""Which repository is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from aenv_run.config import REPOSITORY_VARIABLE, open_repository
from aenv_run.errors import InvalidInput, Unsupported
from aenv_run.paths import Home
from aenv_run.store.posix import PosixStore


def root(url: str | None, home: Path) -> Path:
    store = open_repository(url, Home(home)).store
    assert isinstance(store, PosixStore)
    return store.root


def test_the_argument_goes_before_the_environment_before_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(REPOSITORY_VARIABLE, raising=False)
    assert root(None, tmp_path) == tmp_path / "repository"
    monkeypatch.setenv(REPOSITORY_VARIABLE, f"posix://{tmp_path}/env")
    assert root(None, tmp_path) == tmp_path / "env"
    assert root(f"{tmp_path}/argument", tmp_path) == tmp_path / "argument"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", ["s3://bucket/prefix", "http://host/path", "://x"])
def test_other_schemes_are_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(Unsupported):
        open_repository(url, Home(tmp_path))


@pytest.mark.parametrize("url", ["posix://relative/path", "posix:/one/slash", "posix://"])
def test_malformed_urls_are_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(InvalidInput):
        open_repository(url, Home(tmp_path))
