"""The NBD protocol (fixed newstyle, simple replies, read-only), and layers of a disk that are served by it.

No input or output in ``Session``: bytes come in, what to do goes out, so that a hostile peer can be tested without
a socket. Its numbers are those of the protocol's own description (doc/proto.md of the NetworkBlockDevice project).
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from aenv_run.types import Model

GREETING = b"NBDMAGICIHAVEOPT" + struct.pack(">H", 0b11)  # fixed newstyle, no zeroes
_OPTION_MAGIC, _REPLY_MAGIC = b"IHAVEOPT", 0x3E889045565A9
_REQUEST_MAGIC, _SIMPLE_REPLY_MAGIC = 0x25609513, 0x67446698
_OPTION, _REQUEST = struct.Struct(">8sII"), struct.Struct(">IHHQQI")
_OPTION_REPLY, _SIMPLE_REPLY = struct.Struct(">QIII"), struct.Struct(">IIQ")
EXPORT_NAME, ABORT, INFO, GO = 1, 2, 6, 7
_ACK, _INFO_REPLY = 1, 3
ERROR_UNSUPPORTED, ERROR_INVALID, ERROR_UNKNOWN, ERROR_TOO_BIG = (0x80000000 | code for code in (1, 3, 6, 9))
READ, WRITE, DISCONNECT, FLUSH = 0, 1, 2, 3
EPERM, EIO, EINVAL = 1, 5, 22
#: HAS_FLAGS, READ_ONLY, SEND_FLUSH, CAN_MULTI_CONN
EXPORT_FLAGS = 1 | 2 | 4 | 256
#: The protocol lets a client count on this much in one request.
MAX_READ_BYTES = 32 << 20
MAX_NAME_BYTES = 4096
#: A client that wants more than this before it begins is no client.
MAX_OPTIONS = 64
MAX_ERROR_BYTES = 3000


class ServedLayer(Model):
    """A layer of a disk that is no file here: a block server gives its bytes, read-only, at a unix socket."""

    socket: Path
    export: str
    size_bytes: int

    @property
    def name(self) -> str:
        """For messages."""
        return self.export[:19]

    @property
    def content(self) -> str:
        """Equal for equal bytes, whichever repository they come from."""
        return self.export.rpartition(".")[0]

    def seen_from(self, directory: Path) -> ServedLayer:
        """For a process that runs there: a socket's path holds 107 bytes, and a home may be deep."""
        return self.model_copy(update={"socket": Path(os.path.relpath(self.socket, directory.absolute()))})


#: A layer of a disk as an engine opens it: a file, or served.
DiskLayer: TypeAlias = Path | ServedLayer


class HostileError(Exception):
    """The peer does not keep to the protocol: the connection ends."""


@dataclass(frozen=True)
class Send:
    """To be sent as it is."""

    data: bytes


@dataclass(frozen=True)
class Open:
    """The peer wants this export: answer with ``Session.opened`` or ``Session.refused`` before anything else."""

    name: str
    option: int


@dataclass(frozen=True)
class Read:
    """The peer wants bytes of the export; within it, and at most ``MAX_READ_BYTES``. Answer in any order."""

    handle: int
    offset: int
    length: int


@dataclass(frozen=True)
class Close:
    """The peer is done."""


Event = Send | Open | Read | Close


