"""WebSockets and CONNECT through the proxy: all that two programs could see of each other's connection."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.http11 import Request, Response
from websockets.typing import Origin, Subprotocol

from aenv_run.credentials import ServerAddress
from aenv_run.errors import AenvError, Conflict, InvalidInput, NotFound, SandboxDead, Unauthenticated
from aenv_run.network import PortForward, TcpAddress
from aenv_run.paths import Home
from aenv_run.port_tunnel import open_tunnel, pass_through
from aenv_run.reset import reset
from tests.contracts.proxy_site import (
    API_KEY,
    DOMAIN,
    ID,
    OTHER,
    ProxySite,
    proxy_site,
    says,
    service,
    traffic_token,
)

CHAT = Subprotocol("chat.v2")


@pytest.fixture
async def proxied(base: str) -> AsyncIterator[ProxySite]:
    async with proxy_site(base, "t") as site:
        yield site


async def echo(connection: ServerConnection) -> None:
    """Says everything again; "bye" closes with a code of its own, "who" tells the request."""
    async for message in connection:
        if message == "bye":
            await connection.close(4321, "as you say")
        elif message == "who":
            assert connection.request is not None
            headers = connection.request.headers
            await connection.send(f"{connection.request.path} {headers['Host']} {headers.get('Origin')}")
        else:
            await connection.send(message)


@asynccontextmanager
async def echoing(**options: object) -> AsyncIterator[int]:
    """A WebSocket server; its port."""
    async with serve(echo, "127.0.0.1", 0, subprotocols=[CHAT], max_size=None, **options) as server:  # type: ignore[arg-type]
        yield next(iter(server.sockets)).getsockname()[1]


def at(site: ProxySite, port: int, path: str = "/", **headers: str) -> connect:
    """A client of it."""
    named = {"Host": site.host(port), **{name.replace("_", "-"): value for name, value in headers.items()}}
    return connect(
        f"ws://{site.host(port)}{path}",
        host="127.0.0.1",
        port=site.port,
        additional_headers={name: value for name, value in named.items() if name != "Host"},
        max_size=None,
        proxy=None,
        subprotocols=[Subprotocol("other"), CHAT],
        origin=Origin(f"http://{site.host(port)}"),
    )


async def test_a_websocket_is_passed_on_whole(proxied: ProxySite) -> None:
    async with echoing() as port, at(proxied, port, "/a%2Fb?c=d") as socket:
        assert socket.subprotocol == CHAT
        assert [extension.name for extension in socket.protocol.extensions] == ["permessage-deflate"]
        await socket.send("who")
        assert await socket.recv() == f"/a%2Fb?c=d localhost:{port} http://localhost:{port}"
        big = secrets.token_bytes(2 << 20)
        for message in ("text é", b"", b"\x00\xff", big):
            await socket.send(message)
            assert await socket.recv() == message
        await socket.send(["in ", "three ", "parts"])
        assert await socket.recv() == "in three parts"
        await (await socket.ping(b"of the client"))
        await socket.send("bye")
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4321, "as you say")


async def test_a_websocket_that_is_refused_says_so(base: str) -> None:
    def no(connection: ServerConnection, request: Request) -> Response:
        return connection.respond(451, "not for you")

    async with proxy_site(base, "t", public_ports=False) as site, echoing(process_request=no) as port:
        token = traffic_token(ID)
        with pytest.raises(InvalidStatus) as refused:
            await at(site, port)
        assert refused.value.response.status_code == 403
        with pytest.raises(InvalidStatus) as refused:
            await at(site, port, e2b_traffic_access_token=token)
        assert refused.value.response.status_code == 451
        assert refused.value.response.body == b"not for you"
        async with service(says(b"SSH-2.0\r\n\r\n")) as ssh:
            for wrong in (1, ssh):
                with pytest.raises(InvalidStatus) as refused:
                    await at(site, wrong, e2b_traffic_access_token=token)
                assert refused.value.response.status_code == 502


async def test_a_pause_closes_a_websocket_with_a_reason(proxied: ProxySite) -> None:
    async with echoing() as port, at(proxied, port) as socket:
        await socket.send("hello")
        assert await socket.recv() == "hello"
        proxied.pause()
        with pytest.raises(ConnectionClosed) as closed:
            await asyncio.wait_for(socket.recv(), 10)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1001 and "paused" in closed.value.rcvd.reason


async def test_who_leaves_a_websocket_ends_the_other(proxied: ProxySite) -> None:
    left = asyncio.Event()

    async def wait(connection: ServerConnection) -> None:
        await connection.send("here")
        await connection.wait_closed()
        left.set()

    async with serve(wait, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        async with at(proxied, port) as socket:
            assert await socket.recv() == "here"
            socket.transport.abort()
        await asyncio.wait_for(left.wait(), 10)


# -- CONNECT -----------------------------------------------------------------------------------------------


async def opened(
    site: ProxySite, authority: str, *headers: str
) -> tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]:
    """The answer to a CONNECT, and the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    lines = [f"CONNECT {authority} HTTP/1.1", f"Host: {authority}", *headers, "", ""]
    for byte in "\r\n".join(lines).encode():  # as slow as a client may be
        writer.write(bytes([byte]))
        await writer.drain()
    return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10), reader, writer


