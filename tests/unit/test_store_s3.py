"""What only the S3 store has: lost answers, broken reads, uploads that do not end, refusals, secrets."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from aenv_run.errors import (
    AenvError,
    CorruptData,
    InvalidInput,
    NoSpace,
    NotFound,
    ProtocolError,
    StoreUnavailable,
    Unauthenticated,
    Unsupported,
)
from aenv_run.store import StoreKey
from aenv_run.store.s3 import S3Store
from aenv_run.store.s3_place import S3Place
from aenv_run.store.s3_requests import Patience
from tests.s3.faulty import Fault, Faulty, faulty
from tests.s3.server import CREDENTIALS, Server

KEY = StoreKey("blobs/sha256/ab/abcdef")
PART = 5 << 20
HURRY = Patience(first_wait_s=0.01, read_s=1.0, connect_s=1.0)


@pytest.fixture(scope="module")
def proxied(s3_server: Server) -> Iterator[tuple[Faulty, Server]]:
    with faulty(s3_server) as both:
        yield both


@pytest.fixture
def proxy(proxied: tuple[Faulty, Server]) -> Iterator[Faulty]:
    yield proxied[0]
    proxied[0].arm()


@pytest.fixture
def store(proxied: tuple[Faulty, Server], proxy: Faulty, tmp_path: Path) -> S3Store:
    made = S3Store(proxied[1].place(uuid4().hex), lock=tmp_path / "lock", patience=HURRY, part_bytes=PART)
    made.require_writable()
    return made


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Three parts."""
    path = tmp_path / "large"
    path.write_bytes(os.urandom(2 * PART + 7))
    return path


def uploads(store: S3Store) -> int:
    return sum(stray.kind == "temporary" for stray in store.strays())


# Lost answers


@pytest.mark.parametrize("kind", ["lose", "early"])
def test_a_creation_whose_answer_is_lost_is_still_ours(store: S3Store, proxy: Faulty, kind: str) -> None:
    proxy.arm(Fault(kind, "PUT", KEY))  # type: ignore[arg-type]
    assert store.put_new(KEY, b"mine")
    assert proxy.count("PUT") == 2
    assert not store.put_new(KEY, b"mine")
    assert store.read(KEY, limit_bytes=9) == b"mine"


def test_a_creation_that_lost_is_not_ours_though_the_bytes_are_equal(store: S3Store, proxy: Faulty) -> None:
    store.put_new(KEY, b"same")
    proxy.arm(Fault("lose", "PUT", KEY))
    assert not store.put_new(KEY, b"same")


def test_a_swap_whose_answer_is_lost_is_still_ours(store: S3Store, proxy: Faulty) -> None:
    store.put_new(KEY, b"0")
    proxy.arm(Fault("lose", "PUT", KEY))
    assert store.swap(KEY, b"1", expected=b"0")
    proxy.arm(Fault("lose", "PUT", KEY))
    assert not store.swap(KEY, b"2", expected=b"0")
    assert store.read(KEY, limit_bytes=9) == b"1"


def test_a_lost_answer_is_resolved_after_others_have_written_over_it(
    store: S3Store, s3_server: Server, tmp_path: Path
) -> None:
    """The other's swaps happen between the lost write and its repeat."""
    for ours_came_first in (True, False):
        prefix = uuid4().hex
        other = S3Store(s3_server.place(prefix), lock=tmp_path / "lock")
        other.put_new(KEY, b"0")

        def meanwhile(other: S3Store = other) -> None:
            present = other.read(KEY, limit_bytes=9)
            for number in range(5):
                assert other.swap(KEY, b"other %d" % number, expected=present)
                present = b"other %d" % number

        with faulty(s3_server) as (proxy, server):
            ours = S3Store(server.place(prefix), lock=tmp_path / "lock", patience=replace(HURRY, first_wait_s=0.5))
            ours.require_writable()
            proxy.arm(Fault("lose" if ours_came_first else "early", "PUT", KEY))
            proxy.after_next_fault(meanwhile)
            assert ours.swap(KEY, b"1", expected=b"0") is ours_came_first
        assert other.read(KEY, limit_bytes=9) == b"other 4"


