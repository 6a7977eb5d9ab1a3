"""What a network of its own for each sandbox needs of the host, found by trying."""

from __future__ import annotations

import os
import re
import shutil
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
UPLINKS = "aenv-u-"
LEGACY = "filter of iptables-legacy"
#: Which tables the kernel has for the old program; absent without its module.
LEGACY_TABLES = Path("/proc/net/ip_tables_names")


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
    name, fix = "forwarding firewall", f'accept there what comes from and goes to interfaces "{UPLINKS}*"'
    try:
        done = await run(("nft", "list", "chains"), timeout_s=TRY_TIMEOUT_S)
        table = dropping_table(done.stdout.decode(errors="replace"))
        unseen = "" if table else await _legacy_firewall()
    except AenvError as error:
        return Requirement(name, False, error.message, "install nftables")
    if table or unseen == LEGACY:
        return Requirement(name, False, f"table {table or LEGACY} drops forwarded packets by default", fix)
    return Requirement(name, True, unseen or "no other table drops forwarded packets by default")


async def _legacy_firewall() -> str:
    """``LEGACY`` if its forward policy is "drop", a remark if that cannot be known, else nothing.

    Its tables are not those of nft. The program would make the table that it lists, so it is asked only where
    there is one already.
    """
    try:
        names = LEGACY_TABLES.read_text().split()
    except OSError:  # its module is not loaded
        return ""
    if "filter" not in names:
        return ""
    if shutil.which("iptables-legacy") is None:
        return "no table of nft drops; there are rules of iptables-legacy too, and no such program to list them"
    listing = await run(("iptables-legacy", "-S", "FORWARD"), timeout_s=TRY_TIMEOUT_S)
    return LEGACY if legacy_drops(listing.stdout.decode(errors="replace")) else ""


def dropping_table(chains: str) -> str:
    """Of ``nft list chains``: the table whose forward chain drops by default, such as "ip filter"; or nothing."""
    table = ""
    for line in chains.splitlines():
        if match := re.match(r"table (\S+ \S+) ", line):
            table = match[1]
        if "hook forward" in line and "policy drop" in line:
            return table
    return ""


def legacy_drops(rules: str) -> bool:
    """Of ``iptables -S FORWARD``: whether it drops by default, and nobody accepts all that is the sandboxes'."""
    lines = rules.splitlines()
    accepted = all(f"-A FORWARD {way} {UPLINKS}+ -j ACCEPT" in lines for way in ("-i", "-o"))
    return "-P FORWARD DROP" in lines and not accepted
