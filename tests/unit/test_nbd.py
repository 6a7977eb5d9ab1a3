"""The NBD protocol, spoken by somebody hostile too: no socket, no event loop."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv_run import nbd
from aenv_run.nbd import Close, HostileError, Open, Read, Send, Session

SIZE = 1 << 20
FLAGS = struct.pack(">I", 3)


def option(kind: int, data: bytes = b"") -> bytes:
    return b"IHAVEOPT" + struct.pack(">II", kind, len(data)) + data


def wanted(name: bytes, *information: int) -> bytes:
    return (
        struct.pack(">I", len(name)) + name + struct.pack(f">H{len(information)}H", len(information), *information)
    )


def request(kind: int, handle: int, offset: int, length: int) -> bytes:
    return struct.pack(">IHHQQI", 0x25609513, 0, kind, handle, offset, length)


def reading() -> Session:
    """A session whose export is open."""
    session = Session()
    session.receive(FLAGS + option(nbd.GO, wanted(b"disk", 3)))
    assert session.next() == Open("disk", nbd.GO)
    assert session.next() is None  # nothing happens before the answer
    said = session.opened(nbd.GO, SIZE)
    assert struct.pack(">HQH", 0, SIZE, nbd.EXPORT_FLAGS) in said and said.endswith(struct.pack(">III", 7, 1, 0))
    return session


def test_a_client_opens_and_reads() -> None:
    session = reading()
    session.receive(
        request(nbd.READ, 7, 512, 1024) + request(nbd.FLUSH, 8, 0, 0) + request(nbd.DISCONNECT, 9, 0, 0)
    )
    assert session.next() == Read(7, 512, 1024)
    assert session.next() == Send(nbd.reply(8))
    assert session.next() == Close()


def test_an_old_client_opens_by_name_alone() -> None:
    session = Session()
    session.receive(struct.pack(">I", 1) + option(nbd.EXPORT_NAME, b"disk"))
    assert session.next() == Open("disk", nbd.EXPORT_NAME)
    assert session.opened(nbd.EXPORT_NAME, SIZE) == struct.pack(">QH", SIZE, nbd.EXPORT_FLAGS) + bytes(124)


def test_an_export_that_cannot_be_had_is_refused_with_the_reason() -> None:
    session = Session()
    session.receive(FLAGS + option(nbd.GO, wanted(b"x")) + option(nbd.ABORT))
    assert session.next() == Open("x", nbd.GO)
    assert session.refused(nbd.GO, "not_found: no").endswith(b"not_found: no")
    assert session.next() == Close()
    with pytest.raises(HostileError):  # by name alone there is no answer but the end
        Session().refused(nbd.EXPORT_NAME, "no")


def test_what_is_not_offered_is_refused_and_the_client_may_go_on() -> None:
    session = Session()
    session.receive(FLAGS + option(8) + option(nbd.GO, b"\xff" * 9) + option(nbd.GO, wanted(b"disk")))
    for code in (nbd.ERROR_UNSUPPORTED, nbd.ERROR_INVALID):
        event = session.next()
        assert isinstance(event, Send) and struct.pack(">I", code) in event.data
    assert session.next() == Open("disk", nbd.GO)


def test_nothing_is_written_and_nothing_outside_is_read() -> None:
    session = reading()
    session.receive(request(nbd.WRITE, 1, 0, 4096) + bytes(4096))
    assert session.next() == Send(nbd.reply(1, nbd.EPERM))
    for offset, length in ((SIZE, 1), (SIZE - 1, 2), (0, 0), (2**64 - 1, 1), (0, nbd.MAX_READ_BYTES + 1)):
        session.receive(request(nbd.READ, 2, offset, length))
        assert session.next() == Send(nbd.reply(2, nbd.EINVAL))
    session.receive(request(77, 3, 0, 0))
    assert session.next() == Send(nbd.reply(3, nbd.EINVAL))


@pytest.mark.parametrize(
    "said",
    [
        struct.pack(">I", 0),
        struct.pack(">I", 0xFF),
        FLAGS + b"IHAVENOT" + bytes(8),
        FLAGS + option(nbd.GO)[:12] + b"\xff\xff\xff\xff",
        FLAGS + option(5) * (nbd.MAX_OPTIONS + 1),
        FLAGS + option(nbd.EXPORT_NAME, b"x" * 5000),
    ],
)
def test_whoever_does_not_keep_to_the_protocol_is_hung_up_on(said: bytes) -> None:
    session = Session()
    session.receive(said)
    with pytest.raises(HostileError):
        while session.next() is not None:
            pass


def test_a_request_without_its_magic_ends_the_connection() -> None:
    session = reading()
    session.receive(bytes(28))
    with pytest.raises(HostileError):
        session.next()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_do_more_than_end_the_connection(said: bytes, opened: bool) -> None:
    session = reading() if opened else Session()
    session.receive(said if opened else FLAGS + said)
    for _ in range(300):
        try:
            event = session.next()
        except HostileError:
            return
        if event is None or isinstance(event, Open | Close):
            return
        if isinstance(event, Read):
            assert event.offset + event.length <= SIZE


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_it_does_not_matter_in_which_pieces_the_bytes_come(pieces: list[int]) -> None:
    session = reading()
    requests = b"".join(
        request(nbd.WRITE, n, 0, 10) + bytes(10) + request(nbd.READ, 100 + n, n, 5) for n in range(1, 6)
    )
    events: list[nbd.Event] = []
    for size in [*pieces, len(requests)]:
        session.receive(requests[:size])
        requests = requests[size:]
        while (event := session.next()) is not None:
            events.append(event)
    expected: list[nbd.Event] = []
    for n in range(1, 6):
        expected += [Send(nbd.reply(n, nbd.EPERM)), Read(100 + n, n, 5)]
    assert events == expected