@pytest.mark.parametrize("what", ["uploads", "partNumber=2", "uploadId="])
@pytest.mark.parametrize("kind", ["lose", "early"])
def test_a_large_file_is_stored_though_answers_are_lost(
    store: S3Store, proxy: Faulty, large: Path, kind: str, what: str
) -> None:
    proxy.arm(Fault(kind, path=what, method="POST" if what != "partNumber=2" else "PUT"))  # type: ignore[arg-type]
    assert store.put_file(KEY, large)
    assert store.read(KEY, limit_bytes=1 << 30) == large.read_bytes()
    # A begun upload of which nobody has the id is left: that is what strays are for.
    assert uploads(store) == (what == "uploads" and kind == "lose")
    for stray in store.strays():
        assert stray.modified_s > 0  # moto has one time for all uploads
        store.clear(stray)
    assert uploads(store) == 0


# Faults that pass


VERBS = ("put", "swap", "read", "range", "stat", "list", "delete")
PASSING = [
    Fault("refuse", status=503, code="SlowDown", times=3),
    Fault("refuse", status=500, code="InternalError", times=3),
    Fault("refuse", status=429, code="TooManyRequests", times=2, headers={"Retry-After": "0"}),
    Fault("refuse", status=400, code="RequestTimeout", times=2),
    Fault("stall", seconds=1.5),
    Fault("early", times=2),
    Fault("lose", times=2),
]


def verbs_of(fault: Fault) -> tuple[str, ...]:
    """Of what takes seconds two are enough; the answer to a HEAD has no code, and 400 alone does not pass."""
    if fault.kind == "stall":
        return ("put", "read")
    return tuple(verb for verb in VERBS if (fault.status, verb) != (400, "stat"))


@pytest.mark.parametrize(
    ("fault", "verb"),
    [pytest.param(f, verb, id=f"{verb}-{f.kind}-{f.status}") for f in PASSING for verb in verbs_of(f)],
)
def test_passing_faults_are_not_seen(store: S3Store, proxy: Faulty, fault: Fault, verb: str) -> None:
    store.put_new(KEY, b"0123456789")
    proxy.arm(replace(fault))
    if verb == "put":
        assert store.put_new(StoreKey("other"), b"1")
    elif verb == "swap":
        assert store.swap(KEY, b"1", expected=b"0123456789")
    elif verb == "read":
        assert store.read(KEY, limit_bytes=10) == b"0123456789"
    elif verb == "range":
        assert store.read_range(KEY, 2, 3) == b"234"
    elif verb == "stat":
        assert store.stat(KEY) is not None
    elif verb == "list":
        assert [info.key for info in store.list("")] == [KEY]
    else:
        store.delete(KEY)
        assert store.stat(KEY) is None


@pytest.mark.parametrize("cut", [0, 1, 1_000_000, 2 * PART])
def test_a_read_that_breaks_goes_on_from_where_it_was(
    store: S3Store, proxy: Faulty, large: Path, cut: int
) -> None:
    store.put_file(KEY, large)
    proxy.arm(Fault("cut", "GET", KEY, at=cut, times=2))
    with store.open(KEY) as file:
        assert file.read() == large.read_bytes()
    assert proxy.count("GET") == (3 if cut < PART else 2)  # the rest of the third is shorter than its cut
    proxy.arm(Fault("cut", "GET", KEY, at=min(cut, 900)))
    assert store.read_range(KEY, 5, 1000) == large.read_bytes()[5:1005]


def test_a_read_never_goes_on_in_another_object(store: S3Store, proxy: Faulty) -> None:
    store.put_new(KEY, b"a" * 3_000_000)
    proxy.arm(Fault("cut", "GET", KEY, at=2_000_000))
    with store.open(KEY) as file:
        assert file.read(10) == b"a" * 10
        store.delete(KEY)
        store.put_new(KEY, b"b" * 3_000_000)
        with pytest.raises((StoreUnavailable, NotFound)):
            file.read()


def test_a_read_that_never_ends_is_given_up(store: S3Store, proxy: Faulty) -> None:
    store.put_new(KEY, b"0123456789")
    proxy.arm(Fault("cut", "GET", KEY, at=0, times=100))
    with pytest.raises(StoreUnavailable, match="10 bytes are missing"):
        store.read(KEY, limit_bytes=10)
    assert proxy.count("GET") <= HURRY.tries + 2


def test_lengths_that_lie(store: S3Store, proxy: Faulty) -> None:
    store.put_new(KEY, b"0123456789")
    proxy.arm(Fault("lie", "GET", KEY, at=3))
    with pytest.raises(CorruptData):
        store.read_range(KEY, 2, 5)
    proxy.arm(Fault("refuse", "GET", KEY, status=200))
    with pytest.raises(ProtocolError):
        store.read_range(KEY, 2, 5)


