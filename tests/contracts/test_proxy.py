"""HTTP through the proxy: what a service gets, what a client gets, when, and what ends whom."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import httpx
import pytest

from aenv_run.errors import BootFailed, LimitReached
from aenv_run.lifecycle import State
from tests.contracts.envd_daemon import envelope, envelopes
from tests.contracts.proxy_site import (
    API_KEY,
    DOMAIN,
    ID,
    OTHER,
    ProxySite,
    head_of,
    proxy_site,
    says,
    service,
    traffic_token,
)

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.fixture
async def proxied(base: str) -> AsyncIterator[ProxySite]:
    token = secrets.token_hex(16)
    await initialise(base, token)
    async with proxy_site(base, token) as site:
        yield site


async def initialise(base: str, token: str) -> None:
    """Give the daemon its token."""
    async with httpx.AsyncClient() as http:
        (await http.post(f"{base}/init", json={"accessToken": token})).raise_for_status()


def problem(answer: httpx.Response, status: int) -> str:
    """The message of a refusal."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body["code"] == status
    return str(body["message"])


def signed(proxied: ProxySite, operation: str, path: str, expiration: int | None = None) -> dict[str, str]:
    """The query of a file URL, as SDKs sign it."""
    text = f"{path}:{operation}::{proxied.token}" + (f":{expiration}" if expiration is not None else "")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
    query = {"path": path, "signature": f"v1_{digest}"}
    return query if expiration is None else {**query, "signature_expiration": str(expiration)}


# -- the daemon --------------------------------------------------------------------------------------------


async def test_the_daemon_is_reached_in_every_way(proxied: ProxySite) -> None:
    token = {"X-Access-Token": proxied.token}
    ways = [
        ("/envs", {"Host": proxied.host(49983)}),
        ("/envs", {"E2b-Sandbox-Id": ID, "E2b-Sandbox-Port": "49983"}),
        ("/proxy/envs", {"E2b-Sandbox-Id": ID, "E2b-Sandbox-Port": "49983"}),
        ("/envs", {"X-Agentenv-Sandbox-Id": ID, "X-Agentenv-Target-Port": "49983"}),
        ("/proxy/envs", {"X-Agentenv-Sandbox-Id": ID, "X-Agentenv-Target-Port": "49983"}),
    ]
    async with httpx.AsyncClient(base_url=proxied.url) as http:
        for path, headers in ways:
            answer = await http.get(path, headers={**headers, **token})
            assert (answer.status_code, answer.json()) == (200, {}), (path, headers)
        assert (await http.get("/envs")).status_code == 418
        assert "once each" in problem(await http.get("/envs", headers={"E2b-Sandbox-Id": ID}), 400)


async def test_commands_stream_through_it(proxied: ProxySite) -> None:
    request = {"process": {"cmd": "/bin/sh", "args": ["-c", "echo one; sleep 0.2; echo two >&2; exit 3"]}}
    headers = {"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"}
    body = envelope(json.dumps(request).encode())
    events = []
    async with (
        proxied.envd() as http,
        http.stream("POST", "/process.Process/Start", content=body, headers=headers) as answer,
    ):
        assert answer.headers["content-type"] == "application/connect+json"
        async for _, payload in envelopes(answer.aiter_bytes()):
            events.append(json.loads(payload).get("event", {}))
    kinds = [next(iter(event), "") for event in events]
    assert kinds[0] == "start" and kinds[-2:] == ["end", ""] and events[-2]["end"]["exitCode"] == 3


async def test_who_may_use_the_daemon(proxied: ProxySite) -> None:
    async with proxied.envd() as right, proxied.envd(X_Access_Token="wrong") as wrong, proxied.to(49983) as none:
        assert (await right.get("/metrics")).status_code == 200
        assert "another one is right" in problem(await wrong.get("/metrics"), 401)
        assert "not there" in problem(await none.get("/metrics"), 401)
        assert (await none.get("/health")).status_code == 204
        twice = [("X-Access-Token", proxied.token), ("X-Access-Token", "x"), ("Host", proxied.host(49983))]
        assert "more than once" in problem(await none.get("/metrics", headers=twice), 401)
    for path in ("/init", "/%69nit", "//init", "/x/../init", "/aenv/detach", "/aenv/%2e/settle"):
        head = f"POST {path} HTTP/1.1\r\nContent-Length: 0\r\nX-Access-Token: {proxied.token}\r\nHost: "
        said = await proxied.raw(f"{head}{proxied.host(49983)}\r\nConnection: close\r\n\r\n".encode())
        assert said.startswith(b"HTTP/1.1 403 ") and b"only the node" in said, path


