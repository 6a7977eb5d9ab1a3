"""Where WebSocket frames end in a stream of bytes, so that a last one can be put behind them."""

from __future__ import annotations

import struct

GOING_AWAY = 1001
#: Of one piece of a stream: who sends smaller ones gets no last frame put behind his, for each costs time of all.
MAX_FRAMES = 4096
_MAX_REASON_BYTES = 123


class Frames:
    """Fed with what a server sends; ``between`` is true where a frame may follow."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._left = 0
        self._closing = False

    @property
    def between(self) -> bool:
        """At the end of a frame, and no goodbye was said before it. Not where that is unknown."""
        return not self._head and not self._left and not self._closing

    def feed(self, data: bytes) -> None:
        """The next bytes. Only heads are looked at."""
        at, end, frames = 0, len(data), 0
        while at < end and not self._closing:
            if self._left:
                step = min(self._left, end - at)
                self._left -= step
                at += step
                continue
            self._head.append(data[at])
            at += 1
            if (size := _payload_bytes(self._head)) is not None:
                frames += 1
                self._closing = self._head[0] & 0x0F == 0x8 or frames > MAX_FRAMES
                self._left = size
                self._head.clear()


def _payload_bytes(head: bytearray) -> int | None:
    """How many bytes follow a head, with a mask's; None while it is not whole."""
    if len(head) < 2:
        return None
    masked = 4 if head[1] & 0x80 else 0
    short = head[1] & 0x7F
    extended = {126: 2, 127: 8}.get(short, 0)
    if len(head) < 2 + extended:
        return None
    size = int.from_bytes(head[2 : 2 + extended]) if extended else short
    return size + masked


def close_frame(code: int, reason: str) -> bytes:
    """A server's last frame."""
    payload = struct.pack(">H", code) + reason.encode()[:_MAX_REASON_BYTES]
    return bytes([0x88, len(payload)]) + payload