# What is stored is what was sent


def test_bytes_that_change_on_their_way_are_sent_again(store: S3Store, proxy: Faulty, large: Path) -> None:
    proxy.arm(Fault("damage", "PUT", KEY))
    assert store.put_new(KEY, b"mine")
    assert store.read(KEY, limit_bytes=4) == b"mine"
    proxy.arm(Fault("damage", "PUT", "partNumber=2", times=2))
    assert store.put_file(StoreKey("large"), large)
    assert store.read(StoreKey("large"), limit_bytes=1 << 30) == large.read_bytes()


@pytest.mark.parametrize("size_bytes", [1000, 2 * PART + 1])
def test_a_file_that_is_written_meanwhile_is_noticed(
    store: S3Store, proxy: Faulty, tmp_path: Path, size_bytes: int
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"a" * size_bytes)
    proxy.arm(Fault("stall", seconds=0.5, method="HEAD" if size_bytes == 1000 else "PUT"))
    errors: list[AenvError] = []

    def put() -> None:
        try:
            store.put_file(KEY, source)
        except AenvError as error:
            errors.append(error)

    thread = threading.Thread(target=put)
    thread.start()
    while not proxy.asked or (size_bytes > 1000 and not proxy.count("PUT")):
        time.sleep(0.01)
    with source.open("r+b") as file:
        file.write(b"b")
    thread.join()
    assert [type(error) for error in errors] == [InvalidInput] and "sealed" in str(errors[0])
    assert store.stat(KEY) is None and uploads(store) == 0


def test_an_upload_that_fails_leaves_nothing(store: S3Store, proxy: Faulty, large: Path) -> None:
    proxy.arm(Fault("refuse", "PUT", "partNumber=3", status=403, code="AccessDenied", times=99))
    with pytest.raises(Unauthenticated):
        store.put_file(KEY, large)
    assert store.stat(KEY) is None and uploads(store) == 0 and large.exists()


# Refusals


@pytest.mark.parametrize(
    ("status", "code", "error", "says"),
    [
        (403, "SignatureDoesNotMatch", Unauthenticated, "does not know this key or its secret"),
        (403, "InvalidAccessKeyId", Unauthenticated, "AWS_ACCESS_KEY_ID"),
        (403, "AccessDenied", Unauthenticated, "ListBucket"),
        (403, "RequestTimeTooSkewed", Unauthenticated, "clock"),
        (400, "ExpiredToken", Unauthenticated, "AWS_PROFILE"),
        (404, "NoSuchBucket", NotFound, "create it"),
        (301, "PermanentRedirect", InvalidInput, "region=eu-south-2"),
        (400, "AuthorizationHeaderMalformed", InvalidInput, "region"),
        (507, "StorageFull", NoSpace, "quota"),
        (403, "QuotaExceeded", NoSpace, "quota"),
        (503, "SlowDown", StoreUnavailable, "overloaded"),
        (405, "MethodNotAllowed", StoreUnavailable, "S3 API"),
    ],
)
@pytest.mark.parametrize("verb", ["stat", "read", "put"])
def test_refusals_say_what_to_do(
    store: S3Store, proxy: Faulty, verb: str, status: int, code: str, error: type[AenvError], says: str
) -> None:
    region = {"x-amz-bucket-region": "eu-south-2"} if status == 301 else {}
    proxy.arm(Fault("refuse", status=status, code=code, times=999, headers=region))
    calls: dict[str, Callable[[], object]] = {
        "stat": lambda: store.stat(KEY),
        "read": lambda: store.read(KEY, limit_bytes=1),
        "put": lambda: store.put_new(KEY, b"1"),
    }
    with pytest.raises(AenvError) as raised:
        calls[verb]()
    assert type(raised.value) is error
    assert says in str(raised.value) and store.place.bucket in str(raised.value)
    for secret in (*CREDENTIALS.values(), "Signature="):
        assert secret not in str(raised.value).replace("SignatureDoesNotMatch", "")


def test_a_missing_bucket_is_no_missing_key(s3_server: Server, tmp_path: Path) -> None:
    place = replace(s3_server.place("p"), bucket="no-such-bucket")
    for call in (
        lambda store: store.stat(KEY),
        lambda store: store.read(KEY, limit_bytes=1),
        lambda store: store.put_new(KEY, b"1"),
        lambda store: list(store.list("")),
    ):
        with pytest.raises(NotFound, match="there is no bucket no-such-bucket"):
            call(S3Store(place, lock=tmp_path / "lock", patience=HURRY))


