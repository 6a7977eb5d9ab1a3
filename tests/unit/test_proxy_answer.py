"""Answers of services: what is one, where it ends, and what is none."""

from __future__ import annotations

import pytest

from aenv_run.api.proxy.answer import MAX_HEAD_BYTES, Answer, NoHttp

CASES: list[tuple[str, bytes, bool, bytes, bool]] = [  # closed afterwards, body, keeps the connection
    ("length", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", False, b"abc", True),
    ("nothing", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", False, b"", True),
    ("no content", b"HTTP/1.1 204 No Content\r\n\r\n", False, b"", True),
    ("not modified", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", False, b"", True),
    ("until the end", b"HTTP/1.0 200 OK\r\n\r\nabc", True, b"abc", False),
    ("asked to close", b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\na", False, b"a", False),
    (
        "chunks, with extensions and trailers",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;a=b\r\nab\r\n1\r\nc\r\n0\r\nX-T: 1\r\n\r\n",
        *(False, b"abc", True),
    ),
    (
        "interim answers before it",
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na",
        *(False, b"a", True),
    ),
    ("more than its length", b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nabc", False, b"a", False),
    (
        "a second answer",
        b"HTTP/1.1 204 No\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na",
        False,
        b"",
        False,
    ),
    ("lines of a shell script", b"HTTP/1.1 200 OK\nContent-Length: 2\n\nab", False, b"ab", True),
    ("no reason", b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nab", False, b"ab", True),
]


@pytest.mark.parametrize("piece", [1, 7, 10_000])
@pytest.mark.parametrize(
    ("sent", "closed", "body", "keeps"), [row[1:] for row in CASES], ids=[r[0] for r in CASES]
)
def test_an_answer_ends_where_it_ends(sent: bytes, closed: bool, body: bytes, keeps: bool, piece: int) -> None:
    answer = Answer(b"GET")
    for start in range(0, len(sent), piece):
        answer.feed(sent[start : start + piece])
    if closed:
        assert not answer.over
        answer.end()
    assert answer.over and b"".join(answer.body) == body and answer.keeps_connection is keeps
    assert all(name.lower() != b"x-t" and name.lower() != b"link" for name, _ in answer.headers)


def test_the_answer_to_head_has_no_body() -> None:
    answer = Answer(b"HEAD")
    answer.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
    assert answer.over and answer.headers == [(b"Content-Length", b"5")]


def test_continue_is_no_answer() -> None:
    answer = Answer(b"POST")
    answer.feed(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert answer.go_on and not answer.has_head and not answer.over


WRONG: list[tuple[str, bytes]] = [
    ("SSH", b"SSH-2.0-OpenSSH\r\n\r\n"),
    ("two lengths", b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\na"),
    ("length and chunks", b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    ("a folded header", b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: 0\r\n\r\n"),
    ("a bad chunk", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
    ("an upgrade for which nobody asked", b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"),
    ("status 999", b"HTTP/1.1 999 What\r\nContent-Length: 0\r\n\r\n"),
    ("an endless head", b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * (MAX_HEAD_BYTES // 6 + 1)),
]


@pytest.mark.parametrize("sent", [row[1] for row in WRONG], ids=[row[0] for row in WRONG])
def test_what_is_no_answer_is_refused(sent: bytes) -> None:
    with pytest.raises(NoHttp):
        Answer(b"GET").feed(sent)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
    ],
)
def test_an_answer_that_breaks_off_is_none(sent: bytes) -> None:
    answer = Answer(b"GET")
    answer.feed(sent)
    with pytest.raises(NoHttp):
        answer.end()


def test_trailers_that_never_end_and_other_codings_are_none() -> None:
    answer = Answer(b"GET")
    answer.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: ")
    with pytest.raises(NoHttp, match="trailers"):
        for _ in range(MAX_HEAD_BYTES // 1000 + 2):
            answer.feed(b"x" * 1000)
    with pytest.raises(NoHttp):
        Answer(b"GET").feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n")
    whole = Answer(b"GET")
    whole.feed(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (1 << 20))
    for _ in range(1 << 8):
        whole.feed(b"x" * (1 << 12))
    assert whole.over and sum(map(len, whole.body)) == 1 << 20
