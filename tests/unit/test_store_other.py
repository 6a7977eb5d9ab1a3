"""Stores that are only read: http, and what fsspec has for local files and memory in place of gs and az."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from aenv_run.config import open_repository, repository_name
from aenv_run.errors import CorruptData, InvalidInput, NotFound, ProtocolError, StoreUnavailable, Unsupported
from aenv_run.paths import Home
from aenv_run.store import StoreKey
from aenv_run.store.other import OtherStore
from aenv_run.store.posix import PosixStore

CONTENT = {
    "refs/names/tiny/1": b"{}",
    "blobs/sha256/ab/abc": os.urandom(300_000),
    "blobs/sha256/b0/x": b"",
    "top": b"1",
}


class Ranges(SimpleHTTPRequestHandler):
    """Python's server with ranges, which it lacks."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        asked = self.headers.get("Range", "").removeprefix("bytes=")
        path = Path(self.translate_path(self.path))
        if not asked or not path.is_file():
            super().do_GET()
            return
        first, last = (int(number) for number in asked.split("-"))
        data = path.read_bytes()
        part = data[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


class NoRanges(SimpleHTTPRequestHandler):
    """As Python has it."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[[type[SimpleHTTPRequestHandler]], str]]:
    """Serves ``tmp_path / "site"``; gives the URL of the repository in it."""
    servers: list[tuple[ThreadingHTTPServer, threading.Thread]] = []

    def serve(handler: type[SimpleHTTPRequestHandler]) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(tmp_path / "site")))
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}/deep/repository"

    yield serve
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A repository's directory with ``CONTENT``."""
    root = tmp_path / "site" / "deep" / "repository"
    store = PosixStore(root)
    for key, data in CONTENT.items():
        store.put_new(StoreKey(key), data)
    (root.parent / "outside").write_bytes(b"outside")
    return root


@pytest.fixture(params=["http", "file", "memory"])
def store(request: pytest.FixtureRequest, written: Path, tmp_path: Path) -> Iterator[OtherStore]:
    if request.param == "http":
        url = request.getfixturevalue("served")(Ranges)
        opened = open_repository(url, Home(tmp_path)).store
        assert isinstance(opened, OtherStore)
        yield opened
    elif request.param == "file":
        yield OtherStore(fsspec.filesystem("file"), str(written), "file")
    else:
        memory = fsspec.filesystem("memory")
        for key, data in CONTENT.items():
            memory.pipe_file(f"/deep/repository/{key}", data)
        yield OtherStore(memory, "/deep/repository", "memory")
        memory.rm("/deep", recursive=True)


def test_all_is_read(store: OtherStore) -> None:
    assert [(info.key, info.size_bytes) for info in store.list("")] == [
        (key, len(data)) for key, data in sorted(CONTENT.items())
    ]
    assert [info.key for info in store.list("blobs/sha256/a")] == ["blobs/sha256/ab/abc"]
    assert list(store.list("none/")) == [] and list(store.list("../")) == [] and list(store.strays()) == []
    for key, data in CONTENT.items():
        assert store.read(StoreKey(key), limit_bytes=len(data)) == data
        with store.open(StoreKey(key)) as file:
            assert file.read() == data
    blob = StoreKey("blobs/sha256/ab/abc")
    assert store.read_range(blob, 1000, 70_000) == CONTENT[blob][1000:71_000]
    assert store.read_range(blob, 299_999, 1) == CONTENT[blob][-1:]
    assert store.read_range(blob, 5, 0) == b""


def test_what_is_missing_or_too_large(store: OtherStore) -> None:
    absent = StoreKey("blobs/sha256/ab/none")
    assert store.stat(absent) is None and store.local_path(absent) is None
    for call in (
        lambda: store.read(absent, limit_bytes=1),
        lambda: store.read_range(absent, 0, 1),
        lambda: store.open(absent).__enter__(),
    ):
        with pytest.raises(NotFound):
            call()
    with pytest.raises(CorruptData):
        store.read(StoreKey("top"), limit_bytes=0)
    with pytest.raises(CorruptData):
        store.read_range(StoreKey("top"), 0, 2)
    with pytest.raises(InvalidInput):
        store.read_range(StoreKey("top"), -1, 2)


def test_nothing_is_written(store: OtherStore, tmp_path: Path) -> None:
    for call in (
        lambda: store.put_new(StoreKey("new"), b"1"),
        lambda: store.put_file(StoreKey("new"), tmp_path),
        lambda: store.swap(StoreKey("top"), b"2", expected=b"1"),
        lambda: store.delete(StoreKey("top")),
        store.require_writable,
    ):
        with pytest.raises(Unsupported, match="compare and swap"):
            call()
    assert not store.conditional


def test_a_server_that_gives_no_ranges_is_told(
    written: Path, served: Callable[[type[SimpleHTTPRequestHandler]], str], tmp_path: Path
) -> None:
    store = open_repository(served(NoRanges), Home(tmp_path)).store
    with pytest.raises((ProtocolError, StoreUnavailable)):
        store.read_range(StoreKey("blobs/sha256/ab/abc"), 10, 20)
    assert store.read(StoreKey("top"), limit_bytes=1) == b"1"


def test_nobody_there(tmp_path: Path) -> None:
    store = open_repository("http://127.0.0.1:1/repository", Home(tmp_path)).store
    with pytest.raises(StoreUnavailable, match=r"http://127\.0\.0\.1:1/repository"):
        store.stat(StoreKey("top"))
    with pytest.raises(StoreUnavailable):
        list(store.list(""))
    with pytest.raises(StoreUnavailable):
        store.read(StoreKey("top"), limit_bytes=1)


@pytest.mark.parametrize(
    "url",
    [
        "https://user:hush-hush@host/x",
        "https://host/x?signature=hush-hush",
        "https://host/x#hush-hush",
        "https://host/../x",
        "https:///x",
        "gs://bucket/%2e%2e/x",
    ],
)
def test_what_could_hold_a_secret_or_leads_out_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        open_repository(url, Home(tmp_path))
    assert "hush" not in str(raised.value)


def test_one_place_has_one_name(tmp_path: Path) -> None:
    assert repository_name("https://host:9//a/b/", Home(tmp_path)) == "https://host:9/a/b"
    assert repository_name("gs://bucket", Home(tmp_path)) == "gs://bucket"
