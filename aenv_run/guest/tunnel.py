"""The way to a service inside a sandbox, over the daemon's own port: whatever network the sandbox has, or none."""

from __future__ import annotations

import asyncio
import re

from aenv_run.drivers.protocol import Endpoint
from aenv_run.errors import NotFound, ProtocolError, SandboxDead
from aenv_run.guest.connect import error_of

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
#: Of an answer that is no tunnel: enough for its reason.
_MAX_REASON_BYTES = 4096
_CLOSED_PORT = 502


async def open_port(
    endpoint: Endpoint, port: int, *, access_token: str | None, timeout_s: float = 30.0
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to ``port`` of the sandbox's loopback; its bytes are those of the service.

    The writer is the caller's to close. ``write_eof`` ends one direction alone. ``NotFound`` when nothing listens
    there, ``Unauthenticated``, ``LimitReached``; ``SandboxDead`` when the daemon is not reached.
    """
    where = f"port {port} of the sandbox"
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
            writer.write(_request(endpoint, port, access_token))
            head = await reader.readuntil(b"\r\n\r\n")
            status = _status(head)
            if status == 101:
                return reader, writer
            reason = (await reader.read(_MAX_REASON_BYTES)).decode(errors="replace")
    except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        _drop(writer)
        raise SandboxDead(
            f"the sandbox's daemon is unreachable ({where}): {error or type(error).__name__}"
        ) from error
    except BaseException:
        _drop(writer)
        raise
    _drop(writer)
    if status == _CLOSED_PORT:
        raise NotFound(f"nothing listens on {where}")
    raise error_of(status, f"{where}: the daemon answered {status} {reason}")


def _request(endpoint: Endpoint, port: int, access_token: str | None) -> bytes:
    lines = [
        f"GET /aenv/connect?port={port} HTTP/1.1",
        f"Host: {endpoint.host}:{endpoint.port}",
        "Connection: Upgrade",
        "Upgrade: aenv-tcp",
    ]
    if access_token:
        lines.append(f"X-Access-Token: {access_token}")
    return "\r\n".join([*lines, "", ""]).encode()


def _status(head: bytes) -> int:
    match = _STATUS.match(head)
    if match is None:
        raise ProtocolError("the sandbox's daemon answered something that is no HTTP")
    return int(match[1])


def _drop(writer: asyncio.StreamWriter | None) -> None:
    if writer is not None:
        writer.close()
