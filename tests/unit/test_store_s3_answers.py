"""An answer that no S3 server gives is taken for nothing: not for an empty listing, not for a stored object."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from aenv_run.errors import AenvError, InvalidInput, ProtocolError
from aenv_run.store import StoreKey
from aenv_run.store.s3 import S3Store
from aenv_run.store.s3_requests import Patience
from tests.s3.faulty import Fault, Faulty, faulty
from tests.s3.server import Server

KEY = StoreKey("refs/a")
LOGIN = b"<html>Please log in</html>"


@pytest.fixture
def site(s3_server: Server, tmp_path: Path) -> Iterator[tuple[Faulty, S3Store]]:
    with faulty(s3_server) as (proxy, seen):
        hurry = Patience(first_wait_s=0.01, read_s=1.0, connect_s=1.0)
        store = S3Store(seen.place(uuid4().hex), lock=tmp_path / "lock", patience=hurry)
        assert store.put_new(KEY, b"x")
        yield proxy, store


def page(store: S3Store, *keys: str, prefix: str = "", count: int | None = None, more: str = "") -> bytes:
    """A listing; ``more`` is what it says about further pages."""
    rows = "".join(
        f"<Contents><Key>{store.place.prefix}/{key}</Key><Size>1</Size>"
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for key in keys
    )
    told = len(keys) if count is None else count
    return (
        f"<ListBucketResult><Name>b</Name><Prefix>{store.place.prefix}/{prefix}</Prefix>"
        f"<KeyCount>{told}</KeyCount>{more or '<IsTruncated>false</IsTruncated>'}{rows}</ListBucketResult>"
    ).encode()


def replaced(body: bytes, method: str = "", times: int = 1, **headers: str) -> Fault:
    told = {name.replace("_", "-"): value for name, value in headers.items()}
    return Fault("replace", method, status=200, body=body, times=times, headers=told)


def test_a_good_page_is_taken(site: tuple[Faulty, S3Store]) -> None:
    proxy, store = site
    proxy.arm(replaced(page(store, "refs/a", "refs/b", prefix="refs/")))
    assert [row.key for row in store.list("refs/")] == ["refs/a", "refs/b"]


@pytest.mark.parametrize("body", [LOGIN, b"", b"<ListBucketResult/>", b"{}", b"ok"])
def test_a_page_of_something_else_is_no_empty_listing(site: tuple[Faulty, S3Store], body: bytes) -> None:
    proxy, store = site
    proxy.arm(replaced(body, times=99))
    with pytest.raises(AenvError):
        list(store.list("refs/"))
    with pytest.raises(AenvError):
        list(store.strays())


def test_unfinished_uploads_are_not_read_from_a_login_page(site: tuple[Faulty, S3Store]) -> None:
    proxy, store = site
    proxy.arm(Fault("replace", "GET", "uploads", status=200, body=LOGIN))
    with pytest.raises(ProtocolError, match="ListMultipartUploads"):
        list(store.strays())


def test_listings_that_contradict_themselves(site: tuple[Faulty, S3Store]) -> None:
    proxy, store = site
    yes, token = "<IsTruncated>true</IsTruncated>", "<NextContinuationToken>t</NextContinuationToken>"
    for body, why in (
        (page(store, prefix="other/"), "is of"),
        (page(store, "refs/a", prefix="refs/", count=2), "has 1 keys and says 2"),
        (page(store, "blobs/a", prefix="refs/"), "blobs/a"),
        (page(store, "refs/b", "refs/a", prefix="refs/"), "out of order"),
        (page(store, "refs/a", "refs/a", prefix="refs/"), "out of order"),
        (page(store, prefix="refs/", more=yes), "does not say where"),
        (page(store, prefix="refs/", more=yes + token), "in circles"),
    ):
        proxy.arm(replaced(body, times=9))
        with pytest.raises(ProtocolError, match=why):
            list(store.list("refs/"))


def test_a_login_page_is_no_object(site: tuple[Faulty, S3Store], tmp_path: Path) -> None:
    proxy, store = site
    (tmp_path / "file").write_bytes(b"y")
    for call in (
        lambda: store.stat(StoreKey("blobs/b")),
        lambda: store.put_file(StoreKey("blobs/b"), tmp_path / "file"),
        lambda: store.put_new(StoreKey("blobs/b"), b"y"),
        lambda: store.read(KEY, limit_bytes=99),
    ):
        for headers in ({}, {"Content_Type": "text/html", "ETag": '"1"'}):
            proxy.arm(replaced(LOGIN, times=99, **headers))
            with pytest.raises(ProtocolError):
                call()
    proxy.arm()
    assert store.stat(StoreKey("blobs/b")) is None


def test_a_redirection_to_nowhere_ends(site: tuple[Faulty, S3Store]) -> None:
    proxy, store = site
    proxy.arm(Fault("refuse", status=301, code="PermanentRedirect", times=9999))
    with pytest.raises(InvalidInput, match="301"):
        list(store.list("refs/"))
    assert len(proxy.asked) < 9
