"""Which repository is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from aenv_run.config import REPOSITORY_VARIABLE, open_repository, repository_name
from aenv_run.errors import InvalidInput, Unsupported
from aenv_run.paths import Home
from aenv_run.store.posix import PosixStore
from aenv_run.store.s3 import S3Store
from aenv_run.store.s3_place import S3Place


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


@pytest.mark.parametrize("url", ["ftp://host/path", "://x"])
def test_other_schemes_are_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(Unsupported):
        open_repository(url, Home(tmp_path))


def test_a_place_in_a_bucket_has_one_url(tmp_path: Path) -> None:
    home = Home(tmp_path)
    name = repository_name("s3://bucket/a/b/?writers=many&addressing=path&region=eu-1&endpoint=HTTP://h:9/", home)
    assert name == "s3://bucket/a/b?region=eu-1&endpoint=http://h:9&addressing=path"
    assert repository_name(name, home) == name
    store = open_repository(name, home).store
    assert isinstance(store, S3Store)
    assert store.place == S3Place("bucket", "a/b", "eu-1", "http://h:9", "path")
    assert store.conditional and not tmp_path.joinpath("locks").exists()
    assert not open_repository("s3://bucket?writers=one", home).store.conditional


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///prefix",
        "s3://bucket/../other",
        "s3://bucket/.hidden",
        "s3://bucket?region=",
        "s3://bucket?region=a&region=b",
        "s3://bucket?region=EU",
        "s3://bucket?addressing=both",
        "s3://bucket?writers=2",
        "s3://bucket#fragment",
        "s3://bucket?endpoint=ftp://host",
        "s3://bucket?endpoint=http://",
        "s3://bucket?endpoint=http://host:99999",
    ],
)
def test_malformed_places_are_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(InvalidInput):
        open_repository(url, Home(tmp_path))


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:hush-hush@bucket/prefix",
        "s3://bucket?secret_key=hush-hush",
        "s3://bucket?endpoint=http://key:hush-hush@host",
        "s3://bucket?endpoint=http://host/?token=hush-hush",
        "s3://bucket/prefix?region=x&hush-hush",
    ],
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(tmp_path: Path, url: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        open_repository(url, Home(tmp_path))
    assert "hush" not in str(raised.value)


@pytest.mark.parametrize("url", ["posix://relative/path", "posix:/one/slash", "posix://"])
def test_malformed_urls_are_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(InvalidInput):
        open_repository(url, Home(tmp_path))
