"""Which server is meant, and the file of ``aenv auth``."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from aenv_run.credentials import ServerAddress, chosen_server, credentials_file, forget, load, parse_url, save
from aenv_run.errors import AenvError, HostRefused, InvalidInput, Unauthenticated
from aenv_run.server_link import compatible, error_of
from aenv_run.version import VERSION

KEY, OTHER_KEY = "e2b_" + "0" * 60, "e2b_" + "1" * 60
URL, OTHER_URL = "https://aenv.example", "http://localhost:8000"
VARIABLES = ("AENV_API_URL", "AENV_API_KEY", "AENV_HOME", "AENV_REPOSITORY")


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable is set and there is no file."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_the_package_has_the_version_that_is_said() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["version"] == VERSION


def test_what_is_kept_comes_back_and_is_private() -> None:
    assert load() is None and not forget()
    path = save(ServerAddress.parse(URL, KEY))
    assert path == credentials_file() and path.stat().st_mode & 0o777 == 0o600
    save(ServerAddress.parse(OTHER_URL, OTHER_KEY))
    assert load() == ServerAddress(OTHER_URL, OTHER_KEY)
    assert OTHER_KEY not in repr(load()) and [entry.name for entry in path.parent.iterdir()] == ["credentials"]
    assert forget() and load() is None


def test_a_file_that_others_may_read_is_refused() -> None:
    save(ServerAddress.parse(URL, KEY)).chmod(0o640)
    with pytest.raises(HostRefused, match="others may read"):
        load()


@pytest.mark.parametrize(
    "text", ["", "url = 1", 'url = "x"', f'url = "{URL}"\napi_key = "short"', "\x80", "a" * 99999]
)
def test_a_damaged_file_says_what_to_do(text: str) -> None:
    save(ServerAddress.parse(URL, KEY)).write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidInput, match="damaged") as raised:
        load()
    assert "aenv auth" in raised.value.fix


@pytest.mark.parametrize(
    ("saved", "environment", "local", "expected"),
    [
        (False, {}, False, None),
        (True, {}, False, (URL, KEY)),
        (True, {}, True, None),
        (True, {"AENV_HOME": "/x"}, False, None),
        (True, {"AENV_REPOSITORY": "/x"}, False, None),
        (True, {"AENV_API_KEY": OTHER_KEY}, False, (URL, OTHER_KEY)),
        (False, {"AENV_API_KEY": KEY}, False, None),
        (False, {"AENV_API_URL": OTHER_URL, "AENV_API_KEY": KEY}, False, (OTHER_URL, KEY)),
        (False, {"AENV_API_URL": OTHER_URL, "AENV_API_KEY": KEY}, True, None),
        (True, {"AENV_API_URL": OTHER_URL, "AENV_API_KEY": OTHER_KEY}, False, (OTHER_URL, OTHER_KEY)),
        (True, {"AENV_API_URL": URL + "/"}, False, (URL, KEY)),
        (
            True,
            {"AENV_API_URL": OTHER_URL, "AENV_API_KEY": OTHER_KEY, "AENV_HOME": "/x"},
            False,
            (OTHER_URL, OTHER_KEY),
        ),
        (True, {"AENV_API_URL": ""}, False, (URL, KEY)),
    ],
)
def test_which_server_is_meant(
    saved: bool,
    environment: dict[str, str],
    local: bool,
    expected: tuple[str, str] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if saved:
        save(ServerAddress.parse(URL, KEY))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = chosen_server(local=local)
    assert (None if found is None else (found.url, found.api_key)) == expected


def test_a_key_goes_only_to_the_server_it_was_entered_for(monkeypatch: pytest.MonkeyPatch) -> None:
    save(ServerAddress.parse(URL, KEY))
    monkeypatch.setenv("AENV_API_URL", "https://other.example")
    with pytest.raises(Unauthenticated, match=r"no API key for https://other\.example"):
        chosen_server()


def test_a_server_and_a_repository_contradict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENV_API_URL", URL)
    monkeypatch.setenv("AENV_API_KEY", KEY)
    monkeypatch.setenv("AENV_REPOSITORY", "s3://bucket/x?region=eu-west-1")
    with pytest.raises(InvalidInput, match="AENV_REPOSITORY"):
        chosen_server()


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8000", "ftp://x", "http://", "http://u:p@x", "http://x?q", "http://x#f", "http://x/..", "http://x:99999",
     "http://x y", "http://x/%2e", "http://x\nHost: y"],
)  # fmt: skip
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        parse_url(url)
    assert "u:p" not in str(raised.value)


def test_urls_have_one_form() -> None:
    assert parse_url(" HTTP://Example.ORG:8000/aenv/ ") == "http://example.org:8000/aenv"
    assert parse_url("http://[::1]:8000") == "http://[::1]:8000"
    for url, in_the_open in (
        (URL, False),
        (OTHER_URL, False),
        ("http://127.0.0.2", False),
        ("http://far.example", True),
    ):
        assert ServerAddress(url, KEY).in_the_open is in_the_open


@pytest.mark.parametrize("key", ["", "short", "x" * 31, "x" * 257, "x" * 31 + "\n", "ä" * 40, "a b" * 20])
def test_what_can_be_no_key_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        ServerAddress.parse(URL, key)
    assert key == "" or key not in str(raised.value)


def test_versions_that_understand_each_other() -> None:
    assert compatible("0.1.9", "0.1.0") and not compatible("0.2.0", "0.1.0") and not compatible("", "0.1.0")


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (404, b'{"code": "not_found", "message": "no", "fix": "look"}', "not_found"),
        (409, b'{"code": 409, "error_code": "conflict", "message": "no"}', "conflict"),
        (401, b"", "unauthenticated"),
        (502, b"<html>", "node_unavailable"),
        (500, b'["code"]', "node_unavailable"),
        (500, b'{"code": 5, "message": "x"}', "node_unavailable"),
    ],
)
def test_errors_of_a_server_are_ours(status: int, body: bytes, code: str) -> None:
    error = error_of(ServerAddress(URL, KEY), status, body)
    assert isinstance(error, AenvError) and error.code == code
