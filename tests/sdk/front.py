"""What stands before a server in earnest: names of its sandboxes, and TLS, on an address of loopback of their own.

Names under ``DOMAIN`` are known to processes that are started with ``Front.argv``, which see another resolv.conf.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dns.message
import dns.rdatatype
import dns.rrset
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DOMAIN = "sandboxes.test"
INSIDE = 'mount --bind "$1" /etc/resolv.conf && mount --bind "$2" /etc/nsswitch.conf && shift 2 && exec "$@"'
CHUNK = 1 << 16
DAY = timedelta(days=1)


@dataclass(frozen=True)
class Front:
    """``authority`` is the certificate that its clients must trust."""

    folder: Path
    authority: Path

    def argv(self, argv: Sequence[str | Path]) -> list[str | Path]:
        """The command, in a mount namespace in which the names are known."""
        settings = [self.folder / "resolv.conf", self.folder / "nsswitch.conf"]
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", INSIDE, "sh", *settings, *argv]


@contextmanager
def front(folder: Path, upstream: tuple[str, int]) -> Iterator[Front]:
    """TLS on port 443 for all names of ``DOMAIN``, handed on as it is to ``upstream``."""
    _certificates(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "leaf.pem", folder / "leaf.key")
    names, listener = _sockets()
    address = names.getsockname()[0]
    (folder / "resolv.conf").write_text(f"nameserver {address}\n")
    (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
    loop = asyncio.new_event_loop()
    with names, listener:
        threads = [
            threading.Thread(target=_answer, args=(names, address)),
            threading.Thread(target=_relay, args=(loop, listener, context, upstream)),
        ]
        for thread in threads:
            thread.start()
        try:
            yield Front(folder, folder / "authority.pem")
        finally:
            loop.call_soon_threadsafe(loop.stop)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as waker:
                waker.sendto(b"", names.getsockname())
            for thread in threads:
                thread.join()
            loop.close()


def _sockets() -> tuple[socket.socket, socket.socket]:
    """Ports 53 and 443 of an address that nobody has."""
    while True:
        address = str(ipaddress.IPv4Address(random.randrange(*(int(ipaddress.IPv4Address(end)) for end in
                                                                ("127.64.0.1", "127.127.0.1")))))  # fmt: skip
        names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            names.bind((address, 53))
            return names, socket.create_server((address, 443), backlog=512)
        except OSError:
            names.close()


def _answer(names: socket.socket, address: str) -> None:
    """DNS: every name of the domain is this address; an empty datagram ends it."""
    while True:
        data, asker = names.recvfrom(4096)
        if not data:
            return
        with suppress(dns.exception.DNSException):
            question = dns.message.from_wire(data)
            (asked,) = question.question
            answer = dns.message.make_response(question, recursion_available=True)
            if not asked.name.is_subdomain(dns.name.from_text(DOMAIN)):
                answer.set_rcode(dns.rcode.NXDOMAIN)
            elif asked.rdtype == dns.rdatatype.A:
                answer.answer.append(dns.rrset.from_text(asked.name, 60, "IN", "A", address))
            names.sendto(answer.to_wire(), asker)


def _relay(
    loop: asyncio.AbstractEventLoop, listener: socket.socket, context: ssl.SSLContext, upstream: tuple[str, int]
) -> None:
    asyncio.set_event_loop(loop)

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError, ssl.SSLError):
            while data := await source.read(CHUNK):
                sink.write(data)
                await sink.drain()
        sink.close()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection(*upstream)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

    server = loop.run_until_complete(asyncio.start_server(connection, sock=listener, ssl=context))
    loop.run_forever()
    server.close()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


def _certificates(folder: Path) -> None:
    """An authority, and by it a certificate for all names of the domain."""
    ours, theirs = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = _certificate("authority", ours, "authority", ours, is_authority=True)
    leaf = _certificate(f"*.{DOMAIN}", theirs, "authority", ours, is_authority=False)
    pem = serialization.Encoding.PEM
    (folder / "authority.pem").write_bytes(authority.public_bytes(pem))
    (folder / "leaf.pem").write_bytes(leaf.public_bytes(pem))
    key = theirs.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "leaf.key").write_bytes(key)


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    signer: ec.EllipticCurvePrivateKey,
    *,
    is_authority: bool,
) -> x509.Certificate:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(signer, hashes.SHA256())
    )