async def test_a_service_may_speak_first(proxied: ProxySite) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 ready\r\n")
        everything = await reader.read()  # to the end of the client's direction alone
        writer.write(hashlib.sha256(everything).digest())

    data = secrets.token_bytes(3 << 20)
    async with service(greet) as port:
        for authority in (f"{proxied.host(port)}:25", f"{ID}:{port}"):
            head, reader, writer = await opened(proxied, authority)
            assert head.startswith(b"HTTP/1.1 200 ")
            assert await reader.readline() == b"220 ready\r\n"
            writer.write(data)
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), 20) == hashlib.sha256(data).digest()
            writer.close()


async def test_a_connect_that_is_refused_says_why(base: str) -> None:
    async with proxy_site(base, "t", public_ports=False) as site, service(says(b"x")) as port:
        token = f"E2B-Traffic-Access-Token: {traffic_token(ID)}"
        cases = [
            (f"{ID}:{port}", 403, ()),
            (f"{ID}:1", 502, (token,)),
            (f"{OTHER}:{port}", 502, (token,)),
            (f"{ID}:49983", 403, (token,)),
            (f"{ID}:70000", 400, (token,)),
            ("example.com:443", 403, (token,)),
            (f"api.{DOMAIN}:443", 403, (token,)),
            ("[::1]:22", 400, (token,)),
            ("127.0.0.1:22", 403, (token,)),
        ]
        for authority, status, headers in cases:
            head, _, writer = await opened(site, authority, *headers)
            assert head.split()[1] == str(status).encode(), authority
            writer.close()
        said = await site.raw(f"CONNECT {ID}:{port} HTTP/1.1\r\nX : a\r\n\r\n".encode())
        assert said.startswith(b"HTTP/1.1 400 ")


async def test_a_pause_breaks_a_connect_off(proxied: ProxySite) -> None:
    gone = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"here")
        try:
            await reader.read()
        finally:
            gone.set()

    async with service(wait) as port:
        _, reader, writer = await opened(proxied, f"{ID}:{port}")
        assert await reader.readexactly(4) == b"here"
        proxied.pause()
        with pytest.raises(ConnectionResetError):  # no end of file, which would look like the service's own
            await asyncio.wait_for(reader.read(), 10)
        await asyncio.wait_for(gone.wait(), 10)
        writer.close()


async def test_what_a_service_breaks_off_is_no_end(base: str, tmp_path: Path) -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"here")
        await reader.readexactly(1)
        reset(writer)

    async with service(break_off) as port, proxy_site(base, "t", home=Home(tmp_path)) as site:
        _, reader, writer = await opened(site, f"{ID}:{port}")
        assert await reader.readexactly(4) == b"here"
        writer.write(b"x")
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 10)
        writer.close()
        async with open_tunnel(ServerAddress(site.url, API_KEY), ID, port) as tunnel:
            assert await tunnel.read() == b"here"
            await tunnel.write(b"x")
            with pytest.raises(SandboxDead, match="broke off"):
                await asyncio.wait_for(tunnel.read(), 10)


UPGRADE = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: AAAA\r\nSec-WebSocket-Version: 13\r\n"


async def test_a_refusal_that_breaks_off_is_followed_by_nothing(proxied: ProxySite) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 403 No\r\nContent-Length: 99\r\n\r\npart")

    async with service(refuse) as port:
        head = b"GET / HTTP/1.1\r\nHost: " + proxied.host(port).encode() + b"\r\n"
        said = await proxied.raw(head + UPGRADE + b"\r\n")
    assert said.startswith(b"HTTP/1.1 403 ") and said.endswith(b"part") and said.count(b"HTTP/1.1 ") == 1