async def test_a_sandbox_that_is_not_secure_asks_for_nothing(base: str) -> None:
    token = secrets.token_hex(16)
    await initialise(base, token)
    async with proxy_site(base, token, secure=False) as site, site.to(49983) as http:
        assert (await http.get("/envs")).status_code == 200
        assert (await http.get("/envs", headers={"X-Access-Token": "of another time"})).status_code == 200


async def test_files_of_any_size_both_ways(proxied: ProxySite, tmp_path: object) -> None:
    path, data = f"{tmp_path}/big", secrets.token_bytes(1 << 20) * 12

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 1 << 18):
            yield data[start : start + (1 << 18)]

    kind = {"Content-Type": "application/octet-stream"}
    async with proxied.envd() as http:
        for content in (data, chunks()):
            answer = await http.post("/files", params={"path": path}, content=content, headers=kind)
            assert answer.status_code == 200, answer.text
            assert (await http.get("/files", params={"path": path})).content == data
        part = await http.get("/files", params={"path": path}, headers={"Range": "bytes=5-9"})
        assert (part.status_code, part.content) == (206, data[5:10])
        head = await http.head("/files", params={"path": path}, headers={"Accept-Encoding": "identity"})
        assert (head.headers["content-length"], head.content) == (str(len(data)), b"")


async def test_signed_file_urls_work_unchanged(proxied: ProxySite, tmp_path: object) -> None:
    path = f"{tmp_path}/with space+plus"
    soon, past = int(time.time()) + 60, int(time.time()) - 1
    kind = {"Content-Type": "application/octet-stream"}
    async with proxied.to(49983) as http:
        put = await http.post("/files", params=signed(proxied, "write", path), content=b"hello", headers=kind)
        assert put.status_code == 200, put.text
        assert (await http.get("/files", params=signed(proxied, "read", path))).content == b"hello"
        assert (await http.get("/files", params=signed(proxied, "read", path, soon))).content == b"hello"
        assert "expired" in problem(await http.get("/files", params=signed(proxied, "read", path, past)), 401)
        assert "invalid" in problem(await http.get("/files", params=signed(proxied, "write", path)), 401)
        assert "nor a signature" in problem(await http.get("/files", params={"path": path}), 401)
        many = {"path": path, "signature": "v1_x", **{f"a{n}": "" for n in range(200)}}
        assert "too many fields" in problem(await http.get("/files", params=many), 401)
        endless = {"path": path, "signature": "v1_x", "signature_expiration": "9" * 5000}
        assert "expired" in problem(await http.get("/files", params=endless), 401)


# -- services ----------------------------------------------------------------------------------------------


async def test_a_service_gets_the_request_as_it_was(proxied: ProxySite) -> None:
    seen = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await head_of(reader))
        writer.write(b"HTTP/1.1 299 Fine\r\nSet-Cookie: a=1\r\nset-cookie: b=\xff\r\nContent-Length: 0\r\n\r\n")

    async with service(handler) as port:
        said = await proxied.raw(
            b"GET /a%2Fb/..//c?x=%20&y=;#z HTTP/1.1\r\nHost: "
            + proxied.host(port).encode()
            + b"\r\nX-A: 1\r\nX-B: \xff  z\r\nX-A: 2\r\nX-Api-Key: "
            + API_KEY.encode()
            + b"\r\n\r\n"
        )
    lines = seen[0].split(b"\r\n")
    assert lines[0] == b"GET /a%2Fb/..//c?x=%20&y=; HTTP/1.1"
    assert lines[1] == b"host: localhost:%d" % port
    assert lines[2:5] == [b"x-a: 1", b"x-b: \xff  z", b"x-a: 2"]
    assert b"connection: close" in lines and b"x-api-key" not in seen[0]
    assert b"x-forwarded-uri: /a%2Fb/..//c?x=%20&y=;" in lines
    assert said.startswith(b"HTTP/1.1 299 ")
    assert b"set-cookie: a=1\r\nset-cookie: b=\xff\r\n" in said


