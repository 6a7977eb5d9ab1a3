"""What only a second server shows: one that looks at signatures and checksums and has no conditional writes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from aenv_run.errors import NotFound, StoreUnavailable, Unauthenticated, Unsupported
from aenv_run.store import StoreKey
from aenv_run.store.s3 import S3Store
from aenv_run.store.s3_requests import Patience
from tests.s3.faulty import Fault, faulty
from tests.s3.server import Server
from tests.s3.swift import ACCESS_KEY, SECRET, SWIFT

pytestmark = pytest.mark.skipif(not SWIFT, reason="make soak starts Swift")
KEY = StoreKey("a/b")
HURRY = Patience(first_wait_s=0.01)


def test_without_saying_that_one_writes_nothing_is_written(swift_server: Server, tmp_path: Path) -> None:
    store = S3Store(swift_server.place(uuid4().hex, writers="many"), lock=tmp_path / "lock")
    source = tmp_path / "source"
    source.write_bytes(b"1")
    calls: tuple[Callable[[], object], ...] = (
        lambda: store.put_new(KEY, b"1"),
        lambda: store.put_file(KEY, source),
        lambda: store.swap(KEY, b"1", expected=None),
        store.require_writable,
    )
    for call in calls:
        with pytest.raises(Unsupported, match=r"501.*\n.*writers=one"):
            call()
    assert store.stat(KEY) is None and list(store.list("")) == []


@pytest.mark.parametrize(("name", "value"), [("AWS_SECRET_ACCESS_KEY", "wrong"), ("AWS_ACCESS_KEY_ID", "nobody")])
def test_a_wrong_secret_is_told(
    swift_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    store = S3Store(swift_server.place("p"), lock=tmp_path / "lock")
    calls: tuple[Callable[[], object], ...] = (
        lambda: store.stat(KEY),
        lambda: store.read(KEY, limit_bytes=1),
        lambda: store.put_new(KEY, b"1"),
        lambda: list(store.list("")),
    )
    for call in calls:
        with pytest.raises(Unauthenticated, match="AWS_SECRET_ACCESS_KEY") as raised:
            call()
        assert SECRET not in str(raised.value)


def test_a_missing_bucket_is_told_and_a_wrong_region_corrected(swift_server: Server, tmp_path: Path) -> None:
    place = swift_server.place("p")
    with pytest.raises(NotFound, match="there is no bucket none-such"):
        S3Store(replace(place, bucket="none-such"), lock=tmp_path / "lock").stat(KEY)
    store = S3Store(replace(place, region="eu-west-9"), lock=tmp_path / "lock")
    assert store.stat(StoreKey("absent")) is None  # the server says its region, and the client takes it
    assert store.put_new(StoreKey("region"), b"1")


def test_bytes_that_change_on_their_way_are_refused_and_sent_again(swift_server: Server, tmp_path: Path) -> None:
    """The signature covers them, too."""
    with faulty(swift_server) as (proxy, server):
        store = S3Store(server.place(uuid4().hex), lock=tmp_path / "lock", patience=HURRY)
        proxy.arm(Fault("damage", "PUT", KEY))
        assert store.put_new(KEY, b"mine")
        assert proxy.count("PUT") == 2
        assert store.read(KEY, limit_bytes=4) == b"mine"


def test_uploads_that_did_not_end_have_their_time_and_are_cleared(swift_server: Server, tmp_path: Path) -> None:
    source = tmp_path / "large"
    source.write_bytes(os.urandom(11 << 20))
    with faulty(swift_server) as (proxy, server):
        place = server.place(uuid4().hex)
        store = S3Store(place, lock=tmp_path / "lock", patience=HURRY, part_bytes=5 << 20)
        proxy.arm(Fault("early", "PUT", "partNumber=3", times=99), Fault("early", "DELETE", times=99))
        with pytest.raises(StoreUnavailable):
            store.put_file(KEY, source)
        proxy.arm()
        (stray,) = store.strays()
        assert stray.kind == "temporary" and abs(stray.modified_s - time.time()) < 60
        store.clear(stray)
        assert list(store.strays()) == [] and list(store.list("")) == []
        assert store.put_file(KEY, source)
        assert store.read(KEY, limit_bytes=1 << 30) == source.read_bytes()
    assert ACCESS_KEY not in repr(store)
