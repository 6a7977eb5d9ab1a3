"""A host of its own for a test of the network, and an internet beside it: nothing of the real host is touched.

The test's main thread moves into a fresh network namespace, which then *is* the host: its settings, rules and
routes are those of that namespace. A second one is everything out there: web servers, a name server, a metadata
service, a private network, on addresses that mean nothing on the real internet.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import secrets
import socket
import struct
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import dns.exception
import dns.flags
import dns.message
import dns.query
import dns.rcode
import dns.rrset

from aenv_run.drivers.protocol import NetworkSlot
from aenv_run.network.addressing import NETNS_DIRECTORY, home_tag
from aenv_run.network.links import destroy, namespaces
from aenv_run.network.namespace import CLONE_NEWNET, inside, open_tap

HOST_PUBLIC, HOST_PRIVATE = "203.0.113.1", "192.168.77.1"
WEB, OTHER_WEB, NAME_SERVER = "198.51.100.80", "198.51.100.81", "198.51.100.53"
METADATA, PRIVATE_WEB, LAN_WEB = "169.254.169.254", "10.77.0.5", "192.168.77.9"
SERVICE_PORT = 8000
TIMEOUT_S = 1.0
#: For what must come to be true, however busy the host is.
PATIENCE_S = 15.0

NAMES = {
    "web.example.org.": WEB,
    "api.web.example.org.": WEB,
    "other.example.net.": OTHER_WEB,
    "rebind.example.org.": PRIVATE_WEB,
}
#: Datagrams "note ..." that reached the world.
HEARD: list[str] = []
libc = ctypes.CDLL(None, use_errno=True)


def sh(script: str, namespace: str = "") -> str:
    """Run shell lines, in a named namespace; any failure is an error."""
    prefix = ["nsenter", f"--net=/run/netns/{namespace}", "--"] if namespace else []
    done = subprocess.run([*prefix, "sh", "-ec", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{script}\n{done.stderr}"
    return done.stdout


@contextlib.contextmanager
def new_host() -> Iterator[None]:
    """The calling thread's network is a fresh one; back in the old one at the end."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        assert libc.unshare(CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        yield
    finally:
        assert libc.setns(before, CLONE_NEWNET) == 0
        os.close(before)


@dataclass
class World:
    """The internet beside the host: which names its server was asked, and its namespace's name."""

    name: str
    asked: list[str] = field(default_factory=list)
    sockets: list[socket.socket] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return Path("/run/netns") / self.name