async def test_private_ports_ask_for_the_token(base: str) -> None:
    async with service(says(OK)) as port, proxy_site(base, "t", public_ports=False) as site:
        token = traffic_token(ID)
        headers = {"X-Agentenv-Sandbox-Id": ID, "X-Agentenv-Target-Port": str(port)}
        async with site.to(port) as http, httpx.AsyncClient(base_url=site.url, headers=headers) as ours:
            assert "private" in problem(await http.get("/"), 403)
            assert "private" in problem(await http.get("/", headers={"E2B-Traffic-Access-Token": "x"}), 403)
            assert (await http.get("/", headers={"E2B-Traffic-Access-Token": token})).text == "ok"
            assert "private" in problem(await ours.get("/"), 401)
            assert (await ours.get("/", headers={"E2B-Traffic-Access-Token": token})).text == "ok"


async def test_statuses_say_what_is_the_matter(proxied: ProxySite) -> None:
    async with service(says(b"SSH-2.0-x\r\n\r\n")) as ssh, service(says(b"HTTP/1.1 200 OK\r\n")) as short:
        for port, words in ((ssh, "no HTTP"), (short, "before the end"), (1, "port is not open")):
            async with proxied.to(port) as http:
                answer = await http.get("/")
                assert words in problem(answer, 502) and answer.json()["sandboxId"] == ID
    async with proxied.to(3000) as http, httpx.AsyncClient(base_url=proxied.url) as bare:
        unknown = await http.get("/", headers={"Host": proxied.host(3000, OTHER)})
        assert "was not found" in problem(unknown, 502)
        ours = {"X-Agentenv-Sandbox-Id": OTHER, "X-Agentenv-Target-Port": "3000"}
        assert "not found" in problem(await bare.get("/", headers=ours), 404)
        proxied.pause()
        assert "was not found" in problem(await http.get("/health"), 502)
        ours["X-Agentenv-Sandbox-Id"] = ID
        assert "paused" in problem(await bare.get("/", headers=ours), 410)
        proxied.node.change(ID, state=State.DEAD)
        assert "not found" in problem(await bare.get("/", headers=ours), 404)
        malformed = {"Host": f"99999-{ID}.{DOMAIN}"}
        assert "not a port" in problem(await bare.get("/", headers=malformed), 400)


async def test_an_answer_is_sent_at_once(proxied: ProxySite) -> None:
    async with proxied.envd() as http:
        await http.get("/health")
        for connection in proxied.server.server_state.connections:
            connected = connection.transport.get_extra_info("socket")
            assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
            assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) != 0


# -- streams -----------------------------------------------------------------------------------------------


