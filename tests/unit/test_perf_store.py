"""The store of the on-demand measurements is taken for one of S3, so that they measure what is shipped."""

from __future__ import annotations

import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from aenv_run.errors import NotFound
from aenv_run.store import StoreKey
from aenv_run.store.s3 import S3Store
from tests.perf.file_s3 import FileS3
from tests.s3.server import Server


def test_the_store_over_a_directory_answers_as_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    handler = type("Handler", (FileS3,), {"root": tmp_path / "files"})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            place = Server(f"http://127.0.0.1:{server.server_port}").place("")
            store, (a, b) = S3Store(place, lock=tmp_path / "lock"), (StoreKey("refs/a"), StoreKey("blobs/b"))
            assert store.put_new(a, b"one") and not store.put_new(a, b"two") and store.put_new(b, b"0123456789")
            assert [row.key for row in store.list("refs/")] == [a] and store.read_range(b, 2, 3) == b"234"
            assert list(store.strays()) == []  # uploads that nobody ended
            store.delete(a)
            with pytest.raises(NotFound):
                store.read(a, limit_bytes=9)
        finally:
            server.shutdown()
            thread.join()
