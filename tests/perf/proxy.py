"""``make bench-proxy``: a sandbox through ``aenv serve`` against the same calls straight to its daemon or node.

Both in the same run, one after the other, from this process; server, node and engine are processes of
their own. Times are of whole calls: the last byte of the answer has come. As root in a network of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from rich import box
from rich.console import Console
from rich.table import Column, Table

from aenv_run.guest import open_port
from aenv_run.guest.connect import envelope
from aenv_run.lifecycle import State
from aenv_run.node_client import NodeClient
from aenv_run.node_wire import CreateRequest, SandboxInfo
from aenv_run.paths import Home
from tests.e2e.conftest import ROOT, node_home
from tests.e2e.tiny import make_tiny
from tests.perf import own_host
from tests.perf.report import percentile

MIB = 1 << 20
CALL_HEADERS = {"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"}
AT_ONCE, RATE_S = 16, 4.0
SERVICE_PORT = 8080


@dataclass
class Row:
    """One call, through the proxy and straight. ``unit``: "ms" (less is better), or a rate (more is)."""

    call: str
    unit: str
    proxied: list[float] = field(default_factory=list)
    straight: list[float] = field(default_factory=list)
    server_ms: float | None = None  # of processor time of the server, for one call


@dataclass(frozen=True)
class Way:
    """A client of the daemon, and what every request of it takes along."""

    url: str
    headers: dict[str, str]

    def http(self) -> httpx.AsyncClient:
        """One that keeps connections."""
        limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE)
        return httpx.AsyncClient(
            base_url=self.url, headers=self.headers, timeout=120, limits=limits, trust_env=False
        )


@asynccontextmanager
async def serving(home: Home) -> AsyncIterator[tuple[str, str, int]]:
    """``aenv serve`` of a home: its URL, its key, its process."""
    command = [sys.executable, "-m", "aenv_run.cli", "serve", "--port", "0"]
    environment = {**os.environ, "AENV_HOME": str(home.root), "PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        while not (found := re.search(rb"serving (http://\S+)", await process.stderr.readline())):
            assert process.returncode is None, "the server ended"
        key = home.secrets / "api-key"
        drain = asyncio.create_task(_drain(process.stderr))
        yield found[1].decode(), (await asyncio.to_thread(key.read_text)).strip(), process.pid
    finally:
        process.terminate()
        await process.wait()
        drain.cancel()


async def _drain(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass


def processor_s(pid: int) -> float:
    """Seconds of processor time that a process has had."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


async def timed(times: int, call: Callable[[], Awaitable[object]]) -> list[float]:
    """Milliseconds of each; the first, which opens connections, does not count."""
    await call()
    found = []
    for _ in range(times):
        began_s = time.perf_counter()
        await call()
        found.append((time.perf_counter() - began_s) * 1000)
    return found


async def rate(call: Callable[[], Awaitable[object]]) -> float:
    """Calls per second, with several at a time."""
    until_s, done = time.perf_counter() + RATE_S, 0

    async def again() -> None:
        nonlocal done
        while time.perf_counter() < until_s:
            await call()
            done += 1

    began_s = time.perf_counter()
    await asyncio.gather(*(again() for _ in range(AT_ONCE)))
    return done / (time.perf_counter() - began_s)


async def execute(http: httpx.AsyncClient, script: str = "") -> None:
    """A command to its end."""
    process = {"cmd": "/bin/sh", "args": ["-c", script]} if script else {"cmd": "/bin/true", "args": []}
    body = envelope({"process": process, "stdin": False})
    answer = await http.post("/process.Process/Start", content=body, headers=CALL_HEADERS)
    assert answer.status_code == 200 and b'"end"' in answer.content, answer.text


def download(way: Way, path: str, size_bytes: int) -> float:
    """Blocking: MiB per second of one file."""
    url = urlsplit(way.url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=300)
    buffer = memoryview(bytearray(MIB))
    began_s = time.perf_counter()
    connection.request("GET", path, headers=way.headers)
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    seen = 0
    while count := answer.readinto(buffer):
        seen += count
    took_s = time.perf_counter() - began_s
    connection.close()
    assert seen == size_bytes, (seen, size_bytes)
    return seen / MIB / took_s