async def test_both_directions_stream_at_the_same_time(proxied: ProxySite) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        while size := int(await reader.readline(), 16):
            data = await reader.readexactly(size + 2)
            writer.write(b"%x\r\n" % size + data)
        writer.write(b"0\r\nX-Trailer: 1\r\n\r\n")

    async with service(echo) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxied.port)
        writer.write(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nHost: " + proxied.host(port).encode())
        writer.write(b"\r\n\r\n3\r\none\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"content-type: text/event-stream" in head
        assert await reader.readexactly(8) == b"3\r\none\r\n"  # before the request has ended
        writer.write(b"5\r\nthree\r\n")
        assert await reader.readexactly(10) == b"5\r\nthree\r\n"
        writer.write(b"0\r\n\r\n")
        assert await reader.readexactly(5) == b"0\r\n\r\n"
        writer.close()


async def test_who_hangs_up_ends_the_other(proxied: ProxySite) -> None:
    gone = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n")
        assert await reader.read(1) == b""
        gone.set()

    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc")

    async with service(endless) as port, proxied.to(port) as http:
        async with http.stream("GET", "/") as answer:
            assert await anext(answer.aiter_raw()) == b"data: 1\n\n"
        await http.aclose()
        await asyncio.wait_for(gone.wait(), 10)
    async with service(broken) as port, proxied.to(port) as http:
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get("/")


async def test_a_slow_reader_holds_the_service_back(proxied: ProxySite) -> None:
    written = 0
    stuck = asyncio.Event()

    async def firehose(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while written < 1 << 28:
            writer.write(bytes(1 << 16))
            try:
                async with asyncio.timeout(1.5):
                    await writer.drain()
            except TimeoutError:
                stuck.set()
                return
            written += 1 << 16

    async with service(firehose) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxied.port, limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: " + proxied.host(port).encode() + b"\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.wait_for(stuck.wait(), 60)
        writer.transport.abort()
    assert written < 1 << 26  # buffers of sockets, not of the proxy


async def test_an_early_answer_ends_an_upload(proxied: ProxySite) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")

    never = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b"x" * 1000
        await never.wait()

    async with service(refuse) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxied.port)
        writer.write(b"POST / HTTP/1.1\r\nHost: " + proxied.host(port).encode())
        writer.write(b"\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 1000)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413 ")
        assert await reader.readexactly(3) == b"big"
        writer.close()


async def test_who_asks_whether_to_send_the_body_is_told_by_the_service(proxied: ProxySite) -> None:
    async def agree(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"expect: 100-continue" in await head_of(reader)
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert await reader.readexactly(3) == b"abc"
        writer.write(OK)

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n")
        assert await reader.read() == b""

    for handler, first in ((agree, b"100"), (refuse, b"401")):
        async with service(handler) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", proxied.port)
            writer.write(b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 3\r\nHost: ")
            writer.write(proxied.host(port).encode() + b"\r\n\r\n")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            assert head.split()[1] == first
            if first == b"100":
                writer.write(b"abc")
                assert (await reader.readuntil(b"\r\n\r\n")).split()[1] == b"200"
            writer.transport.abort()


SMUGGLED = [
    b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    b"X: a\r\n folded\r\n\r\n",
    b"X: a\nY: b\r\n\r\n",
    b"X : a\r\n\r\n",
    b"Content-Length: +3\r\n\r\nabc",
    b"Transfer-Encoding: chunked\r\n\r\n3\nabc\n0\n\n",
    b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
    b"Host: other\r\n\r\n",
]


async def test_what_two_could_read_differently_is_refused(proxied: ProxySite) -> None:
    seen = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        seen.append(await reader.read())
        writer.write(OK)

    async with service(handler) as port:
        for rest in SMUGGLED:
            head = b"POST / HTTP/1.1\r\nConnection: close\r\nHost: " + proxied.host(port).encode()
            said = await proxied.raw(head + b"\r\n" + rest)
            assert said.startswith(b"HTTP/1.1 400 ") and said.count(b"HTTP/1.1 ") == 1, rest
            told = json.loads(said.partition(b"\r\n\r\n")[2])
            assert told["code"] == 400 and told["message"] and b"content-type: application/json" in said
    assert set(seen) <= {b""}  # a body that was malformed never got there


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTT",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: ",
        b"CONNECT x",
        b"CONNECT " + ID.encode() + b":80 HTTP/1.1\r\nX: ",
        b"POST /none HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n",  # answered at once
        b"GET /none HTTP/1.1\r\nHost: x\r\n\r\nGET / HT",  # the second one
    ],
)
async def test_a_client_that_sends_drop_by_drop_is_let_go(base: str, sent: bytes) -> None:
    async with proxy_site(base, "t", head_s=0.5) as site:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        writer.write(sent)

        async def drops() -> None:
            while True:
                writer.write(b"x")
                await asyncio.sleep(0.05)

        dropping = asyncio.create_task(drops())
        try:
            with suppress(ConnectionResetError):
                await asyncio.wait_for(reader.read(), 20)  # to the end
        finally:
            dropping.cancel()
            writer.transport.abort()


async def test_extensions_of_chunks_and_trailers_end_here(proxied: ProxySite) -> None:
    seen = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await head_of(reader))
        seen.append(await reader.readuntil(b"0\r\n\r\n"))
        writer.write(OK)

    async with service(handler) as port:
        head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nHost: " + proxied.host(port).encode()
        said = await proxied.raw(head + b"\r\n\r\n3;a=b\r\nabc\r\n0\r\nX-Trailer: 1\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 200 ") and seen[1] == b"3\r\nabc\r\n0\r\n\r\n"
        assert b"trailer" not in seen[0].lower()
        # Where an upgrade is asked for that nobody has, too.
        more = b"\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n3\r\nabc\r\n0\r\nX-Trailer: 1\r\n\r\n"
        assert (await proxied.raw(head + more)).startswith(b"HTTP/1.1 200 ")
        assert b"trailer" not in seen[2].lower()


@pytest.mark.parametrize("start", [b"1\r\na\r\n0\r\nX: ", b"1;x="])
async def test_what_never_ends_behind_a_head_ends_the_connection(proxied: ProxySite, start: bytes) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", proxied.port)
    writer.write(b"POST /none HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + start)
    with pytest.raises(ConnectionError):
        async with asyncio.timeout(20):
            for _ in range(1 << 14):  # 1 GiB, if nobody minds
                writer.write(bytes([120]) * (1 << 16))
                await writer.drain()
    writer.transport.abort()


async def test_another_coding_than_chunks_is_refused(proxied: ProxySite) -> None:
    async with service(says(OK)) as port:
        host = b"\r\nHost: " + proxied.host(port).encode()
        said = await proxied.raw(
            b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked" + host + b"\r\n\r\n0\r\n\r\n"
        )
        assert said.startswith(b"HTTP/1.1 501 ")


# -- the life of a sandbox ---------------------------------------------------------------------------------


async def test_a_pause_ends_what_is_open_at_once(proxied: ProxySite) -> None:
    waiting = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"/stream" in await head_of(reader):
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        waiting.set()
        await reader.read()

    async with service(hang) as port, proxied.to(port) as http:
        asked = asyncio.create_task(http.get("/wait"))
        await waiting.wait()
        async with http.stream("GET", "/stream") as answer:
            heard = answer.aiter_raw()
            assert await anext(heard) == b"a"
            proxied.pause()
            assert "paused" in problem(await asyncio.wait_for(asked, 10), 502)
            with pytest.raises(httpx.RemoteProtocolError):
                await asyncio.wait_for(anext(heard), 10)


async def test_what_was_open_ends_with_its_machine_though_another_has_its_address(proxied: ProxySite) -> None:
    waiting = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"/wait" in await head_of(reader):
            waiting.set()
            await reader.read()
        writer.write(OK)

    async with service(hang) as port, proxied.to(port) as http:
        asked = asyncio.create_task(http.get("/wait"))
        await waiting.wait()
        proxied.pause()
        proxied.node.run_again(ID)  # nobody saw it paused
        assert "paused" in problem(await asyncio.wait_for(asked, 10), 502)
        assert (await http.get("/")).text == "ok"


async def test_a_machine_that_moved_is_found_for_the_same_request(proxied: ProxySite) -> None:
    right = proxied.node.address
    assert right is not None
    proxied.node.change(ID, address=right.model_copy(update={"port": 1}))
    async with service(says(OK)) as port, proxied.to(port) as http:
        assert "could not be reached" in problem(await http.get("/"), 502)
        await http.get("/")
        found = proxied.node.infos[ID]
        proxied.node.infos[ID] = found.model_copy(update={"address": right})  # and no stamp tells of it
        assert (await http.post("/", content=b"x")).text == "ok"


async def test_traffic_resumes_once_for_all(base: str) -> None:
    async with service(says(OK)) as port, proxy_site(base, "t", auto_resume=True) as site, site.to(port) as http:
        site.pause()
        site.node.resume_gate = asyncio.Event()
        asked = [asyncio.create_task(http.get("/")) for _ in range(5)]
        await asyncio.wait_for(site.node.resuming.wait(), 10)
        asked[0].cancel()
        site.node.resume_gate.set()
        answers = await asyncio.gather(*asked[1:])
        assert [answer.text for answer in answers] == ["ok"] * 4
        assert site.node.resumed == [300.0]  # its own time to live was less


async def test_nobody_without_a_token_wakes_a_sandbox(base: str) -> None:
    async with proxy_site(base, "t", auto_resume=True, public_ports=False) as site:
        site.pause()
        async with site.to(3000) as http, site.to(49983) as envd:
            problem(await http.get("/"), 403)
            problem(await envd.get("/envs"), 401)
        assert site.node.resumed == []
        site.node.fail_resume = BootFailed("no memory")
        async with site.to(3000, e2b_traffic_access_token=traffic_token(ID)) as http:
            assert "was not found" in problem(await http.get("/"), 502)
            site.node.fail_resume = LimitReached("8 of at most 8 run")
            assert "8 of at most 8" in problem(await http.get("/"), 503)


async def test_the_node_is_not_asked_for_every_request(proxied: ProxySite) -> None:
    async with proxied.envd() as http:
        for _ in range(20):
            assert (await http.get("/health")).status_code == 204
        assert proxied.node.asked <= 3
        proxied.node.infos.clear()
        proxied.node.versions.clear()
        assert "was not found" in problem(await http.get("/health"), 502)
