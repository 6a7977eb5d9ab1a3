"""Port forwards: bytes, ends, limits, sockets on disk."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aenv_run.errors import Conflict, InvalidInput
from aenv_run.network import PortForward, TcpAddress, UnixAddress

LOOPBACK = "127.0.0.1"


async def answer_at_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers only when the peer has said its last: needs a half-closed stream."""
    data = await reader.read(-1)
    writer.write(b"got %d" % len(data))
    await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def target(handler: object = answer_at_end) -> AsyncIterator[TcpAddress]:
    server = await asyncio.start_server(handler, LOOPBACK, 0)  # type: ignore[arg-type]
    try:
        yield TcpAddress(LOOPBACK, server.sockets[0].getsockname()[1])
    finally:
        server.close()


async def ask(address: object, data: bytes) -> bytes:
    if isinstance(address, UnixAddress):
        reader, writer = await asyncio.open_unix_connection(str(address.path))
    else:
        assert isinstance(address, TcpAddress)
        reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(data)
    writer.write_eof()
    answer = await reader.read(-1)
    writer.close()
    return answer


async def test_half_close_tcp_to_tcp() -> None:
    async with target() as server, PortForward(TcpAddress(LOOPBACK, 0), server) as forward:
        assert await ask(forward.address, b"x" * 3_000_000) == b"got 3000000"
        assert await asyncio.gather(*(ask(forward.address, b"y" * n) for n in range(20))) == [
            b"got %d" % n for n in range(20)
        ]


async def test_unix_both_ways(tmp_path: Path) -> None:
    middle, outer = UnixAddress(tmp_path / "a"), UnixAddress(tmp_path / "b")
    async with target() as server, PortForward(middle, server), PortForward(outer, middle):
        assert stat.S_IMODE(outer.path.stat().st_mode) == 0o600
        assert await ask(outer, b"12345") == b"got 5"
    assert not list(tmp_path.iterdir())


async def test_a_slow_reader_holds_the_writer_back() -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        with contextlib.suppress(ConnectionError):
            while sent < 1 << 28:
                writer.write(bytes(1 << 16))
                await writer.drain()
                sent += 1 << 16
        writer.close()

    async with target(flood) as server, PortForward(TcpAddress(LOOPBACK, 0), server) as forward:
        assert isinstance(forward.address, TcpAddress)
        with socket.create_connection((LOOPBACK, forward.address.port)):
            await asyncio.sleep(0.5)
            assert 0 < sent < 1 << 25  # kernel buffers, and a bounded one of ours


async def test_nobody_at_the_target_is_a_closed_connection() -> None:
    async with target() as gone:
        pass
    async with PortForward(TcpAddress(LOOPBACK, 0), gone) as forward:
        with contextlib.suppress(ConnectionError):
            assert await ask(forward.address, b"x") == b""


async def test_too_many_connections_are_turned_away() -> None:
    async with target() as server, PortForward(TcpAddress(LOOPBACK, 0), server, max_connections=1) as forward:
        assert isinstance(forward.address, TcpAddress)
        _, first = await asyncio.open_connection(LOOPBACK, forward.address.port)
        await asyncio.sleep(0.05)
        with contextlib.suppress(ConnectionError):
            assert await ask(forward.address, b"x") == b""
        first.close()
        await first.wait_closed()
        await asyncio.sleep(0.05)
        assert await ask(forward.address, b"x") == b"got 1"


async def test_close_ends_connections() -> None:
    async with target() as server:
        forward = PortForward(TcpAddress(LOOPBACK, 0), server)
        address = await forward.start()
        assert isinstance(address, TcpAddress)
        reader, writer = await asyncio.open_connection(LOOPBACK, address.port)
        writer.write(b"x")
        await asyncio.sleep(0.05)
        await forward.close()
        await forward.close()
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 2) == b""
        writer.close()
        with pytest.raises(OSError):
            await asyncio.open_connection(LOOPBACK, address.port)


async def test_sockets_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with target() as server:
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(path))
        async with PortForward(UnixAddress(path), server):  # nobody listens there any more
            assert await ask(UnixAddress(path), b"12") == b"got 2"
            with pytest.raises(Conflict, match="in use"):
                await PortForward(UnixAddress(path), server).start()
        path.write_text("mine")
        with pytest.raises(Conflict, match="not a socket"):
            await PortForward(UnixAddress(path), server).start()
        assert path.read_text() == "mine"
        with pytest.raises(InvalidInput, match="too long"):
            await PortForward(UnixAddress(tmp_path / ("x" * 108)), server).start()


async def test_taken_port() -> None:
    async with target() as server:
        with pytest.raises(Conflict, match=str(server.port)):
            await PortForward(server, server).start()