def connect_world(world: World) -> None:
    """Two links from the host, one public and one private, with routes."""
    sh(
        f"""
        ip link set lo up
        ip netns add {world.name}
        ip link add wan type veth peer name wan netns {world.name}
        ip link add lan type veth peer name lan netns {world.name}
        ip addr add {HOST_PUBLIC}/24 dev wan
        ip addr add {HOST_PRIVATE}/24 dev lan
        ip link set wan addrgenmode none up
        ip link set lan addrgenmode none up
        """
    )
    far = "\n".join(f"ip addr add {address}/32 dev lo" for address in (WEB, OTHER_WEB, NAME_SERVER))
    sh(
        f"""
        ip link set lo up
        ip addr add 203.0.113.254/24 dev wan
        ip addr add {LAN_WEB}/24 dev lan
        ip link set wan up
        ip link set lan up
        {far}
        ip addr add {METADATA}/32 dev lo
        ip addr add {PRIVATE_WEB}/32 dev lo
        ip route add 100.96.0.0/16 via {HOST_PUBLIC}
        """,
        world.name,
    )
    sh(
        f"""
        ip route add default via 203.0.113.254
        ip route add 10.77.0.0/24 via 203.0.113.254
        ip route add {METADATA}/32 via 203.0.113.254
        """
    )


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says who the peer is, then echoes; "later" after a second."""
    with contextlib.suppress(ConnectionError):
        writer.write(f"{writer.get_extra_info('peername')[0]}\n".encode())
        while data := await reader.read(65536):
            if data == b"later":
                await asyncio.sleep(1)
            writer.write(data)
            await writer.drain()
    writer.close()


def tcp_listener(address: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(64)
    return listener


class UdpEcho(asyncio.DatagramProtocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if data.startswith(b"note "):
            HEARD.append(data.decode())
        self.transport.sendto(data, addr)


class NameServer(UdpEcho):
    def __init__(self, world: World) -> None:
        self.world = world

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.transport.sendto(self.answer(data, tcp=False), addr)

    def answer(self, data: bytes, *, tcp: bool) -> bytes:
        query = dns.message.from_wire(data)
        name = query.question[0].name.to_text().lower()
        self.world.asked.append(name)
        reply = dns.message.make_response(query)
        if name == "big.example.org.":  # does not fit a datagram
            if tcp:
                texts = [f'"{"x" * 200}{number}"' for number in range(20)]
                reply.answer.append(dns.rrset.from_text_list(name, 30, "IN", "TXT", texts))
            else:
                reply.flags |= dns.flags.TC
        elif name in NAMES:
            reply.answer.append(dns.rrset.from_text(name, 30, "IN", "A", NAMES[name]))
        else:
            reply.set_rcode(dns.rcode.NXDOMAIN)
        return reply.to_wire(max_size=65535)

    async def stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (size,) = struct.unpack("!H", await reader.readexactly(2))
        answer = self.answer(await reader.readexactly(size), tcp=True)
        writer.write(struct.pack("!H", len(answer)) + answer)
        writer.close()


def udp_socket(address: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    bound.bind((address, port))
    return bound


async def serve_tcp(namespace: Path, address: str, port: int) -> asyncio.Server:
    return await asyncio.start_server(_echo, sock=await inside(namespace, lambda: tcp_listener(address, port)))


@contextlib.asynccontextmanager
async def world(*homes: Path) -> AsyncIterator[World]:
    """The host of the test and its internet, with servers on both sides. Whatever ``homes`` leave is removed."""
    made = World(f"test-world-{secrets.token_hex(4)}")
    loop = asyncio.get_running_loop()
    with new_host(), contextlib.ExitStack() as stack:
        stack.callback(sh, f"ip netns del {made.name} 2>/dev/null || true")
        connect_world(made)
        server = NameServer(made)
        servers = [
            await serve_tcp(made.path, "0.0.0.0", 80),
            await asyncio.start_server(_echo, sock=tcp_listener("0.0.0.0", SERVICE_PORT)),  # on the host itself
            await asyncio.start_server(
                server.stream, sock=await inside(made.path, lambda: tcp_listener(NAME_SERVER, 53))
            ),
        ]
        names = await inside(made.path, lambda: udp_socket(NAME_SERVER, 53))
        echo = await inside(made.path, lambda: udp_socket(WEB, 7))
        datagrams = [
            (await loop.create_datagram_endpoint(lambda: server, sock=names))[0],
            (await loop.create_datagram_endpoint(UdpEcho, sock=echo))[0],
        ]
        loop.set_default_executor(ThreadPoolExecutor())
        try:
            yield made
        finally:
            # Threads that were made here stay on this host for ever: whoever comes next gets others.
            loop.set_default_executor(ThreadPoolExecutor())
            for one in servers:
                one.close()
            for transport in datagrams:
                transport.close()
            await asyncio.sleep(0)
            for home in homes:
                await remove_all(home)


@dataclass
class Guest:
    """A process in the place of a guest: what it can reach, seen from inside its network namespace."""

    namespace: Path

    async def do(self, work: Callable[[], str]) -> str:
        return await inside(self.namespace, work)

    async def tcp(self, address: str, port: int = 80) -> str:
        """Who the server says the guest is, or the kind of failure."""

        def work() -> str:
            try:
                with socket.create_connection((address, port), TIMEOUT_S) as connection:
                    return connection.recv(100).decode().strip()
            except TimeoutError:
                return "timeout"
            except OSError as error:
                return type(error).__name__ if type(error) is not OSError else f"errno {error.errno}"

        return await self.do(work)

    async def reaches(self, address: str, port: int = 80) -> bool:
        return (await self.tcp(address, port)).count(".") == 3

    async def reaches_soon(self, address: str, port: int = 80) -> bool:
        """As ``reaches``, on a busy host too: a new link may lose its first packets, an answer may take long."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            if await self.reaches(address, port):
                return True
            await asyncio.sleep(0.1)
        return False

    async def udp(self, address: str, port: int = 7, source: str = "") -> bool:
        def work() -> str:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
                one.settimeout(TIMEOUT_S)
                try:
                    if source:
                        one.bind((source, 0))
                    one.sendto(b"hello", (address, port))
                    return one.recv(100).decode()
                except OSError:
                    return ""

        return await self.do(work) == "hello"

    async def lookup(self, name: str, *, kind: str = "A", tcp: bool = False, server: str = "10.0.2.3") -> str:
        """The addresses, or the answer's code, or "timeout"."""

        def work() -> str:
            ask = dns.query.tcp if tcp else dns.query.udp
            reply = None
            for _ in range(3):  # as resolver libraries do
                with contextlib.suppress(OSError, dns.exception.Timeout):
                    reply = ask(dns.message.make_query(name, kind, use_edns=0), server, timeout=2)
                    break
            if reply is None:
                return "timeout"
            if reply.rcode() != dns.rcode.NOERROR or not reply.answer:
                truncated = " truncated" if reply.flags & dns.flags.TC else ""
                return dns.rcode.to_text(reply.rcode()) + truncated
            return " ".join(rdata.to_text() for rrset in reply.answer for rdata in rrset)

        return await self.do(work)


