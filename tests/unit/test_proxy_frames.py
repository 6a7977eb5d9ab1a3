"""Where WebSocket frames end, however their bytes come in."""

from __future__ import annotations

import random

import pytest

from aenv_run.api.proxy.frames import MAX_FRAMES, Frames, close_frame

SHORT = b"\x81\x02hi"
EMPTY = b"\x89\x00"
MEDIUM = b"\x82\x7e\x01\x00" + bytes(256)
LONG = b"\x82\x7f" + (70_000).to_bytes(8) + bytes(70_000)
MASKED = b"\x81\x82\x01\x02\x03\x04hi"


@pytest.mark.parametrize("frame", [SHORT, EMPTY, MEDIUM, LONG, MASKED])
@pytest.mark.parametrize("piece", [1, 3, 1000, 1 << 20])
def test_a_frame_ends_with_its_last_byte_alone(frame: bytes, piece: int) -> None:
    frames = Frames()
    assert frames.between
    for start in range(0, len(frame), piece):
        frames.feed(frame[start : start + piece])
        assert frames.between is (start + piece >= len(frame))


def test_many_frames_in_pieces_of_any_size() -> None:
    stream = b"".join((SHORT, EMPTY, MEDIUM, LONG, MASKED) * 3)
    rng, frames, at = random.Random(7), Frames(), 0
    while at < len(stream):
        size = rng.randint(1, 5000)
        frames.feed(stream[at : at + size])
        at += size
    assert frames.between


def test_who_sends_crumbs_is_not_followed() -> None:
    frames = Frames()
    frames.feed(EMPTY * MAX_FRAMES)
    assert frames.between
    frames.feed(EMPTY * (MAX_FRAMES + 1))
    assert not frames.between
    frames.feed(SHORT)
    assert not frames.between


def test_nothing_follows_a_close() -> None:
    frames = Frames()
    frames.feed(close_frame(1000, "done"))
    assert not frames.between


def test_a_close_frame_is_short() -> None:
    frame = close_frame(1001, "x" * 1000)
    assert frame[:4] == b"\x88\x7d\x03\xe9" and len(frame) == 127
