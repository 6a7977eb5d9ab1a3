"""``RemoteStore`` beyond the contract: broken and hostile servers, other versions, keys that lead elsewhere."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Request
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import Response, StreamingResponse

from aenv_run.credentials import ServerAddress
from aenv_run.errors import AenvError, CorruptData, InvalidInput, ProtocolError, StoreUnavailable, Unsupported
from aenv_run.server_link import VERSION_HEADER
from aenv_run.store import StoreKey, Stray
from aenv_run.store.remote import RemoteStore
from aenv_run.store.remote_wire import PIECE_BYTES, Unframer, frames
from aenv_run.version import VERSION
from tests.unit.store_server import KEY as API_KEY
from tests.unit.store_server import StoreServer, serving, store_server

KEY = StoreKey("blobs/ab")
OURS = {VERSION_HEADER: VERSION}
Calls = Callable[[RemoteStore], object]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    with store_server(tmp_path_factory.mktemp("stores")) as found:
        yield found


@pytest.fixture
def odd() -> Iterator[Callable[[Callable[[], Response]], tuple[RemoteStore, list[str]]]]:
    """Makes a store whose server answers everything so; and the methods of the requests that it got."""
    with ExitStack() as stack:

        def make(answer: Callable[[], Response]) -> tuple[RemoteStore, list[str]]:
            app, asked = FastAPI(), []

            @app.api_route("/{path:path}", methods=["GET", "PUT", "POST", "DELETE"])
            async def everything(request: Request, path: str) -> Response:
                asked.append(request.method)
                return answer()

            url = stack.enter_context(serving(app))
            return RemoteStore(ServerAddress.parse(url, API_KEY), pauses_s=(0.0,)), asked

        yield make


def cut(data: bytes) -> Callable[[], Response]:
    """An answer that breaks off after ``data``."""

    async def pieces() -> object:
        yield data
        raise ConnectionAbortedError

    return lambda: StreamingResponse(pieces(), headers=OURS)  # type: ignore[arg-type]


def read_all(store: RemoteStore) -> bytes:
    with store.open(KEY) as file:
        return file.read()


READS: list[Calls] = [
    lambda store: store.read(KEY, limit_bytes=100),
    lambda store: store.read_range(KEY, 0, 5),
    read_all,
    lambda store: list(store.list("")),
    lambda store: store.stat(KEY),
]


@pytest.mark.parametrize("call", READS)
def test_an_answer_that_breaks_off_is_noticed(
    odd: Callable[..., tuple[RemoteStore, list[str]]], call: Calls
) -> None:
    store, _ = odd(cut(b"{"))
    with pytest.raises(StoreUnavailable, match=r"went away|broke off"):
        call(store)


def test_a_list_without_its_end_or_with_another_number_is_refused(
    odd: Callable[..., tuple[RemoteStore, list[str]]],
) -> None:
    store, _ = odd(lambda: Response('{"key": "a"}\n', headers=OURS))
    with pytest.raises(StoreUnavailable, match="broke off"):
        list(store.list(""))
    store, _ = odd(lambda: Response('{"key": "a"}\n{"end": 2}\n', headers=OURS))
    with pytest.raises(ProtocolError, match="1 of 2"):
        list(store.list(""))


@pytest.mark.parametrize("listed", ['{"key": "../x"}', '{"key": "other/x"}', '{"key": 3}', "nonsense"])
def test_a_list_of_what_is_no_key_is_refused(
    odd: Callable[..., tuple[RemoteStore, list[str]]], listed: str
) -> None:
    store, _ = odd(lambda: Response(f'{listed}\n{{"end": 1}}\n', headers=OURS))
    with pytest.raises(ProtocolError):
        list(store.list("blobs/"))


def test_an_error_in_the_middle_of_a_list_keeps_its_type(
    odd: Callable[..., tuple[RemoteStore, list[str]]],
) -> None:
    store, _ = odd(lambda: Response('{"key": "a"}\n{"code": "corrupt_data", "message": "bad"}\n', headers=OURS))
    with pytest.raises(CorruptData, match="bad"):
        list(store.list(""))


def test_answers_are_bounded_and_their_digest_counts(odd: Callable[..., tuple[RemoteStore, list[str]]]) -> None:
    store, _ = odd(lambda: Response(b"x" * 200_000, headers=OURS))
    for call in READS[:2] + READS[4:]:
        with pytest.raises(ProtocolError, match="more than"):
            call(store)
    store, _ = odd(lambda: Response(b"12345", headers=OURS | {"Aenv-Digest": "0" * 64}))
    with pytest.raises(CorruptData, match="on its way"):
        store.read_range(KEY, 0, 5)
    store, _ = odd(lambda: Response(b"123", headers=OURS))
    with pytest.raises(CorruptData, match="ends before"):
        store.read_range(KEY, 0, 5)


def test_what_reads_is_asked_again_and_what_writes_is_not(
    odd: Callable[..., tuple[RemoteStore, list[str]]],
) -> None:
    store, asked = odd(cut(b""))
    with pytest.raises(StoreUnavailable):
        store.stat(KEY)
    with pytest.raises(StoreUnavailable, match="went away"):
        store.put_new(KEY, b"x")
    with pytest.raises(StoreUnavailable):
        store.swap(KEY, b"x", expected=None)
    with pytest.raises(StoreUnavailable):
        store.delete(KEY)
    assert asked == ["GET", "GET", "PUT", "POST", "DELETE", "DELETE"]


def test_a_server_that_is_not_there_is_a_store_that_is_unavailable() -> None:
    store = RemoteStore(ServerAddress.parse("http://127.0.0.1:1", API_KEY), pauses_s=(0.0,))
    for call in (*READS, lambda found: found.put_new(KEY, b"x")):
        with pytest.raises(StoreUnavailable, match="cannot be reached") as raised:
            call(store)
        assert "aenv serve" in raised.value.fix


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (Response("<html>", 200), ProtocolError, "no aenv server: 200"),
        (Response("", 302, {"location": "http://elsewhere/"}), ProtocolError, "leads to http://elsewhere/"),
        (Response("", 200, {VERSION_HEADER: "7.1.0"}), Unsupported, "7.1.0"),
        (Response("", 401), AenvError, "API key"),
        (Response("", 502, OURS), StoreUnavailable, "502"),
    ],
)
def test_what_answers_must_be_ours(
    odd: Callable[..., tuple[RemoteStore, list[str]]], answer: Response, kind: type[AenvError], says: str
) -> None:
    store, _ = odd(lambda: answer)
    with pytest.raises(kind, match=says):
        store.stat(KEY)


def test_a_server_refuses_clients_of_another_version(server: StoreServer) -> None:
    address = server.address()
    for theirs in ({}, {VERSION_HEADER: "0.2.0"}):
        answer = httpx.put(f"{address.url}/aenv/v1/store/object?key=a", content=b"x", headers=theirs)
        assert answer.status_code == 501 and answer.json()["error_code"] == "unsupported"
        assert answer.headers[VERSION_HEADER] == VERSION
    assert not server.directory.exists()


@pytest.mark.parametrize("key", ["../x", "/etc/passwd", "a/../../x", "..", ".tmp/x", "", "a\0b", "a/" * 9 + "a"])
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "object?limit=9&"), ("GET", "range?offset=0&length=1&"), ("GET", "stream?"), ("GET", "stat?"),
     ("PUT", "object?"), ("POST", "swap?"), ("PUT", "file?"), ("DELETE", "object?")],
)  # fmt: skip
def test_a_key_never_leads_out_of_the_repository(server: StoreServer, key: str, method: str, path: str) -> None:
    address = server.address()
    url = f"{address.url}/aenv/v1/store/{path}"
    answer = httpx.request(
        method, url, params=httpx.QueryParams(httpx.URL(url).query.decode()).set("key", key), headers=OURS
    )
    assert (answer.status_code, answer.json()["error_code"]) == (400, "invalid_input")
    assert not (server.root / "x").exists()


def test_what_is_damaged_on_its_way_is_not_stored(server: StoreServer) -> None:
    address = server.address()
    url, headers = f"{address.url}/aenv/v1/store", OURS | {"Aenv-Digest": "0" * 64}
    assert httpx.put(f"{url}/object?key=a", content=b"x", headers=headers).status_code == 503
    body = b"".join(frames(io.BytesIO(b"content"), lambda size: None))
    for wrong in (body[:-1], body[:20], body[:17] + b"C" + body[18:], body + b"x", b"", b"\xff" * 100):
        answer = httpx.put(f"{url}/file?key=a", content=wrong, headers=OURS)
        assert answer.json()["error_code"] in ("store_unavailable", "protocol_error"), wrong
    assert list(RemoteStore(address).list("")) == []
    assert list((server.root / "staging").iterdir()) == []
    assert httpx.put(f"{url}/file?key=a", content=body, headers=OURS).json() == {"done": True}
    assert RemoteStore(address).read(StoreKey("a"), limit_bytes=9) == b"content"


def test_a_file_that_is_written_while_it_is_stored_is_refused(server: StoreServer, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x")
    digest_of = frames(source.open("rb"), lambda size: (_ for _ in ()).throw(InvalidInput("changed")))
    with pytest.raises(InvalidInput, match="changed"):
        list(digest_of)


def test_files_keep_their_holes_on_the_server(server: StoreServer, tmp_path: Path) -> None:
    store = RemoteStore(server.address())
    source = tmp_path / "sparse"
    with source.open("wb") as file:
        file.truncate(32 << 20)
        file.seek(16 << 20)
        file.write(b"data")
    assert store.put_file(KEY, source)
    kept = server.directory / KEY
    assert kept.stat().st_size == 32 << 20 and kept.stat().st_blocks * 512 <= 2 << 20
    assert store.read_range(KEY, 16 << 20, 4) == b"data"


def test_ranges_longer_than_one_answer_and_whole_objects(server: StoreServer, tmp_path: Path) -> None:
    store = RemoteStore(server.address())
    source = tmp_path / "large"
    with source.open("wb") as file:
        file.write(os.urandom(1 << 20))
        file.truncate(65 << 20)
        file.seek(65 << 20)
        file.write(b"end")
    store.put_file(KEY, source)
    data = source.read_bytes()
    assert store.read_range(KEY, 1, len(data) - 1) == data[1:]
    with store.open(KEY) as stream:
        assert stream.read(10) == data[:10] and stream.read() == data[10:]
    with pytest.raises(CorruptData):
        store.read(KEY, limit_bytes=1 << 20)


def test_unfinished_writes_are_shown_and_cleared(server: StoreServer) -> None:
    store = RemoteStore(server.address())
    store.put_new(KEY, b"x")
    (server.directory / ".tmp").mkdir(exist_ok=True)
    (server.directory / ".tmp" / "left").write_bytes(b"half")
    (stray,) = store.strays()
    assert (stray.kind, stray.path) == ("temporary", ".tmp/left")
    store.clear(stray)
    assert list(store.strays()) == []
    with pytest.raises(InvalidInput):
        store.clear(Stray("temporary", "../outside", ""))
    assert store.about().conditional and store.about().place == str(server.directory)
    store.require_writable()


@settings(max_examples=20, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(0, 2 * PIECE_BYTES), st.binary(max_size=100)), max_size=4),
    steps=st.lists(st.integers(100, 100_000), min_size=1, max_size=5),
)
def test_frames_give_the_same_file_in_whatever_pieces_they_come(
    parts: list[tuple[int, bytes]], steps: list[int]
) -> None:
    content = b"".join(bytes(hole) + data for hole, data in parts)
    sent = b"".join(frames(io.BytesIO(content), lambda size: None))
    got = bytearray(len(content))

    def write(offset: int, data: bytes) -> None:
        got[offset : offset + len(data)] = data

    unframer, at, turn = Unframer(write, 1 << 40), 0, 0
    while at < len(sent):
        step = steps[turn % len(steps)]
        unframer.take(sent[at : at + step])
        at, turn = at + step, turn + 1
    assert unframer.complete and unframer.size_bytes == len(content) and bytes(got) == content


def test_pieces_of_nothing_do_not_go_on() -> None:
    unframer = Unframer(lambda offset, data: None, 99)
    unframer.take(bytes(16))
    with pytest.raises(ProtocolError, match="has no data"):
        unframer.take(bytes(16))


def test_a_file_over_the_limit_is_refused_at_its_head() -> None:
    sent = next(frames(io.BytesIO(b"x" * 100), lambda size: None))
    with pytest.raises(ProtocolError, match="larger"):
        Unframer(lambda offset, data: None, 99).take(sent)
