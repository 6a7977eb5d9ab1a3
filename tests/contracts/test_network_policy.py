"""What a guest reaches under which policy, against a simulated internet. Needs root; touches nothing real."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aenv_run.network import Lease, Network, NetworkConfig, NetworkPolicy
from aenv_run.network.addressing import SlotKind
from aenv_run.network.namespace import inside
from aenv_run.network.rules import MAX_CONNECTIONS
from aenv_run.paths import Home
from tests.contracts.network_world import (
    HEARD,
    HOST_PRIVATE,
    HOST_PUBLIC,
    LAN_WEB,
    METADATA,
    NAME_SERVER,
    OTHER_WEB,
    PRIVATE_WEB,
    SERVICE_PORT,
    WEB,
    Guest,
    serve_tcp,
    sh,
    tap_guest,
    veth_guest,
    world,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")

CONFIG = NetworkConfig(low_water=0, high_water=0, nameservers=(NAME_SERVER,))


@contextlib.asynccontextmanager
async def network(home: Path, config: NetworkConfig = CONFIG) -> AsyncIterator[Network]:
    made = Network(Home(home), config, kinds=("tap", "veth"), run_directory=home / "run")
    await made.start()
    try:
        yield made
    finally:
        for slot_id in (await made.status()).leased:
            await made.release(slot_id)
        await made.close()


@contextlib.asynccontextmanager
async def guest_of(lease: Lease) -> AsyncIterator[Guest]:
    if lease.slot.kind == "veth":
        yield veth_guest(lease.slot)
    else:
        async with tap_guest(lease.slot) as guest:
            yield guest


async def reach(guest: Guest, *addresses: str) -> set[str]:
    """Which of the addresses answer on port 80."""
    answers = await asyncio.gather(*(guest.reaches(address) for address in addresses))
    return {address for address, answer in zip(addresses, answers, strict=True) if answer}


EVERYTHING = (WEB, OTHER_WEB, METADATA, PRIVATE_WEB, LAN_WEB)
MATRIX = [
    (NetworkPolicy(), {WEB, OTHER_WEB}),
    (NetworkPolicy(internet=False), set()),
    (NetworkPolicy(allow=(f"{WEB}/32",)), {WEB}),
    (NetworkPolicy(internet=False, allow=("198.51.100.0/24",), deny=(OTHER_WEB,)), {WEB}),
    (NetworkPolicy(deny=("198.51.100.81",)), {WEB}),
    (NetworkPolicy(deny=("0.0.0.0/0",)), set()),
    (NetworkPolicy(allow=("0.0.0.0/0",)), {WEB, OTHER_WEB}),  # opens no private range
    (NetworkPolicy(allow=("10.77.0.0/24",)), {PRIVATE_WEB}),
    (NetworkPolicy(allow=("10.77.0.0/16", LAN_WEB), deny=("10.77.0.4/30",)), {LAN_WEB}),
    (NetworkPolicy(allow=(METADATA, WEB)), {METADATA, WEB}),
]


@pytest.mark.parametrize("kind", ["veth", "tap"])
async def test_reachability(tmp_path: Path, kind: SlotKind) -> None:
    async with world(tmp_path), network(tmp_path) as net:
        lease = await net.acquire(kind)
        async with guest_of(lease) as guest:
            for policy, expected in MATRIX:
                await net.apply(lease.slot_id, policy)
                assert await reach(guest, *EVERYTHING) == expected, policy
                assert await guest.udp(WEB) is (WEB in expected), policy
            await net.apply(lease.slot_id, NetworkPolicy())
            assert await guest.tcp(WEB) == HOST_PUBLIC  # translated
            assert await guest.tcp(METADATA) == "ConnectionRefusedError"  # refused at once, not left waiting
            if kind == "tap":
                assert "vnet_hdr off persist on" in sh(
                    f"ip -d link show {lease.slot.device}", lease.slot.router_netns.name
                )


async def test_what_the_operator_closes_no_policy_opens(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"always_denied": (f"{OTHER_WEB}/32", "10.77.0.0/24")})
    async with world(tmp_path), network(tmp_path, config) as net:
        lease = await net.acquire("veth")
        guest = veth_guest(lease.slot)
        assert await reach(guest, *EVERYTHING) == {WEB}
        await net.apply(lease.slot_id, NetworkPolicy(allow=(OTHER_WEB, WEB, PRIVATE_WEB, LAN_WEB)))
        assert await reach(guest, *EVERYTHING) == {WEB, LAN_WEB}


async def test_the_host_itself_is_out_of_reach(tmp_path: Path) -> None:
    everything = NetworkPolicy(allow=("0.0.0.0/0", "192.168.77.0/24", "100.96.0.0/16", "10.0.2.0/24"))
    async with world(tmp_path), network(tmp_path) as net:
        lease = await net.acquire("veth")
        guest = veth_guest(lease.slot)
        number = lease.slot_id.number
        hosts = (HOST_PUBLIC, HOST_PRIVATE, "127.0.0.1", f"100.96.0.{2 * number}", "10.0.2.2", "10.0.2.3")
        for policy in (NetworkPolicy(), everything):
            await net.apply(lease.slot_id, policy)
            for address in hosts:
                assert not await guest.reaches(address, SERVICE_PORT), (address, policy)
            assert await guest.reaches_soon(WEB)
        # An address that the host got only now is covered by the host's side.
        sh("ip addr add 203.0.113.77/24 dev wan")
        assert await guest.tcp("203.0.113.77", SERVICE_PORT) == "timeout"
        # From the host to the guest still works, and nobody but the host may use that way.
        server = await serve_tcp(guest.namespace, "0.0.0.0", 9000)
        with socket.create_connection((lease.slot.host_address, 9000), 2) as connection:
            connection.setblocking(False)
            assert (await asyncio.get_running_loop().sock_recv(connection, 100)) == b"10.0.2.2\n"
        server.close()


async def test_the_guest_is_closed_to_the_outside(tmp_path: Path) -> None:
    async with world(tmp_path) as out, network(tmp_path) as net:
        lease = await net.acquire("veth")
        server = await serve_tcp(veth_guest(lease.slot).namespace, "0.0.0.0", 9000)
        # The outside has a route to the pool by way of the host.
        assert await Guest(out.path).tcp(lease.slot.host_address, 9000) == "timeout"
        server.close()
        # The host's side by itself: a router whose rules are gone.
        sh("nft flush ruleset", lease.slot_id.router_name)
        sh("nft flush set inet aenv guarded")
        server = await serve_tcp(lease.slot.router_netns, "0.0.0.0", 9000)
        assert await Guest(out.path).tcp(lease.slot.host_address, 9000) == "timeout"
        with socket.create_connection((lease.slot.host_address, 9000), 2):
            server.close()


async def test_sandboxes_never_reach_each_other(tmp_path: Path) -> None:
    async with world(tmp_path), network(tmp_path) as net:
        one, two = await asyncio.gather(net.acquire("veth"), net.acquire("veth"))
        server = await serve_tcp(veth_guest(two.slot).namespace, "0.0.0.0", 80)
        for policy in (NetworkPolicy(), NetworkPolicy(allow=("100.64.0.0/10", "100.96.0.0/16", "10.0.0.0/8"))):
            await net.apply(one.slot_id, policy)
            assert not await veth_guest(one.slot).reaches(two.slot.host_address)
        # Even with no rules in its own router.
        await net.apply(one.slot_id, NetworkPolicy())
        sh("nft flush ruleset; ip addr add 10.0.2.99/32 dev lo", one.slot_id.router_name)
        sh("sysctl -qw net.ipv4.conf.all.rp_filter=0", one.slot_id.router_name)
        assert not await Guest(one.slot.router_netns).reaches(two.slot.host_address)
        assert not await Guest(one.slot.router_netns).reaches(PRIVATE_WEB)
        assert not await Guest(one.slot.router_netns).reaches(HOST_PRIVATE, SERVICE_PORT)
        assert await Guest(one.slot.router_netns).reaches_soon(WEB)
        server.close()


async def test_forged_sources_are_dropped(tmp_path: Path) -> None:
    async with world(tmp_path), network(tmp_path) as net:
        lease, other = await net.acquire("veth"), await net.acquire("veth")
        guest = veth_guest(lease.slot)
        for forged in ("10.0.2.77", other.slot.host_address):
            sh(f"ip addr add {forged}/32 dev lo", lease.slot_id.guest_name)
        assert await guest.reaches_soon(WEB)  # a new link may lose its first packets
        assert await guest.udp(WEB)
        assert not await guest.udp(WEB, source="10.0.2.77")
        assert not await guest.udp(WEB, source=other.slot.host_address)
        # The host's side by itself: a router whose rules are gone.
        sh("nft flush ruleset; ip addr add 198.51.100.99/32 dev lo", lease.slot_id.router_name)
        assert await Guest(lease.slot.router_netns).udp(WEB)
        HEARD.clear()
        for source in ("198.51.100.99", lease.slot.host_address):
            sh(
                f"""{sys.executable} -c '
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("{source}", 0))
s.sendto(b"note {source}", ("{WEB}", 7))'""",
                lease.slot_id.router_name,
            )
        await asyncio.sleep(0.3)
        assert [f"note {lease.slot.host_address}"] == HEARD