@dataclass
class Session:
    """The server's side of one connection, after ``GREETING``."""

    size_bytes: int = -1
    _buffer: bytearray = field(default_factory=bytearray)
    _state: str = "flags"  # flags, options, opening, requests
    _no_zeroes: bool = False
    _options: int = 0
    _skip: int = 0

    def receive(self, data: bytes) -> None:
        """Bytes of the peer; then ask ``next`` until there is nothing more."""
        self._buffer += data

    def next(self) -> Event | None:
        """What to do now, or None when more bytes are needed. ``HostileError``: close the connection."""
        if self._skip:
            gone = min(self._skip, len(self._buffer))
            del self._buffer[:gone]
            self._skip -= gone
        if self._skip or self._state == "opening":
            return None
        if self._state == "flags":
            if len(self._buffer) < 4:
                return None
            flags = int.from_bytes(self._take(4), "big")
            if flags & ~0b11 or not flags & 1:
                raise HostileError(f"client flags {flags:#x}")
            self._no_zeroes = bool(flags & 2)
            self._state = "options"
        return self._next_option() if self._state == "options" else self._next_request()

    def opened(self, option: int, size_bytes: int) -> bytes:
        """The export that was wanted is there: the answer."""
        self._state = "options" if option == INFO else "requests"
        if option == EXPORT_NAME:
            self.size_bytes = size_bytes
            return struct.pack(">QH", size_bytes, EXPORT_FLAGS) + (b"" if self._no_zeroes else bytes(124))
        if option == GO:
            self.size_bytes = size_bytes
        # block sizes: any, best whole pages, at most what one request may be
        sizes = struct.pack(">HIII", 3, 1, 4096, MAX_READ_BYTES)
        export = struct.pack(">HQH", 0, size_bytes, EXPORT_FLAGS)
        return _reply(option, _INFO_REPLY, sizes) + _reply(option, _INFO_REPLY, export) + _reply(option, _ACK)

    def refused(self, option: int, why: str) -> bytes:
        """The export that was wanted cannot be had: the answer. ``HostileError`` where the protocol has none."""
        if option == EXPORT_NAME:
            raise HostileError(why)
        self._state = "options"
        return _reply(option, ERROR_UNKNOWN, why.encode()[:MAX_ERROR_BYTES])

    def _take(self, count: int) -> bytes:
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    def _next_option(self) -> Event | None:
        if len(self._buffer) < _OPTION.size:
            return None
        magic, option, length = _OPTION.unpack_from(self._buffer)
        if magic != _OPTION_MAGIC or length > 2 * MAX_NAME_BYTES:
            raise HostileError(f"option {option} of {length} bytes")
        if len(self._buffer) < _OPTION.size + length:
            return None
        self._options += 1
        if self._options > MAX_OPTIONS:
            raise HostileError("too many options")
        data = self._take(_OPTION.size + length)[_OPTION.size :]
        if option == ABORT:
            return Close()
        if option not in (EXPORT_NAME, INFO, GO):
            return Send(_reply(option, ERROR_UNSUPPORTED))
        name = data if option == EXPORT_NAME else _wanted_name(data)
        if name is None or len(name) > MAX_NAME_BYTES:
            if option == EXPORT_NAME:
                raise HostileError("a name that is too long")
            return Send(_reply(option, ERROR_INVALID))
        self._state = "opening"
        return Open(name.decode("ascii", "replace"), option)

    def _next_request(self) -> Event | None:
        if len(self._buffer) < _REQUEST.size:
            return None
        magic, _flags, kind, handle, offset, length = _REQUEST.unpack(self._take(_REQUEST.size))
        if magic != _REQUEST_MAGIC:
            raise HostileError("a request without its magic")
        if kind == READ:
            if not 0 < length <= MAX_READ_BYTES or offset + length > self.size_bytes:
                return Send(reply(handle, EINVAL))
            return Read(handle, offset, length)
        if kind == DISCONNECT:
            return Close()
        if kind == WRITE:
            if length > MAX_READ_BYTES:
                raise HostileError(f"a write of {length} bytes")
            self._skip = length
            return Send(reply(handle, EPERM))
        return Send(reply(handle, 0 if kind == FLUSH else EINVAL))


def reply(handle: int, error: int = 0) -> bytes:
    """The head of an answer to a request; without an error the bytes follow."""
    return _SIMPLE_REPLY.pack(_SIMPLE_REPLY_MAGIC, error, handle)


def _reply(option: int, kind: int, data: bytes = b"") -> bytes:
    return _OPTION_REPLY.pack(_REPLY_MAGIC, option, kind, len(data)) + data


def _wanted_name(data: bytes) -> bytes | None:
    """The export's name in the data of INFO or GO; None when they are malformed."""
    if len(data) < 6:
        return None
    length = int.from_bytes(data[:4], "big")
    if length > len(data) - 6:
        return None
    (wanted,) = struct.unpack_from(">H", data, 4 + length)
    return data[4 : 4 + length] if len(data) == 6 + length + 2 * wanted else None
