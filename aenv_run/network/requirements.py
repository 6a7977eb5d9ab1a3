"""What a network of its own for each sandbox needs of the host, found by trying."""

from __future__ import annotations

import os
import re
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from aenv_run.drivers.protocol import Requirement
from aenv_run.errors import AenvError
from aenv_run.network.addressing import UplinkPool
from aenv_run.network.host import HostSide, read_facts
from aenv_run.network.policy import NetworkPolicy
from aenv_run.network.resolver import Upstream
from aenv_run.network.rules import NameAddresses, RouterFacts, host_table, router_nat, router_policy
from aenv_run.process import run

CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21
TRY_TIMEOUT_S = 10.0


def missing_privilege() -> str:
    """Why this process may not make namespaces and links; empty when it may."""
    effective = next(
        (
            int(line.split()[1], 16)
            for line in Path("/proc/self/status").read_text().splitlines()
            if line[:7] == "CapEff:"
        ),
        0,
    )
    wanted = {"CAP_NET_ADMIN": CAP_NET_ADMIN, "CAP_SYS_ADMIN": CAP_SYS_ADMIN}
    missing = [name for name, bit in wanted.items() if not effective >> bit & 1]
    if missing or os.geteuid() != 0:
        return f"it needs root with {' and '.join(wanted)}" + (
            f" ({' and '.join(missing)} missing)" if missing else ""
        )
    return ""


async def _attempt(name: str, argv: tuple[str, ...], detail: str, fix: str, stdin: str = "") -> Requirement:
    """Whether ``argv`` succeeds in a fresh network namespace that ends with it."""
    try:
        done = await run(("unshare", "--net", "--", *argv), timeout_s=TRY_TIMEOUT_S, stdin=stdin.encode())
    except AenvError as error:
        return Requirement(name, False, error.message, fix)
    if done.exit_code == 0:
        return Requirement(name, True, detail)
    lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.exit_code}"]
    return Requirement(name, False, lines[0][:200], fix)


async def requirements(uplink_pool: str = "100.96.0.0/16") -> list[Requirement]:
    """Each requirement, for ``doctor``. Nothing of the host is changed."""
    if reason := missing_privilege():
        return [
            Requirement("network privileges", False, reason, "run as root; without it a driver gives what it can")
        ]
    pool = UplinkPool.parse(uplink_pool)
    facts = RouterFacts("veth", IPv4Address("192.0.2.0"), IPv4Address("192.0.2.1"), (IPv4Network("192.0.2.0/24"),))
    rules = (
        host_table(pool.network, ["lo"])
        + router_nat(facts)
        + router_policy(facts, NetworkPolicy(allow=("203.0.113.0/24",), deny=("example.org",)), NameAddresses(), 1)
    )
    packages = "install iproute2, nftables and util-linux"
    return [
        Requirement("network privileges", True, "root with CAP_NET_ADMIN and CAP_SYS_ADMIN"),
        await _attempt(
            "veth",
            ("ip", "link", "add", "aenv-try", "type", "veth", "peer", "name", "aenv-peer"),
            "a veth pair was made",
            packages,
        ),
        await _attempt(
            "tap",
            ("ip", "tuntap", "add", "dev", "aenv-try", "mode", "tap"),
            "a tap was made",
            "load the kernel module tun",
        ),
        await _attempt(
            "nftables",
            ("nft", "-f", "-"),
            "the rules were loaded in a fresh namespace",
            f"{packages}; the kernel needs nf_tables with nat, fib, reject and conntrack",
            rules,
        ),
        await _pool_requirement(pool),
        _resolver_requirement(),
        await _firewall_requirement(),
    ]


async def _pool_requirement(pool: UplinkPool) -> Requirement:
    try:
        HostSide(pool).refuse_collision(await read_facts())
    except AenvError as error:
        return Requirement("uplink pool", False, error.message, error.fix)
    return Requirement("uplink pool", True, f"{pool.network}, {len(pool.numbers)} slots")


def _resolver_requirement() -> Requirement:
    servers = Upstream().servers()
    if not servers:
        return Requirement("name servers", False, "/etc/resolv.conf names none", "name one, or set nameservers")
    return Requirement("name servers", True, ", ".join(servers))


async def _firewall_requirement() -> Requirement:
    """A policy "drop" of somebody else's forward chain drops the sandboxes' packets whatever our table accepts."""
    try:
        done = await run(("nft", "list", "chains"), timeout_s=TRY_TIMEOUT_S)
    except AenvError as error:
        return Requirement("forwarding firewall", False, error.message, "install nftables")
    table = ""
    for line in done.stdout.decode(errors="replace").splitlines():
        if match := re.match(r"table (\S+ \S+) ", line):
            table = match[1]
        if "hook forward" in line and "policy drop" in line:
            return Requirement(
                "forwarding firewall",
                False,
                f"table {table} drops forwarded packets by default",
                'accept there what comes from and goes to interfaces "aenv-u-*"',
            )
    return Requirement("forwarding firewall", True, "no other table drops forwarded packets by default")
