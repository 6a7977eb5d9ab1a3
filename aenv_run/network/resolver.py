"""The DNS server that a guest sees at its gateway: it asks the host's resolvers and applies the policy to names.

Its sockets are made inside the router's namespace, its questions leave from the host: the guest itself never
reaches a name server. Bounded in everything a guest can drive: questions in flight, connections, sizes, times.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import TYPE_CHECKING

from aenv_run.errors import AenvError
from aenv_run.later import later
from aenv_run.network.addressing import DNS
from aenv_run.network.namespace import inside
from aenv_run.network.policy import NEVER, PRIVATE, NameVerdict, NetworkPolicy

if TYPE_CHECKING:
    import dns.asyncquery
    import dns.edns
    import dns.exception
    import dns.flags
    import dns.message
    import dns.name
    import dns.opcode
    import dns.rcode
    import dns.rdataclass
    import dns.rdatatype
    import dns.resolver
    import dns.reversename
    import dns.rrset
else:
    dns = later("dns")

log = logging.getLogger(__name__)

PORT = 53
MAX_IN_FLIGHT = 64
MAX_CONNECTIONS = 16
UPSTREAM_TIMEOUT_S = 4.0
IDLE_TIMEOUT_S = 15.0
UDP_SIZE = 1232  # what fits every path without fragments (DNS flag day 2020)
DENIED = "denied by the sandbox's network policy"

#: Called before an answer of an admitted name is sent: (name, addresses, ttl in seconds) -> may it be sent.
Admit = Callable[[str, tuple[IPv4Address, ...], int], Awaitable[bool]]


class Upstream:
    """The host's name servers, read again when the file changes."""

    def __init__(self, servers: tuple[str, ...] = (), resolv_conf: Path = Path("/etc/resolv.conf")) -> None:
        self._fixed = servers
        self._file = resolv_conf
        self._read_at: int | None = None
        self._servers: tuple[str, ...] = ()

    def servers(self) -> tuple[str, ...]:
        """Addresses, in the order to be asked."""
        if self._fixed:
            return self._fixed
        try:
            changed = self._file.stat().st_mtime_ns
            if changed != self._read_at:
                resolver = dns.resolver.Resolver(filename=str(self._file))
                self._servers = tuple(str(server) for server in resolver.nameservers)
                self._read_at = changed
        except (OSError, dns.exception.DNSException) as error:
            log.warning("%s: %s", self._file, error)
        return self._servers

    async def ask(self, query: dns.message.Message) -> dns.message.Message | None:
        """The first answer that a server gives; None when none does."""
        for server in self.servers():
            question = dns.message.from_wire(query.to_wire())
            question.id = secrets.randbelow(1 << 16)
            with contextlib.suppress(dns.exception.DNSException, OSError, EOFError, ValueError):
                answer, _ = await dns.asyncquery.udp_with_fallback(
                    question, server, timeout=UPSTREAM_TIMEOUT_S, ignore_unexpected=True
                )
                answer.id = query.id
                return answer
        return None


