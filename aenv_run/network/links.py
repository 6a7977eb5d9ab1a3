"""Making and removing the namespaces, links and addresses of one slot."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

from pydantic import BaseModel

from aenv_run.errors import AenvError
from aenv_run.network.addressing import (
    DNS,
    GATEWAY,
    GATEWAY_MAC,
    GUEST_ADDRESS,
    GUEST_DEVICE,
    GUEST_MAC,
    NETNS_DIRECTORY,
    ROUTER_GUEST,
    ROUTER_TAP,
    ROUTER_UPLINK,
    UPLINK_PREFIX,
    SlotId,
    SlotKind,
    UplinkPool,
    router_device,
)
from aenv_run.network.commands import ip_batch, ip_force, ip_json, nft
from aenv_run.network.host import Link, parse_json
from aenv_run.network.namespace import inside, write_settings

NO_IPV6 = {"ipv6/conf/all/disable_ipv6": "1", "ipv6/conf/default/disable_ipv6": "1"}
# Strict reverse path, beside the rule on the guest's source address.
ROUTER_SETTINGS = NO_IPV6 | {
    "ipv4/conf/all/rp_filter": "1",
    "ipv4/conf/default/rp_filter": "1",
    "ipv4/ip_forward": "1",
}


class NumberTaken(AenvError):
    """Another home of this host took the slot's number first; the next number is tried."""

    code, exit_code, http_status, retryable = "network_number_taken", 75, 503, True


@dataclass(frozen=True)
class Shape:
    """What to make."""

    slot_id: SlotId
    kind: SlotKind
    pool: UplinkPool
    mtu: int


async def create(shape: Shape, rules: str) -> None:
    """Make the slot with ``rules`` in its router before any link of it is up. Nothing is left if it fails."""
    try:
        await _make_devices(shape)
        slot_id = shape.slot_id
        await nft(rules, what=f"network slot {slot_id}: rules", namespace=slot_id.router)
        await inside(slot_id.router, lambda: write_settings(ROUTER_SETTINGS))
        await _configure_router(shape)
        if shape.kind == "veth":
            await inside(slot_id.guest, lambda: write_settings(NO_IPV6))
            await configure_guest(slot_id)
        # Last: the other end must be up, and per interface, so that the host's own forwarding stays as it is.
        uplink = slot_id.uplink
        write_settings({f"ipv6/conf/{uplink}/disable_ipv6": "1", f"ipv4/conf/{uplink}/forwarding": "1"})
    except BaseException:
        await asyncio.shield(destroy(shape.slot_id))
        raise


async def _make_devices(shape: Shape) -> None:
    slot_id, mtu = shape.slot_id, shape.mtu
    try:
        # That the kernel refuses a link's name twice is what gives a number to one home only.
        await ip_batch(
            [
                f"netns add {slot_id.router_name}",
                f"link add {slot_id.uplink} mtu {mtu} type veth peer name {ROUTER_UPLINK} mtu {mtu}"
                f" netns {slot_id.router_name}",
                f"link set {slot_id.uplink} alias {slot_id}",
                f"addr add {shape.pool.host_end(slot_id.number)}/31 dev {slot_id.uplink}",
                f"link set {slot_id.uplink} up",
                *_guest_link(shape),
            ],
            what=f"network slot {slot_id}",
        )
    except AenvError as error:
        if slot_id.uplink in await uplinks() and not await _owns_uplink(slot_id):
            raise NumberTaken(f"network slot number {slot_id.number} belongs to another home") from error
        raise


def _guest_link(shape: Shape) -> list[str]:
    if shape.kind == "tap":
        return []
    slot_id, mtu = shape.slot_id, shape.mtu
    return [
        f"netns add {slot_id.guest_name}",
        f"link add {GUEST_DEVICE} netns {slot_id.guest_name} address {GUEST_MAC} mtu {mtu} type veth"
        f" peer name {ROUTER_GUEST} netns {slot_id.router_name} address {GATEWAY_MAC} mtu {mtu}",
    ]


