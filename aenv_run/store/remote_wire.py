"""What a client and a server say to each other about a store; both ends are ours."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from typing import BinaryIO

from aenv_run.errors import ProtocolError
from aenv_run.types import Model

#: Of one answer or one body that is held in memory; longer ranges are asked for in pieces.
MAX_PIECE_BYTES = 64 << 20
#: Between two pieces of a body.
IDLE_S = 60.0
PIECE_BYTES = 1 << 20
DIGEST_HEADER = "Aenv-Digest"
#: Hole and data: how many bytes of zeros come first, and how many of data follow this head.
HEAD = struct.Struct(">QQ")
#: As a hole it says that the data is the digest of all that was sent before, and the end.
END = (1 << 64) - 1


class About(Model):
    """What does not change of a store."""

    place: str
    conditional: bool


class WireError(Model):
    """An error where a row was expected."""

    code: str
    message: str
    fix: str = ""


class Done(Model):
    """Whether a conditional write was done."""

    done: bool


class Row(Model):
    """One object of a list, or its end: ``end`` says how many there were."""

    key: str = ""
    size_bytes: int = 0
    modified_s: float = 0.0
    end: int | None = None


class StrayRow(Model):
    """A ``Stray`` on the wire."""

    kind: str
    path: str
    detail: str
    modified_s: float = 0.0


class Strays(Model):
    """All of them."""

    strays: tuple[StrayRow, ...]


class Found(Model):
    """What ``stat`` tells; no size: it is not there."""

    size_bytes: int | None = None
    modified_s: float = 0.0


def frames(source: BinaryIO, check: Callable[[int], None]) -> Iterator[bytes]:
    """A file as it is sent: pieces of zeros as their number. ``check`` hears its size before the end is said."""
    digest, hole, size = hashlib.sha256(), 0, 0
    while piece := source.read(PIECE_BYTES):
        size += len(piece)
        if not piece.strip(b"\0"):
            hole += len(piece)
            continue
        head = HEAD.pack(hole, len(piece))
        digest.update(head)
        digest.update(piece)
        yield head
        yield piece
        hole = 0
    head = HEAD.pack(hole, 0)
    digest.update(head)
    check(size)
    yield head + HEAD.pack(END, digest.digest_size) + digest.digest()


class Unframer:
    """Reads ``frames`` in whatever pieces they come. ``write`` gets what is not zero, with its offset."""

    def __init__(self, write: Callable[[int, bytes], None], limit_bytes: int) -> None:
        self._write, self._limit_bytes = write, limit_bytes
        self._buffer = bytearray()
        self._digest = hashlib.sha256()
        self.size_bytes = 0
        self._left = 0
        self._tail = False  # a piece without data came: only the end may follow
        self.complete = False

    def take(self, data: bytes) -> None:
        """The next bytes; ``ProtocolError`` for what is no such file."""
        self._buffer += data
        while not self.complete and self._step():
            pass
        if self.complete and self._buffer:
            raise ProtocolError("more was sent than the file")

    def _step(self) -> bool:
        if self._left:
            piece = bytes(self._buffer[: self._left])
            del self._buffer[: len(piece)]
            self._digest.update(piece)
            self._write(self.size_bytes, piece)
            self.size_bytes += len(piece)
            self._left -= len(piece)
            return bool(self._buffer)
        if len(self._buffer) < HEAD.size:
            return False
        hole, length = HEAD.unpack_from(self._buffer)
        if hole == END:
            return self._end(length)
        self._digest.update(self._buffer[: HEAD.size])
        del self._buffer[: HEAD.size]
        self.size_bytes += hole
        self._left = length
        if self._tail:
            raise ProtocolError("a piece of the file has no data, and is not its last")
        self._tail = length == 0
        if self.size_bytes + length > self._limit_bytes or length > PIECE_BYTES:
            raise ProtocolError(f"the file is larger than {self._limit_bytes} bytes, or a piece of it too large")
        return True

    def _end(self, length: int) -> bool:
        size = self._digest.digest_size
        if length != size:
            raise ProtocolError("the file has no digest at its end")
        if len(self._buffer) < HEAD.size + size:
            return False
        said = bytes(self._buffer[HEAD.size : HEAD.size + size])
        del self._buffer[: HEAD.size + size]
        if said != self._digest.digest():
            raise ProtocolError("the file was damaged on its way: its digest is another")
        self.complete = True
        return False
