"""Holding back new connections into a sandbox on a network slot while its memory is saved.

One that is accepted between the daemon's disconnect and the checkpoint is in the image, and the restored daemon
may never answer (measured: 1 in 20 images, with two clients that connect without pause). Established connections
are left alone. Over netlink, as nft(8) takes 15 to 40 ms for it and every capture waits. Standard library only.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time

from aenv_run.drivers.gvisor_slot import inside

TYPE_CHECKING = False  # see aenv_run/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable

#: A handshake that was let in just before has become a connection by then, which the daemon knows and closes.
SETTLE_S = 0.01
TIMEOUT_S = 10.0
#: Numbers of linux/netfilter/nfnetlink.h and nf_tables.h.
NETLINK_NETFILTER, SUBSYSTEM, IPV4 = 12, 10, 2
BATCH_BEGIN, BATCH_END = 0x10, 0x11
NEW_TABLE, DELETE_TABLE, NEW_CHAIN, NEW_RULE = 0, 2, 3, 6
REQUEST, ACK, CREATE, APPEND = 0x1, 0x4, 0x400, 0x800
NESTED = 0x8000
FORWARD, OUTPUT = 2, 3
PRIORITY = -10
HEADER = struct.Struct("=IHHII")
ERROR = 2
TABLE = b"aenv_gate\0"


class GateError(Exception):
    """The gate's rules could not be loaded; the text says why."""


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def _nested(kind: int, *values: bytes) -> bytes:
    return _attribute(kind | NESTED, b"".join(values))


def _number(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack(">i", value))


def _expression(name: bytes, *attributes: bytes) -> bytes:
    return _nested(1, _attribute(1, name + b"\0"), _nested(2, *attributes))


def _load(base: int, offset: int, length: int) -> bytes:
    """Bytes of a header (1 network, 2 transport) into register 1."""
    return _expression(b"payload", _number(1, 1), _number(2, base), _number(3, offset), _number(4, length))


def _equals(value: bytes) -> bytes:
    """Go on if register 1 holds ``value``."""
    return _expression(b"cmp", _number(1, 1), _number(2, 0), _nested(3, _attribute(1, value)))


def _new_connections(address: str) -> bytes:
    """A rule: to this address, TCP, the first packet of a handshake: drop."""
    flags = _expression(
        b"bitwise", _number(1, 1), _number(2, 1), _number(3, 1), _nested(4, _attribute(1, b"\x12")),
        _nested(5, _attribute(1, b"\0")),
    )  # fmt: skip
    drop = _expression(b"immediate", _number(1, 0), _nested(2, _nested(2, _number(1, 0))))
    to_guest = _load(1, 16, 4) + _equals(socket.inet_aton(address))
    tcp = _load(1, 9, 1) + _equals(bytes([socket.IPPROTO_TCP]))
    return _nested(4, to_guest, tcp, _load(2, 13, 1), flags, _equals(b"\x02"), drop)


class Gate:
    """Rules in the slot's router. What is dropped comes again by itself a second later."""

    def __init__(self, router_netns: str, guest_address: str) -> None:
        self._router_netns, self._guest_address = router_netns, guest_address
        self._closed = False
        # Kept: to close one, the kernel waits until what it removed is gone for good (measured: 10 ms).
        self._connection: socket.socket | None = None

    def close(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """No new connection gets in, and what ``meanwhile`` does is done. Idempotent."""
        messages = [*self._removed()]
        messages.append((NEW_TABLE, CREATE, _attribute(1, TABLE)))
        for hook, name in ((FORWARD, b"forward\0"), (OUTPUT, b"output\0")):
            place = _nested(4, _number(1, hook), _number(2, PRIORITY))
            chain = _attribute(1, TABLE) + _attribute(3, name) + place + _attribute(7, b"filter\0")
            rule = _attribute(1, TABLE) + _attribute(2, name) + _new_connections(self._guest_address)
            messages += [(NEW_CHAIN, CREATE, chain), (NEW_RULE, CREATE | APPEND, rule)]
        self._closed = True  # also if only the answer is lost
        self._send(messages)
        settled_s = time.monotonic() + SETTLE_S
        meanwhile()
        time.sleep(max(0.0, settled_s - time.monotonic()))

    def open(self) -> None:
        """Let them in again. Idempotent."""
        if self._closed:
            self._send(self._removed())
            self._closed = False

    def _removed(self) -> list[tuple[int, int, bytes]]:
        """The table is made first, so that there is one to delete."""
        return [(NEW_TABLE, CREATE, _attribute(1, TABLE)), (DELETE_TABLE, 0, _attribute(1, TABLE))]

    def _send(self, messages: list[tuple[int, int, bytes]]) -> None:
        """As one transaction: all or nothing."""
        numbered = [(SUBSYSTEM << 8 | kind, flags | ACK, IPV4, 0, body) for kind, flags, body in messages]
        batch = [(BATCH_BEGIN, 0, 0, SUBSYSTEM, b""), *numbered, (BATCH_END, 0, 0, SUBSYSTEM, b"")]
        data = b"".join(
            HEADER.pack(HEADER.size + 4 + len(body), kind, REQUEST | flags, number, 0)
            + struct.pack(">BBH", family, 0, resource)
            + body
            for number, (kind, flags, family, resource, body) in enumerate(batch)
        )
        try:
            self._connection = connection = self._connection or self._connect()
            connection.send(data)
            _await_answers(connection, len(messages))
        except OSError as error:
            if self._connection is not None:  # answers that come late would be taken for those of the next
                self._connection.close()
                self._connection = None
            raise GateError(f"connections into the sandbox cannot be held back: {error}") from error

    def _connect(self) -> socket.socket:
        connection = inside(
            self._router_netns, lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
        )
        connection.settimeout(TIMEOUT_S)
        return connection


def _await_answers(connection: socket.socket, count: int) -> None:
    while count > 0:
        data = connection.recv(65536)
        while len(data) >= HEADER.size + 4:
            size, kind, *_ = HEADER.unpack_from(data)
            if kind == ERROR:
                (code,) = struct.unpack_from("=i", data, HEADER.size)
                if code:
                    raise OSError(-code, os.strerror(-code) if -code in errno.errorcode else f"error {-code}")
                count -= 1
            data = data[max(HEADER.size, size + 3 & ~3) :]