def upload(way: Way, path: str, size_bytes: int) -> float:
    """Blocking: MiB per second of one file."""
    url = urlsplit(way.url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=300)
    piece = bytes(MIB)
    began_s = time.perf_counter()
    connection.putrequest("POST", path)
    for name, value in {**way.headers, "Content-Type": "application/octet-stream"}.items():
        connection.putheader(name, value)
    connection.putheader("Content-Length", str(size_bytes))
    connection.endheaders()
    for _ in range(size_bytes // MIB):
        connection.send(piece)
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    answer.read()
    took_s = time.perf_counter() - began_s
    connection.close()
    return size_bytes / MIB / took_s


class Bench:
    """One driver."""

    def __init__(self, rounds: int, big_mib: int) -> None:
        self._rounds, self._big_bytes = rounds, big_mib * MIB
        self.rows: list[Row] = []

    async def run(self, home: Home) -> dict[str, str]:
        """Measure all; what it ran on."""
        node = NodeClient(home)
        async with serving(home) as (url, key, self._pid):
            await self._creates(node, url, key)
            info = await node.create(CreateRequest(snapshot="tiny", timeout_s=3600))
            assert info.state is State.RUNNING and info.address is not None and info.access_token is not None
            token = {"X-Access-Token": info.access_token}
            straight = Way(f"http://{info.address.host}:{info.address.port}", token)
            routing = {"E2b-Sandbox-Id": info.sandbox_id, "E2b-Sandbox-Port": "49983"}
            proxied = Way(url, {**token, **routing})
            async with straight.http() as there, proxied.http() as through:
                await self._calls(through, there)
                await execute(there, f"dd if=/dev/zero of=/tmp/big bs=1 count=0 seek={self._big_bytes}")
            await self._bytes(proxied, straight)
            await self._ports(url, info)
            await node.kill(info.sandbox_id)
        return {"driver": info.driver, "mode": info.mode}

    def _row(self, call: str, unit: str = "ms") -> Row:
        self.rows.append(Row(call, unit))
        return self.rows[-1]

    async def _creates(self, node: NodeClient, url: str, key: str) -> None:
        """Straight: the node's own socket, with the same client library."""
        row = self._row("create and kill")
        async with httpx.AsyncClient(base_url=url, headers={"X-API-Key": key}, timeout=120) as api:

            async def by_api() -> None:
                made = await api.post("/v2/sandboxes", json={"templateID": "tiny"})
                assert made.status_code == 201, made.text
                await api.delete(f"/sandboxes/{made.json()['sandboxID']}")

            async def by_node() -> None:
                await node.kill((await node.create(CreateRequest(snapshot="tiny"))).sandbox_id)

            for _ in range(max(2, self._rounds // 20)):  # in turns: the node is the same
                row.straight += await timed(2, by_node)
                row.proxied += await timed(2, by_api)

    async def _calls(self, through: httpx.AsyncClient, there: httpx.AsyncClient) -> None:
        small = b"x" * 1024

        async def write(http: httpx.AsyncClient) -> None:
            kind = {"Content-Type": "application/octet-stream"}
            answer = await http.post("/files", params={"path": "/tmp/small"}, content=small, headers=kind)
            assert answer.status_code == 200

        async def read(http: httpx.AsyncClient) -> None:
            assert (await http.get("/files", params={"path": "/tmp/small"})).content == small

        async def health(http: httpx.AsyncClient) -> None:
            assert (await http.get("/health")).status_code == 204

        named = {"exec /bin/true": execute, "write 1 KiB": write, "read 1 KiB": read, "health": health}
        for name, call in named.items():
            row = self._row(name)
            for client, samples in ((there, row.straight), (through, row.proxied)):
                before_s = processor_s(self._pid)
                samples += await timed(self._rounds, partial(call, client))
                row.server_ms = (processor_s(self._pid) - before_s) * 1000 / (self._rounds + 1)
        for name in ("exec /bin/true", "read 1 KiB", "health"):
            row = self._row(f"{name}, {AT_ONCE} at a time", "1/s")
            for client, samples in ((there, row.straight), (through, row.proxied)):
                samples.append(await rate(partial(named[name], client)))

    async def _bytes(self, proxied: Way, straight: Way) -> None:
        mib = self._big_bytes // MIB
        down, up = self._row(f"download {mib} MiB", "MiB/s"), self._row("upload 64 MiB", "MiB/s")
        for _ in range(3):
            for way, row in ((straight, down.straight), (proxied, down.proxied)):
                before_s = processor_s(self._pid)
                row.append(await asyncio.to_thread(download, way, "/files?path=/tmp/big", self._big_bytes))
                down.server_ms = (processor_s(self._pid) - before_s) * 1000
            for way, row in ((straight, up.straight), (proxied, up.proxied)):
                row.append(await asyncio.to_thread(upload, way, "/files?path=/tmp/up", 64 * MIB))

    async def _ports(self, url: str, info: SandboxInfo) -> None:
        """A service on the guest's loopback; straight is the daemon's own tunnel to it."""
        assert info.address is not None
        endpoint, token = info.address.endpoint, info.access_token
        headers = {"X-Access-Token": token or ""}
        async with Way(endpoint.url, headers).http() as there:
            script = f"cd /tmp && /bin/busybox httpd -p 127.0.0.1:{SERVICE_PORT}"
            await execute(there, script)
        routing = {"E2b-Sandbox-Id": info.sandbox_id, "E2b-Sandbox-Port": str(SERVICE_PORT)}
        row = self._row("GET of a service")
        request = b"GET /small HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

        async def tunnel() -> None:
            reader, writer = await open_port(endpoint, SERVICE_PORT, access_token=token)
            writer.write(request)
            assert (await reader.read()).endswith(b"x" * 1024)
            writer.close()

        async with Way(url, routing).http() as through:

            async def get() -> None:
                assert len((await through.get("/small")).content) == 1024

            row.straight += await timed(self._rounds, tunnel)
            row.proxied += await timed(self._rounds, get)


def show(facts: dict[str, str], rows: list[Row]) -> None:
    """The table for people."""
    console = Console(highlight=False, width=130)
    console.print(", ".join(f"{key}: {value}" for key, value in facts.items()))
    columns = ("unit", "n", "p50", "p95", "p99", "there p50", "there p99", "x p50", "x p99", "cpu ms")
    table = Table(Column("call", no_wrap=True), box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        ours, theirs = row.proxied, row.straight
        far = 0.99 if row.unit == "ms" else 0.01
        cells = [statistics.median(ours), percentile(ours, 0.95), percentile(ours, 0.99)]
        cells += [statistics.median(theirs), percentile(theirs, 0.99)]
        ratios = [cells[0] / cells[3], percentile(ours, far) / percentile(theirs, far)]
        texts = [f"{cell:.2f}" if cell < 100 else f"{cell:.0f}" for cell in [*cells, *ratios]]
        texts.append("-" if row.server_ms is None else f"{row.server_ms:.2f}")
        table.add_row(row.call, row.unit, str(len(ours)), *texts)
    console.print(table)
    console.print("there: straight to the daemon (create: to the node). x: ours by theirs, of times or rates")
    console.print("cpu: processor time of the server for one call, which others' work does not change much")


def main() -> None:
    """Measure the drivers that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--driver", action="append", choices=["gvisor", "qemu"], help="one or more; all otherwise")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--mib", type=int, default=1024, help="of the download")
    parser.add_argument("--json", type=Path, help="every sample")
    given = parser.parse_args()
    if os.geteuid() == 0:
        own_host.move_there()
    found = []
    for driver in given.driver or ["gvisor", "qemu"]:
        os.environ["AENV_DRIVER"] = driver
        parts = tempfile.TemporaryDirectory(prefix="aenv-bp-", dir="/var/tmp")
        with parts as scratch, node_home(Path(scratch)) as home:
            if os.geteuid() == 0:
                (home.network / "config.json").unlink()  # each sandbox has a network of its own, as users have
            (home.root / "scratch").mkdir()
            asyncio.run(make_tiny(home, home.root / "scratch", driver=driver))
            bench = Bench(given.rounds, given.mib)
            facts = asyncio.run(bench.run(home))
            facts |= {"processors": str(os.cpu_count()), "machine": platform.machine()}
            show(facts, bench.rows)
            found.append({"facts": facts, "rows": [asdict(row) for row in bench.rows]})
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
