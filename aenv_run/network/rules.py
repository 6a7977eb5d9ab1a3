"""The nftables rules as text. Pure functions: the same values give the same text.

A router's policy judges a connection by its *original destination* (``ct original ip daddr``), the same for
packets of both directions, and marks what it accepts with the number of this version of the policy. Replacing the
table with a new number therefore judges every established connection again, at its next packet from either side.
The mark also keeps a connection to a domain alive when its address has left the set of answered addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network

from aenv_run.network.addressing import (
    DNS,
    GATEWAY,
    GUEST_ADDRESS,
    ROUTER_UPLINK,
    UPLINK_PREFIX,
    SlotKind,
    router_device,
)
from aenv_run.network.policy import NEVER, PRIVATE, NetworkPolicy

POLICY_TABLE = "inet aenv_policy"
NAT_TABLE = "ip aenv_nat"
HOST_TABLE = "inet aenv"
#: What a domain's addresses may add up to in one slot.
MAX_NAME_ADDRESSES = 16384
#: Connections of one guest at a time: each is also an entry in the host's table, which all share.
MAX_CONNECTIONS = 4096

_UPLINKS = f'"{UPLINK_PREFIX}*"'
_INTERVALS = "type ipv4_addr; flags interval; auto-merge;"


@dataclass(frozen=True)
class RouterFacts:
    """What a router's rules need beside the policy."""

    kind: SlotKind
    host_end: IPv4Address
    router_end: IPv4Address
    own: tuple[IPv4Network, ...]  # the host's addresses and the uplink pool


@dataclass(frozen=True)
class NameAddresses:
    """Addresses by DNS answer, each with the seconds it is good for."""

    allowed: Mapping[IPv4Address, int] = field(default_factory=dict)
    denied: Mapping[IPv4Address, int] = field(default_factory=dict)


def _elements(items: Iterable[object]) -> str:
    joined = ", ".join(map(str, items))
    return f" elements = {{ {joined} }};" if joined else ""


def _timed(addresses: Mapping[IPv4Address, int]) -> list[str]:
    return [f"{address} timeout {seconds}s" for address, seconds in addresses.items()]


def router_nat(facts: RouterFacts) -> str:
    """Address translation of a router; never replaced, so that connections keep their translation."""
    guest = router_device(facts.kind)
    return f"""
table {NAT_TABLE} {{
  chain prerouting {{ type nat hook prerouting priority dstnat; policy accept;
    iifname "{ROUTER_UPLINK}" ip saddr {facts.host_end} ip daddr {facts.router_end} meta l4proto tcp \
      dnat to {GUEST_ADDRESS}
  }}
  chain postrouting {{ type nat hook postrouting priority srcnat; policy accept;
    oifname "{ROUTER_UPLINK}" snat to {facts.router_end}
    oifname "{guest}" ip saddr {facts.host_end} snat to {GATEWAY}
  }}
}}
"""


def router_policy(facts: RouterFacts, policy: NetworkPolicy, names: NameAddresses, version: int) -> str:
    """Replaces a router's policy, in one transaction. ``version`` must differ from those before (1 .. 2^32-1)."""
    guest, mark = router_device(facts.kind), f"0x{version:08x}"
    timed = f"type ipv4_addr; flags timeout; size {MAX_NAME_ADDRESSES};"
    private = policy.opened
    public = [network for network in policy.allow_networks if network not in policy.opened]
    # Plain DNS to any server is answered here, else a denied name would be one query away.
    redirect = (
        f'iifname "{guest}" meta l4proto {{ tcp, udp }} th dport 53 dnat ip to {DNS}'
        if policy.deny_domains
        else ""
    )
    return f"""
table {POLICY_TABLE}
delete table {POLICY_TABLE}
table {POLICY_TABLE} {{
  set never {{ {_INTERVALS}{_elements((*NEVER, *facts.own))} }}
  set private {{ {_INTERVALS}{_elements(PRIVATE)} }}
  set opened {{ {_INTERVALS}{_elements(private)} }}
  set allowed {{ {_INTERVALS}{_elements(public)} }}
  set denied {{ {_INTERVALS}{_elements(policy.deny_networks)} }}
  set allowed_names {{ {timed}{_elements(_timed(names.allowed))} }}
  set denied_names {{ {timed}{_elements(_timed(names.denied))} }}

  chain target {{
    ct original ip daddr @never return
    ct original ip daddr @denied return
    ct original ip daddr @denied_names return
    ct original ip daddr @opened ct mark set {mark} accept
    ct original ip daddr @private return
    ct original ip daddr @allowed ct mark set {mark} accept
    ct original ip daddr @allowed_names ct mark set {mark} accept
    {"return" if policy.restricted else f"ct mark set {mark} accept"}
  }}
  chain outgoing {{
    ip saddr != {GUEST_ADDRESS} drop
    ct direction reply accept comment "answers to the host"
    tcp flags syn tcp option maxseg size set rt mtu
    ct mark {mark} accept
    ct state new ct count over {MAX_CONNECTIONS} drop
    jump target
    meta l4proto tcp reject with tcp reset
    reject with icmpx admin-prohibited
  }}
  chain incoming {{
    ct direction reply ct mark {mark} accept
    ct direction reply jump target
    ct direction original ct status dnat ip saddr {facts.host_end} accept
  }}
  chain forward {{ type filter hook forward priority filter; policy drop;
    meta nfproto != ipv4 drop
    iifname "{guest}" oifname "{ROUTER_UPLINK}" jump outgoing
    iifname "{ROUTER_UPLINK}" oifname "{guest}" jump incoming
  }}
  chain input {{ type filter hook input priority filter; policy drop;
    meta nfproto != ipv4 drop
    iifname != "{guest}" drop
    ip saddr != {GUEST_ADDRESS} drop
    ip daddr {DNS} meta l4proto {{ tcp, udp }} th dport 53 accept
    ip daddr {GATEWAY} icmp type echo-request accept
    meta l4proto tcp reject with tcp reset
    reject with icmpx admin-prohibited
  }}
  chain output {{ type filter hook output priority filter; policy accept;
    meta nfproto ipv6 drop
  }}
  chain dns {{ type nat hook prerouting priority dstnat - 1; policy accept;
    {redirect}
  }}
}}
"""