async def _configure_router(shape: Shape) -> None:
    device = router_device(shape.kind)
    # Persistent, and without vnet_hdr: the state of a guest's network card then fits user networking too.
    # Known ahead: a question that nobody answers yet is asked again a second later only. Not behind a tap: a guest
    # that comes from user networking learns from that question that its gateway is another one.
    neighbour = [f"neigh replace {GUEST_ADDRESS} lladdr {GUEST_MAC} nud permanent dev {device}"]
    tap = [f"tuntap add dev {ROUTER_TAP} mode tap", f"link set {ROUTER_TAP} address {GATEWAY_MAC}"]
    await ip_batch(
        [
            "link set lo up",
            *(tap if shape.kind == "tap" else []),
            f"addr add {GATEWAY}/24 dev {device}",
            f"addr add {DNS}/32 dev {device}",
            f"link set {device} up",
            *(neighbour if shape.kind == "veth" else []),
            f"addr add {shape.pool.router_end(shape.slot_id.number)}/31 dev {ROUTER_UPLINK}",
            f"link set {ROUTER_UPLINK} up",
            f"route add default via {shape.pool.host_end(shape.slot_id.number)}",
        ],
        what=f"network slot {shape.slot_id}: router",
        namespace=shape.slot_id.router,
    )


async def configure_guest(slot_id: SlotId) -> None:
    """Give the guest's end its address and route (again): an engine that took them over may have removed them."""
    await ip_batch(
        [
            "link set lo up",
            f"addr replace {GUEST_ADDRESS}/24 dev {GUEST_DEVICE}",
            f"link set {GUEST_DEVICE} up",
            f"route replace default via {GATEWAY} dev {GUEST_DEVICE}",
        ],
        what=f"network slot {slot_id}: guest",
        namespace=slot_id.guest,
    )


async def destroy(slot_id: SlotId) -> None:
    """Remove all of a slot. Idempotent. The uplink goes first: traffic ends even if a namespace is held."""
    names = [name for name in (slot_id.router_name, slot_id.guest_name) if (NETNS_DIRECTORY / name).exists()]
    lines = [f"link del {slot_id.uplink}"] if await _owns_uplink(slot_id) else []
    lines += [f"netns delete {name}" for name in names]
    if not lines:
        return
    done = await ip_force(lines)
    if left := [name for name in names if (NETNS_DIRECTORY / name).exists()]:
        reason = done.stderr.decode(errors="replace")[:500]
        raise AenvError(
            f"network slot {slot_id}: {', '.join(left)} could not be removed: {reason}",
            fix="see which process holds it with `ip netns pids`",
        )


class Namespace(BaseModel):
    """One line of ``ip -json netns``; ``id`` is how this host numbers it."""

    name: str = ""
    id: int | None = None


async def _owns_uplink(slot_id: SlotId) -> bool:
    link = (await uplinks()).get(slot_id.uplink)
    if link is None or link.ifalias or link.link_netnsid is None:
        return link is not None and link.ifalias == slot_id
    # Not marked yet: of a slot that is being made, by us or by another home. Its peer's namespace tells.
    named = parse_json(list[Namespace], await ip_json("netns", "list"))
    return Namespace(name=slot_id.router_name, id=link.link_netnsid) in named


async def uplinks() -> dict[str, Link]:
    """Host ends of all uplinks on this host, of every home; the alias is the slot's id."""
    links = parse_json(list[Link], await ip_json("link", "show"))
    return {link.ifname: link for link in links if link.ifname.startswith(UPLINK_PREFIX)}


def namespaces(tag: str) -> set[SlotId]:
    """The slots of one home that have a namespace."""
    if not NETNS_DIRECTORY.is_dir():
        return set()
    pattern = re.compile(rf"aenv-[rg]-({SlotId.pattern})")
    matches = (pattern.fullmatch(path.name) for path in NETNS_DIRECTORY.iterdir())
    return {slot for match in matches if match and (slot := SlotId(match[1])).tag == tag}
