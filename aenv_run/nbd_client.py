"""A small client of block servers: bytes of a served layer, for those who look before an engine opens it."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aenv_run import nbd
from aenv_run.errors import CorruptData, StoreUnavailable
from aenv_run.nbd import ServedLayer

#: More than the server itself waits for its store.
TIMEOUT_S = 90.0


def read(layer: ServedLayer, offset: int, length: int, *, timeout_s: float = TIMEOUT_S) -> bytes:
    """Bytes of the layer. ``StoreUnavailable`` when they cannot be had, with the server's reason."""
    try:
        with connected(layer.socket, timeout_s) as connection:
            _open(connection, layer)
            connection.sendall(struct.pack(">IHHQQI", 0x25609513, 0, nbd.READ, 1, offset, length))
            _, error, _ = struct.unpack(">IIQ", _exactly(connection, 16))
            if error:
                raise StoreUnavailable(
                    f"layer {layer.name} cannot be read: {os.strerror(error)}",
                    fix="see whether the repository's store answers; `aenv cache show` says what is wrong",
                )
            return _exactly(connection, length)
    except OSError as error:
        raise StoreUnavailable(
            f"layer {layer.name} cannot be read: the block server at {layer.socket} does not answer: {error}",
            fix="try again: it is started when it is needed",
        ) from error


@contextmanager
def connected(path: Path, timeout_s: float | None) -> Iterator[socket.socket]:
    """A connection to a unix socket in a directory of any depth. ``OSError`` when nobody is there."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(f"/proc/self/fd/{directory}/{path.name}")
            yield connection
    finally:
        os.close(directory)


def _open(connection: socket.socket, layer: ServedLayer) -> None:
    if _exactly(connection, len(nbd.GREETING))[:16] != nbd.GREETING[:16]:
        raise ConnectionError("it does not greet as a block server")
    name = layer.export.encode()
    wanted = struct.pack(">I", len(name)) + name + struct.pack(">H", 0)
    connection.sendall(struct.pack(">I", 3) + b"IHAVEOPT" + struct.pack(">II", nbd.GO, len(wanted)) + wanted)
    while True:
        _, _, kind, length = struct.unpack(">QIII", _exactly(connection, 20))
        if length > 2 * nbd.MAX_NAME_BYTES:
            raise ConnectionError("its answer is too long")
        said = _exactly(connection, length)
        if kind & 0x80000000:
            raise refusal(said.decode(errors="replace"))
        if kind == 1:
            return


def refusal(said: str) -> CorruptData | StoreUnavailable:
    """The error that a server told with a refused export: ``code: message``."""
    code, _, message = said.partition(": ")
    if code == CorruptData.code:
        return CorruptData(message)
    return StoreUnavailable(message if code == StoreUnavailable.code else said, fix="try again")


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        data = connection.recv(min(count - len(parts), 1 << 20))
        if not data:
            raise ConnectionError("it hung up")
        parts += data
    return bytes(parts)