async def test_no_ipv6(tmp_path: Path) -> None:
    async with world(tmp_path), network(tmp_path) as net:
        lease = await net.acquire("veth")
        for name in (lease.slot_id.router_name, lease.slot_id.guest_name):
            assert sh("ip -6 -o addr show", name) == ""
        assert sh(f"ip -6 -o addr show dev {lease.slot_id.uplink}") == ""


async def test_change_while_running_cuts_what_is_now_denied(tmp_path: Path) -> None:
    async with world(tmp_path), network(tmp_path) as net:
        lease = await net.acquire("veth")

        def dial() -> list[socket.socket]:
            made = [socket.create_connection((address, 80), 2) for address in (WEB, OTHER_WEB)]
            for connection in made:
                assert connection.recv(100)
                connection.setblocking(False)
            return made

        loop = asyncio.get_running_loop()
        web, other = await inside(veth_guest(lease.slot).namespace, dial)

        async def alive(connection: socket.socket) -> bool:
            try:
                async with asyncio.timeout(1):
                    await loop.sock_sendall(connection, b"ping")
                    return await loop.sock_recv(connection, 10) == b"ping"
            except (OSError, TimeoutError):
                return False

        assert await alive(web) and await alive(other)
        await net.apply(lease.slot_id, NetworkPolicy(deny=(OTHER_WEB,)))
        assert await alive(web)
        assert not await alive(other)
        await net.apply(lease.slot_id, NetworkPolicy(internet=False, allow=(WEB,)))
        assert await alive(web)
        await net.apply(lease.slot_id, NetworkPolicy(internet=False))
        assert not await alive(web)
        web.close()
        other.close()


