"""A sandbox's network slot, looked at from within its namespaces without a process. Standard library only."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Callable

TYPE_CHECKING = False  # see aenv_run/__init__.py
if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")

CLONE_NEWNET = 0x40000000
#: linux/sockios.h, linux/if.h
SIOCGIFFLAGS, SIOCGIFADDR, IFF_UP = 0x8913, 0x8915, 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def inside(namespace: str, work: Callable[[], T]) -> T:
    """The result of ``work()`` in this network namespace. Only the calling thread goes there, and comes back."""
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        there = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _join(there)
        finally:
            os.close(there)
        try:
            return work()
        finally:
            _join(here)
    finally:
        os.close(here)


def _join(descriptor: int) -> None:
    if _LIBC.setns(descriptor, CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the network namespace cannot be joined: {os.strerror(number)}")


def is_configured(device: str, address: str, gateway: str) -> bool:
    """Whether the calling thread's namespace has all that runsc takes over: address, route, both links up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as asker:

        def ask(request: int, name: str) -> bytes:
            return fcntl.ioctl(asker, request, struct.pack("16s24x", name.encode()))[16:]

        try:
            found = socket.inet_ntoa(ask(SIOCGIFADDR, device)[4:8])
            up = all(struct.unpack_from("=H", ask(SIOCGIFFLAGS, name))[0] & IFF_UP for name in (device, "lo"))
        except OSError:
            return False
    return up and found == address and _has_default_route(device, gateway)


def _has_default_route(device: str, gateway: str) -> bool:
    wanted = f"{struct.unpack('=I', socket.inet_aton(gateway))[0]:08X}"
    with open("/proc/thread-self/net/route", encoding="ascii") as table:  # noqa: PTH123
        return any(line.split()[:3] == [device, "00000000", wanted] for line in table)
