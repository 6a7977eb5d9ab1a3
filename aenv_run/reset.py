"""A connection that breaks off, so that its peer sees it."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress


def reset(writer: asyncio.StreamWriter) -> None:
    """End the connection with a reset: an end of file would look like the end of what was to be said.

    A unix socket knows no reset: its peer sees an end of file.
    """
    connected: socket.socket | None = writer.get_extra_info("socket")
    if connected is not None:
        with suppress(OSError):
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