def test_a_server_that_the_environment_names(
    s3_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As path: it has no host name for each bucket."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    store = S3Store(replace(s3_server.place(uuid4().hex), endpoint=None), lock=tmp_path / "lock", patience=HURRY)
    assert store.put_new(KEY, b"1") and store.read(KEY, limit_bytes=1) == b"1"
    assert s3_server.endpoint in repr(store)


def test_a_host_name_for_each_bucket(
    proxied: tuple[Faulty, Server], proxy: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a proxy, because no such name exists here."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, proxied[1].endpoint)
    place = replace(proxied[1].place(uuid4().hex), endpoint="http://s3.invalid", addressing="virtual")
    store = S3Store(place, lock=tmp_path / "lock", patience=HURRY)
    assert store.put_new(KEY, b"1") and [info.key for info in store.list("")] == [KEY]
    assert proxy.asked and all(path.startswith(f"http://{place.bucket}.s3.invalid/") for _, path in proxy.asked)


def test_nobody_there(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused
        place = S3Place("bucket", "p", "r", f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:\d+ cannot be reached for bucket bucket"):
            S3Store(place, lock=tmp_path / "lock", patience=HURRY).stat(KEY)


def test_no_credentials_and_no_region(s3_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*CREDENTIALS, "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    config = tmp_path / "config"
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    place = s3_server.place("p")
    for wrong in (place, replace(place, profile="none")):
        with pytest.raises(Unauthenticated, match="credential_process"):
            S3Store(wrong, lock=tmp_path / "lock", patience=HURRY).stat(KEY)
    with pytest.raises(InvalidInput, match="AWS_REGION"):
        S3Store(replace(place, region=None), lock=tmp_path / "lock", patience=HURRY).stat(KEY)
    program = tmp_path / "credentials"
    program.write_text('#!/bin/sh\necho \'{"Version": 1, "AccessKeyId": "a", "SecretAccessKey": "b"}\'\n')
    program.chmod(0o755)
    config.write_text(f"[profile by-process]\ncredential_process = {program}\nregion = us-east-1\n")
    named = replace(place, region=None, profile="by-process")
    assert S3Store(named, lock=tmp_path / "lock", patience=HURRY).stat(KEY) is None


# Stores without conditional writes


@pytest.mark.parametrize("status", [501, 200])
def test_without_conditional_writes_nothing_is_written_unless_one_writes(
    proxied: tuple[Faulty, Server], proxy: Faulty, tmp_path: Path, status: int
) -> None:
    """Some stores say that they do not have them; others take the header and overwrite."""
    server = proxied[1]
    place = server.place(uuid4().hex)
    store = S3Store(place, lock=tmp_path / "lock", patience=HURRY)
    fault = Fault("refuse", "PUT", "conditional-writes", status=status, code="NotImplemented", times=99)
    fault.headers = {"ETag": '"x"'}
    proxy.arm(fault)
    for call in (
        lambda: store.put_new(KEY, b"1"),
        lambda: store.swap(KEY, b"1", expected=None),
        lambda: store.delete(KEY),
    ):
        with pytest.raises(Unsupported, match="writers=one"):
            call()
    assert list(store.list("")) == [] and store.stat(KEY) is None
    alone = S3Store(replace(place, writers="one"), lock=tmp_path / "locks" / "lock", patience=HURRY)
    assert alone.put_new(KEY, b"1") and not alone.put_new(KEY, b"2")
    assert alone.swap(KEY, b"2", expected=b"1") and not alone.swap(KEY, b"3", expected=b"1")
    assert store.read(KEY, limit_bytes=1) == b"2"


def test_the_probe_is_no_object_and_no_stray(store: S3Store) -> None:
    assert list(store.list("")) == [] and list(store.strays()) == []


def test_uploads_of_a_killed_process_are_found_and_removed(store: S3Store, proxy: Faulty, large: Path) -> None:
    """As a killed process: neither the part nor the abort comes through."""
    proxy.arm(Fault("early", "PUT", "partNumber", times=999), Fault("early", "DELETE", times=999))
    with pytest.raises(StoreUnavailable):
        store.put_file(KEY, large)
    proxy.arm()
    (stray,) = store.strays()
    assert stray.path.startswith(f"{KEY}?uploadId=")
    assert list(store.list("")) == []
    store.clear(stray)
    assert list(store.strays()) == []
    assert store.put_file(KEY, large)
