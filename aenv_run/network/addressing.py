"""Names and addresses of a slot. Everything that is visible on the host starts with ``aenv-``."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Literal, Self

from aenv_run.drivers.protocol import NetworkSlot
from aenv_run.errors import InvalidInput
from aenv_run.types import Id

SlotKind = Literal["tap", "veth"]

# What every guest sees, so that a memory image fits any slot.
GUEST_ADDRESS = "10.0.2.15"
GUEST_NETWORK = "10.0.2.0/24"
GATEWAY = "10.0.2.2"
DNS = "10.0.2.3"
GUEST_MAC = "52:54:00:ae:00:01"
GATEWAY_MAC = "52:54:00:ae:00:02"

#: Where ip(8) keeps named namespaces.
NETNS_DIRECTORY = Path("/run/netns")
#: Host ends of the uplinks; the number after it is unique on the host, whichever home the slot belongs to.
UPLINK_PREFIX = "aenv-u-"
#: The router's ends.
ROUTER_UPLINK = "uplink"
ROUTER_GUEST = "guest0"
ROUTER_TAP = "tap0"
GUEST_DEVICE = "eth0"

PREFIX_LENGTHS = range(8, 30)


class SlotId(Id):
    """8 hex digits of the home that made it, and 4 of the slot's number on this host: ``3fa2b1c0-0007``."""

    pattern, what = r"[0-9a-f]{8}-[0-9a-f]{4}", "network slot id"

    @classmethod
    def of(cls, tag: str, number: int) -> Self:
        """The id of slot ``number`` of the home with this ``tag``."""
        return cls(f"{tag}-{number:04x}")

    @property
    def tag(self) -> str:
        """Which home it belongs to."""
        return self[:8]

    @property
    def number(self) -> int:
        """Its number on this host."""
        return int(self[9:], 16)

    @property
    def uplink(self) -> str:
        """The host's end of its veth pair."""
        return f"{UPLINK_PREFIX}{self[9:]}"

    @property
    def router_name(self) -> str:
        """The name of its router namespace."""
        return f"aenv-r-{self}"

    @property
    def guest_name(self) -> str:
        """The name of its guest namespace (kind "veth" only)."""
        return f"aenv-g-{self}"

    @property
    def router(self) -> Path:
        """Its router namespace."""
        return NETNS_DIRECTORY / self.router_name

    @property
    def guest(self) -> Path:
        """Its guest namespace (kind "veth" only)."""
        return NETNS_DIRECTORY / self.guest_name


def home_tag(root: Path) -> str:
    """Which home a namespace belongs to: two nodes on one host never touch each other's slots."""
    return hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class UplinkPool:
    """The addresses between the host and the routers: slot n has the n-th /31, the host's end first."""

    network: IPv4Network

    @classmethod
    def parse(cls, text: str) -> UplinkPool:
        """From CIDR notation, /8 to /29."""
        try:
            network = IPv4Network(text)
        except ValueError as error:
            raise InvalidInput(
                f"uplink pool {text!r}: {error}", fix="give an IPv4 CIDR such as 100.96.0.0/16"
            ) from error
        if network.prefixlen not in PREFIX_LENGTHS:
            raise InvalidInput(f"uplink pool {text}: the prefix must be /8 to /29", fix="give for example a /16")
        return cls(network)

    @property
    def numbers(self) -> range:
        """The slots it has room for; number 0 is left out, its first address is the network's own."""
        return range(1, min(self.network.num_addresses // 2, 1 << 16))

    def host_end(self, number: int) -> IPv4Address:
        """The host's address on the uplink of slot ``number``."""
        return self.network.network_address + 2 * number

    def router_end(self, number: int) -> IPv4Address:
        """The router's address: the host reaches the guest's ports there."""
        return self.network.network_address + 2 * number + 1


def network_slot(slot_id: SlotId, kind: SlotKind, pool: UplinkPool) -> NetworkSlot:
    """What a driver needs to know of a slot."""
    return NetworkSlot(
        kind=kind,
        router_netns=slot_id.router,
        guest_netns=slot_id.guest if kind == "veth" else None,
        device=GUEST_DEVICE if kind == "veth" else ROUTER_TAP,
        mac=GUEST_MAC,
        guest_address=GUEST_ADDRESS,
        gateway=GATEWAY,
        dns=DNS,
        host_address=str(pool.router_end(slot_id.number)),
    )


def router_device(kind: SlotKind) -> str:
    """The router's device towards the guest."""
    return ROUTER_TAP if kind == "tap" else ROUTER_GUEST