class Forwarder:
    """One guest's DNS server."""

    def __init__(self, policy: Callable[[], NetworkPolicy], upstream: Upstream, admit: Admit) -> None:
        self._policy = policy
        self._upstream = upstream
        self._admit = admit
        self._datagrams: asyncio.DatagramTransport | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections = 0

    async def start(self, namespace: Path) -> None:
        """Listen on 10.0.2.3 inside ``namespace``, UDP and TCP."""
        loop = asyncio.get_running_loop()
        udp, tcp = await inside(namespace, _listen)
        try:
            self._datagrams, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(self), sock=udp)
            self._server = await asyncio.start_server(self._serve, sock=tcp)
        except BaseException:
            udp.close()
            tcp.close()
            raise

    async def close(self) -> None:
        """Stop and close the sockets, which would keep the namespace alive."""
        if self._datagrams:
            self._datagrams.close()
        if self._server:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def datagram(self, wire: bytes, peer: tuple[str, int]) -> None:
        """A question came by UDP; beyond the bound it is dropped, as the network may do."""
        if len(self._tasks) < MAX_IN_FLIGHT:
            self._track(asyncio.create_task(self._answer_datagram(wire, peer)))

    def _track(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer_datagram(self, wire: bytes, peer: tuple[str, int]) -> None:
        answer = await self.answer(wire, tcp=False)
        if answer is not None and self._datagrams and not self._datagrams.is_closing():
            self._datagrams.sendto(answer, peer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._track(task)
        self._connections += 1
        try:
            while self._connections <= MAX_CONNECTIONS:
                async with asyncio.timeout(IDLE_TIMEOUT_S):
                    (size,) = struct.unpack("!H", await reader.readexactly(2))
                    wire = await reader.readexactly(size)
                answer = await self.answer(wire, tcp=True)
                if answer is None:
                    return
                writer.write(struct.pack("!H", len(answer)) + answer)
                async with asyncio.timeout(IDLE_TIMEOUT_S):
                    await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self._connections -= 1
            writer.close()

    async def answer(self, wire: bytes, *, tcp: bool) -> bytes | None:
        """The bytes to send back; None for what is not a question."""
        try:
            query = dns.message.from_wire(wire)
        except dns.exception.DNSException:
            return _format_error(wire)
        if query.flags & dns.flags.QR:
            return None
        try:
            reply = await self._reply(query)
        except (AenvError, OSError, dns.exception.DNSException) as error:
            log.warning("dns: %s", error)
            reply = _empty(query, dns.rcode.SERVFAIL)
        size = 65535 if tcp else min(max(query.payload, 512), UDP_SIZE) if query.edns >= 0 else 512
        try:
            return reply.to_wire(max_size=size, prefer_truncation=True)
        except dns.exception.DNSException as error:
            log.info("dns: an answer could not be encoded: %s", error)
            return _empty(query, dns.rcode.SERVFAIL).to_wire()

    async def _reply(self, query: dns.message.Message) -> dns.message.Message:
        if query.opcode() != dns.opcode.QUERY:
            return _empty(query, dns.rcode.NOTIMP)
        if len(query.question) != 1:
            return _empty(query, dns.rcode.FORMERR)
        question = query.question[0]
        if any(b"." in label for label in question.name.labels):  # as text it would look like another name
            return _empty(query, dns.rcode.REFUSED)
        name = question.name.to_text(omit_final_dot=True).lower()
        if question.rdclass != dns.rdataclass.IN or question.rdtype in (dns.rdatatype.AXFR, dns.rdatatype.IXFR):
            return _empty(query, dns.rcode.REFUSED)
        verdict = self._policy().judge(name)
        if verdict is NameVerdict.REFUSE or _is_private_reverse(question.name):
            # Not REFUSED: resolver libraries take that for a passing fault and try again.
            return _empty(query, dns.rcode.NXDOMAIN, blocked=True)
        if question.rdtype == dns.rdatatype.AAAA:
            return _empty(query, dns.rcode.NOERROR)  # guests have no IPv6
        answer = await self._upstream.ask(query)
        if answer is None:
            return _empty(query, dns.rcode.SERVFAIL)
        opened = self._policy().opened
        answer.answer = [kept for rrset in answer.answer if (kept := _reachable(rrset, opened)) is not None]
        addresses = tuple(_addresses(answer.answer))
        ttl_s = min((rrset.ttl for rrset in answer.answer if rrset.rdtype == dns.rdatatype.A), default=0)
        if addresses and not await self._admit(name, addresses, ttl_s):
            return _empty(query, dns.rcode.NXDOMAIN, blocked=True)
        return answer


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, forwarder: Forwarder) -> None:
        self._forwarder = forwarder

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._forwarder.datagram(data, addr)


def _listen() -> tuple[socket.socket, socket.socket]:
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        udp.bind((DNS, PORT))
        tcp.bind((DNS, PORT))
        tcp.listen(MAX_CONNECTIONS)
    except BaseException:
        udp.close()
        tcp.close()
        raise
    return udp, tcp


def _empty(query: dns.message.Message, code: dns.rcode.Rcode, *, blocked: bool = False) -> dns.message.Message:
    reply = dns.message.make_response(query, recursion_available=True)
    reply.set_rcode(code)
    if blocked and query.edns >= 0:
        reply.use_edns(options=[dns.edns.EDEOption(dns.edns.EDECode.BLOCKED, DENIED)], payload=UDP_SIZE)
    return reply


def _format_error(wire: bytes) -> bytes | None:
    """The header of the question, turned into "format error"; None when there is no header or it is an answer."""
    if len(wire) < 12 or wire[2] & 0x80:
        return None
    return wire[:2] + bytes([0x80 | (wire[2] & 0x79), 0x80 | dns.rcode.FORMERR]) + bytes(8)


def _is_private_reverse(name: dns.name.Name) -> bool:
    """Names of private addresses: what the host's resolvers know about its own networks."""
    if not name.is_subdomain(dns.reversename.ipv4_reverse_domain):
        return False
    try:
        address = IPv4Address(dns.reversename.to_address(name))
    except (dns.exception.DNSException, ValueError):
        return False
    return any(address in network for network in (*PRIVATE, *NEVER))


def _reachable(rrset: dns.rrset.RRset, opened: Iterable[IPv4Network]) -> dns.rrset.RRset | None:
    """Without private addresses (DNS rebinding) but those in an opened range; None when nothing is left."""
    if rrset.rdtype != dns.rdatatype.A:
        return rrset
    kept = []
    for rdata in rrset:
        address = IPv4Address(rdata.to_text())
        private = any(address in network for network in (*PRIVATE, *NEVER))
        if not private or any(address in network for network in opened):
            kept.append(rdata)
    return dns.rrset.from_rdata_list(rrset.name, rrset.ttl, kept) if kept else None


def _addresses(answer: Iterable[dns.rrset.RRset]) -> Iterable[IPv4Address]:
    return (IPv4Address(rdata.to_text()) for rrset in answer if rrset.rdtype == dns.rdatatype.A for rdata in rrset)
