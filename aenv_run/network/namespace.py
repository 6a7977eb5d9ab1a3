"""Work inside a network namespace, without a process: a short-lived thread of our own joins it.

A namespace belongs to a thread. The thread is made for the one call and ends with it, so no thread of an executor
is ever left in the wrong place. What it opened (a socket) stays in that namespace for ever.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from fcntl import ioctl
from pathlib import Path
from typing import TypeVar

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h
T = TypeVar("T")

_libc = ctypes.CDLL(None, use_errno=True)


def join(namespace: Path) -> None:
    """Move the calling thread into ``namespace`` (os.setns came with Python 3.12)."""
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(descriptor, CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(namespace))
    finally:
        os.close(descriptor)


async def inside(namespace: Path, work: Callable[[], T]) -> T:
    """The result of ``work()`` called within ``namespace``; its exceptions come through."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            _discard(result)
        elif error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # None only where T is None

    def body() -> None:
        try:
            join(namespace)
            result = work()
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            loop.call_soon_threadsafe(deliver, None, error)
        else:
            loop.call_soon_threadsafe(deliver, result, None)

    threading.Thread(target=body, name=f"netns {namespace.name}", daemon=True).start()
    return await done


def _discard(result: object) -> None:
    """Nobody waits for the result any more: what it holds open is closed."""
    for one in result if isinstance(result, tuple) else (result,):
        if isinstance(one, socket.socket):
            one.close()


async def open_tap(namespace: Path, device: str) -> int:
    """A descriptor of a slot's tap, to be passed to an engine (``-netdev tap,fd=``); without vnet_hdr."""

    def work() -> int:
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        try:
            ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    return await inside(namespace, work)


def write_settings(settings: Mapping[str, str]) -> None:
    """Write net.* settings of the calling thread's namespace; ipv6 ones may be missing on a host without it.

    >>> write_settings({})
    """
    for name, value in settings.items():
        path = Path("/proc/sys/net") / name
        if name.startswith("ipv6/") and not path.exists():
            continue
        path.write_text(value)