async def test_a_stream_to_the_guest_goes_on_over_a_change(tmp_path: Path) -> None:
    """Only the server speaks: its packets alone have to bring the connection under the new policy."""
    async with world(tmp_path), network(tmp_path) as net:
        lease = await net.acquire("veth")

        def dial() -> socket.socket:
            connection = socket.create_connection((WEB, 80), 2)
            connection.recv(100)
            connection.sendall(b"later")
            connection.setblocking(False)
            return connection

        connection = await inside(veth_guest(lease.slot).namespace, dial)
        await net.apply(lease.slot_id, NetworkPolicy(allow=("198.51.100.0/24",)))
        async with asyncio.timeout(5):
            assert await asyncio.get_running_loop().sock_recv(connection, 100) == b"later"
        connection.close()


async def test_names(tmp_path: Path) -> None:
    async with world(tmp_path) as out, network(tmp_path) as net:
        lease = await net.acquire("veth")
        guest = veth_guest(lease.slot)
        for tcp in (False, True):
            assert await guest.lookup("web.example.org", tcp=tcp) == WEB
            assert await guest.lookup("nosuch.example.org", tcp=tcp) == "NXDOMAIN"
        assert await guest.lookup("web.example.org", kind="AAAA") == "NOERROR"
        assert await guest.lookup("rebind.example.org") == "NOERROR"  # a private address is not told
        assert await guest.lookup("big.example.org", kind="TXT") == "NOERROR truncated"
        assert (await guest.lookup("big.example.org", kind="TXT", tcp=True)).count("x") == 4000
        assert not any("in-addr" in name for name in out.asked)
        assert await guest.lookup("5.0.77.10.in-addr.arpa", kind="PTR") == "NXDOMAIN"
        assert not any("in-addr" in name for name in out.asked)