@contextlib.asynccontextmanager
async def tap_guest(slot: NetworkSlot) -> AsyncIterator[Guest]:
    """In the place of a virtual machine: a namespace whose own tap is wired to the slot's, frame by frame."""
    loop = asyncio.get_running_loop()
    name = f"test-guest-{secrets.token_hex(4)}"
    near = await open_tap(slot.router_netns, slot.device)
    sh(f"ip netns add {name}")
    path = Path("/run/netns") / name
    far = await open_tap(path, "eth0")
    try:
        sh(
            f"""
            ip link set lo up
            ip link set eth0 address {slot.mac}
            ip addr add {slot.guest_address}/24 dev eth0
            ip link set eth0 up
            ip route add default via {slot.gateway}
            """,
            name,
        )

        for source, target in ((near, far), (far, near)):
            os.set_blocking(source, False)
            loop.add_reader(source, _copy_frames, source, target)
        yield Guest(path)
    finally:
        for descriptor in (near, far):
            loop.remove_reader(descriptor)
            os.close(descriptor)
        sh(f"ip netns del {name}")


def _copy_frames(source: int, target: int) -> None:
    with contextlib.suppress(OSError):  # nothing more to read, or a full queue, where a network drops too
        while True:
            os.write(target, os.read(source, 65536))


def veth_guest(slot: NetworkSlot) -> Guest:
    assert slot.guest_netns is not None
    return Guest(slot.guest_netns)


async def remove_all(home: Path) -> None:
    """What a failed test left of this home."""
    for slot_id in namespaces(home_tag(home)):
        await destroy(slot_id)


def host_state(*homes: Path) -> dict[str, str]:
    """Everything of the host that a network may change. Namespaces and mounts are shared with the real host."""
    settings = Path("/proc/sys/net/ipv4")
    mounts = Path("/proc/self/mounts").read_text()
    tags = tuple(home_tag(home) for home in homes)
    return {
        "links": sh("ip -o link show | sed 's/mtu.*//'"),
        "addresses": sh("ip -o addr show | sed 's/valid_lft.*//'"),
        "routes": sh("ip route show table all | sort"),
        "rules": sh("ip rule show; nft list ruleset"),
        "namespaces": "\n".join(
            sorted(p.name for p in NETNS_DIRECTORY.iterdir() if any(t in p.name for t in tags))
        ),
        "mounts": "\n".join(line for line in mounts.splitlines() if any(tag in line for tag in tags)),
        "forwarding": "\n".join(
            f"{path.parent.name} {path.read_text().strip()}" for path in sorted(settings.glob("conf/*/forwarding"))
        ),
        "ip_forward": (settings / "ip_forward").read_text(),
    }


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 20.0) -> None:
    """Wait for something that happens off the path."""
    for _ in range(int(timeout_s / 0.02)):
        if await condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not happen in time")