def admit_names(addresses: Mapping[IPv4Address, int]) -> str:
    """Adds answered addresses to a router, or gives those that are there a new time."""
    plain = ", ".join(map(str, addresses))
    target = f"element {POLICY_TABLE} allowed_names"
    # Adding an element that exists leaves its time; deleting one that does not exist fails.
    return (
        f"add {target} {{ {plain} }}\ndelete {target} {{ {plain} }}\n"
        f"add {target} {{ {', '.join(_timed(addresses))} }}\n"
    )


def host_table(pool: IPv4Network, guarded: Iterable[str]) -> str:
    """The host's side, one table for all homes: each adds its pool. Safe to load again.

    ``guarded`` are interfaces that did not forward before aenv; they forward nothing but answers to sandboxes.
    """
    chains = {
        "prerouting": "filter hook prerouting priority mangle",
        "input": "filter hook input priority filter",
        "forward": "filter hook forward priority filter",
        "postrouting": "nat hook postrouting priority srcnat",
    }
    rules = f"""
prerouting iifname != {_UPLINKS} return
prerouting meta nfproto ipv6 drop
prerouting fib saddr . iif oif missing drop comment "forged source"
prerouting ct direction reply accept
prerouting fib daddr type != unicast drop comment "the host itself, broadcast, multicast"
input iifname {_UPLINKS} meta nfproto ipv4 ct direction reply accept
input iifname {_UPLINKS} drop
forward iifname {_UPLINKS} oifname {_UPLINKS} drop comment "sandbox to sandbox"
forward iifname {_UPLINKS} ip saddr . ip daddr @opened accept
forward iifname {_UPLINKS} ip daddr @private drop
forward iifname {_UPLINKS} ip daddr @pools drop
forward iifname {_UPLINKS} accept
forward oifname {_UPLINKS} ct direction reply accept
forward oifname {_UPLINKS} drop
forward iifname @guarded drop
postrouting ip saddr @pools ip daddr != @pools masquerade
"""
    lines = [
        f"add table {HOST_TABLE}",
        f"add set {HOST_TABLE} pools {{ {_INTERVALS} }}",
        f"add set {HOST_TABLE} private {{ {_INTERVALS} }}",
        f"add set {HOST_TABLE} opened {{ type ipv4_addr . ipv4_addr; flags interval; }}",
        f"add set {HOST_TABLE} guarded {{ type ifname; }}",
        *(f"add chain {HOST_TABLE} {name} {{ type {hook}; policy accept; }}" for name, hook in chains.items()),
        f"flush table {HOST_TABLE}",
        f"flush set {HOST_TABLE} private",
        f"add element {HOST_TABLE} private {{ {', '.join(map(str, (*PRIVATE, *NEVER)))} }}",
        f"add element {HOST_TABLE} pools {{ {pool} }}",
        *(f"add rule {HOST_TABLE} {rule}" for rule in rules.strip().splitlines()),
    ]
    return "\n".join(lines) + "\n" + guard(guarded)


def guard(interfaces: Iterable[str]) -> str:
    """Replaces the interfaces that forward nothing but answers to sandboxes."""
    names = ", ".join(f'"{name}"' for name in sorted(interfaces))
    added = f"add element {HOST_TABLE} guarded {{ {names} }}\n" if names else ""
    return f"flush set {HOST_TABLE} guarded\n{added}"


def open_on_host(router_end: IPv4Address, before: Iterable[IPv4Network], after: Iterable[IPv4Network]) -> str:
    """Replaces the private ranges that one slot may reach; empty text when nothing changes."""
    target = f"element {HOST_TABLE} opened"
    old, new = set(before), set(after)
    lines = []
    for network in sorted(old - new):  # added first: deleting one that is not there fails
        lines += [
            f"add {target} {{ {router_end} . {network} }}",
            f"delete {target} {{ {router_end} . {network} }}",
        ]
    lines += [f"add {target} {{ {router_end} . {network} }}" for network in sorted(new - old)]
    return "".join(f"{line}\n" for line in lines)


def close_on_host(stale: Iterable[tuple[str, str]]) -> str:
    """Takes back openings (router's address, network) that no slot owns any more."""
    return "".join(
        f"delete element {HOST_TABLE} opened {{ {address} . {network} }}\n" for address, network in stale
    )