async def test_allow_by_domain(tmp_path: Path) -> None:
    async with world(tmp_path) as out, network(tmp_path) as net:
        lease = await net.acquire("veth")
        guest = veth_guest(lease.slot)
        await net.apply(lease.slot_id, NetworkPolicy(allow=("web.example.org", "*.web.example.org")))
        assert not await guest.reaches(WEB)  # nobody asked yet
        assert await guest.lookup("web.example.org") == WEB
        assert await guest.reaches_soon(WEB)
        assert not await guest.reaches(OTHER_WEB)
        assert await guest.lookup("other.example.net") == "NXDOMAIN"
        assert "other.example.net." not in out.asked  # nothing leaves by way of DNS either
        assert await guest.lookup("API.web.example.org") == WEB
        # The answers go along with a fork, whose guest has them in its memory.
        fork = await net.acquire("veth")
        await net.apply(fork.slot_id, net.policy(lease.slot_id), answers=net.answers(lease.slot_id))
        assert await veth_guest(fork.slot).reaches_soon(WEB)
        # The domain leaves the list, then everything is open again.
        await net.apply(lease.slot_id, NetworkPolicy(allow=("other.example.net",)))
        assert not await guest.reaches(WEB)
        await net.apply(lease.slot_id, NetworkPolicy())
        assert await guest.reaches_soon(WEB)


async def test_deny_by_domain(tmp_path: Path) -> None:
    async with world(tmp_path), network(tmp_path) as net:
        lease = await net.acquire("veth")
        guest = veth_guest(lease.slot)
        assert await guest.lookup("other.example.net") == OTHER_WEB
        assert await guest.reaches_soon(OTHER_WEB)
        await net.apply(lease.slot_id, NetworkPolicy(deny=("*.example.net",)))
        assert await guest.lookup("other.example.net") == "NXDOMAIN"
        assert not await guest.reaches(OTHER_WEB)  # it had been told this address
        assert await guest.lookup("other.example.net", server=NAME_SERVER) == "NXDOMAIN"  # another server
        assert await guest.lookup("web.example.org", server=NAME_SERVER) == WEB
        assert await guest.reaches_soon(WEB)


async def test_connections_are_bounded(tmp_path: Path) -> None:
    """A guest must not fill the host's table of connections."""
    async with world(tmp_path), network(tmp_path) as net:
        lease = await net.acquire("veth")
        assert await veth_guest(lease.slot).reaches_soon(WEB)  # a new link may lose its first packets

        def flood() -> None:
            for _ in range(MAX_CONNECTIONS * 2):
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one, contextlib.suppress(OSError):
                    one.sendto(b"x", (WEB, 9))

        await inside(veth_guest(lease.slot).namespace, flood)
        count = int(sh("cat /proc/sys/net/netfilter/nf_conntrack_count"))
        assert MAX_CONNECTIONS * 0.9 < count <= MAX_CONNECTIONS + 50
        assert not await veth_guest(lease.slot).reaches(WEB)
        server = await serve_tcp(veth_guest(lease.slot).namespace, "0.0.0.0", 9000)
        with socket.create_connection((lease.slot.host_address, 9000), 2):  # the host still gets in
            server.close()