async def test_a_websocket_has_no_body_and_waits_for_its_turn(proxied: ProxySite) -> None:
    asked = []

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        await reader.read()

    async with service(hang) as port:
        head = b"GET / HTTP/1.1\r\nHost: " + proxied.host(port).encode() + b"\r\n"
        for body in (b"Content-Length: 2\r\n\r\nab", b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"):
            assert (await proxied.raw(head + UPGRADE + body)).startswith(b"HTTP/1.1 400 ")
        assert not asked
        await proxied.raw(head + b"\r\n" + head + UPGRADE + b"\r\n")
        assert len(asked) <= 1 and not any(b"websocket" in one for one in asked)


async def test_what_comes_with_the_head_is_not_lost(proxied: ProxySite) -> None:
    async def agree(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 Yes\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        writer.write(b"got " + await reader.readexactly(7))

    async with service(agree) as port:
        head = b"GET / HTTP/1.1\r\nHost: " + proxied.host(port).encode() + b"\r\n"
        said = await proxied.raw(head + UPGRADE + b"\r\ntoo bad")
    assert said.startswith(b"HTTP/1.1 101 ") and said.endswith(b"\r\n\r\ngot too bad")


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 101 Yes\n\n", b"nothing of HTTP\n", b"HTTP/1.1 101 " + b"x" * (1 << 20)]
)
async def test_a_service_that_speaks_no_http_is_said_at_once(proxied: ProxySite, answer: bytes) -> None:
    async def wrong(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await reader.read()

    async with service(wrong) as port:
        head = b"GET / HTTP/1.1\r\nHost: " + proxied.host(port).encode() + b"\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", proxied.port)
        writer.write(head + UPGRADE + b"\r\n")
        assert (await asyncio.wait_for(reader.readline(), 60)).startswith((b"HTTP/1.1 502 ", b"HTTP/1.1 101 "))
        writer.transport.abort()


# -- our own way -------------------------------------------------------------------------------------------


async def test_our_commands_reach_a_port_by_the_key(base: str, tmp_path: Path) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 ready\r\n")
        everything = await reader.read()
        writer.write(hashlib.sha256(everything).digest() + everything)

    data = secrets.token_bytes(3 << 20)
    async with service(greet) as port, proxy_site(base, "t", home=Home(tmp_path), public_ports=False) as site:
        server = ServerAddress(site.url, API_KEY)
        async with open_tunnel(server, ID, port) as tunnel:
            assert await tunnel.read() == b"220 ready\r\n"
            sending = asyncio.create_task(tunnel.write(data))
            await sending
            await tunnel.write_eof()
            heard = b""
            while part := await tunnel.read():
                heard += part
            assert heard == hashlib.sha256(data).digest() + data
            assert await tunnel.read() == b""
        cases: list[tuple[str, int, type[AenvError], str]] = [
            (ID, 1, NotFound, "port is not open"),
            (OTHER, port, NotFound, "not found"),
            (ID, 49983, AenvError, "HTTP requests alone"),
            ("x", port, InvalidInput, "not a valid sandbox id"),
        ]
        for sandbox_id, number, error, words in cases:
            with pytest.raises(error, match=words):
                async with open_tunnel(server, sandbox_id, number):
                    pass
        with pytest.raises(Unauthenticated):
            async with open_tunnel(ServerAddress(site.url, "x" * 40), ID, port):
                pass


async def test_a_local_port_leads_there(base: str, tmp_path: Path) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"ready\n")
        writer.write(hashlib.sha256(await reader.read()).digest())

    data = secrets.token_bytes(3 << 20)
    async with service(greet) as port, proxy_site(base, "t", home=Home(tmp_path)) as site:
        there = partial(pass_through, ServerAddress(site.url, API_KEY), ID, port)
        async with PortForward(TcpAddress("127.0.0.1", 0), there) as forward:
            assert isinstance(forward.address, TcpAddress)
            reader, writer = await asyncio.open_connection("127.0.0.1", forward.address.port)
            assert await reader.readline() == b"ready\n"
            writer.write(data)
            writer.write_eof()
            assert await reader.read() == hashlib.sha256(data).digest()
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", forward.address.port)
            assert await reader.readline() == b"ready\n"
            site.pause()
            for _ in range(2):  # what is open breaks off, and what comes later is refused
                with pytest.raises(ConnectionResetError):
                    await asyncio.wait_for(reader.read(), 10)
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", forward.address.port)
            writer.close()


async def test_our_way_ends_with_its_machine(base: str, tmp_path: Path) -> None:
    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"here")
        await reader.read()

    async with service(wait) as port, proxy_site(base, "t", home=Home(tmp_path)) as site:
        server = ServerAddress(site.url, API_KEY)
        async with open_tunnel(server, ID, port) as tunnel:
            assert await tunnel.read() == b"here"
            site.pause()
            with pytest.raises(SandboxDead, match="paused"):
                await asyncio.wait_for(tunnel.read(), 10)
        with pytest.raises(Conflict, match="paused"):
            async with open_tunnel(server, ID, port):
                pass
