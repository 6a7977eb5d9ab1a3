"""The host's side: what it is connected to, its table of rules, which interfaces forward. Shared by all homes.

``/run/aenv/network.json`` holds what was on this host before the first slot, and is gone when the last home has
put it back. It is read and written under a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
from collections.abc import AsyncIterator
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from aenv_run.errors import Conflict
from aenv_run.network.addressing import NETNS_DIRECTORY, UPLINK_PREFIX, UplinkPool
from aenv_run.network.commands import ip_json, nft
from aenv_run.network.rules import HOST_TABLE, close_on_host, guard, host_table
from aenv_run.process import check, is_alive, read_start_ticks, run
from aenv_run.types import Model

RUN_DIRECTORY = Path("/run/aenv")
DEFAULT_MTU = 1500
T = TypeVar("T")


class Address(BaseModel):
    """One address of ``ip -json address``."""

    family: str = ""
    local: str = ""


class Link(BaseModel):
    """One link of ``ip -json link`` or ``ip -json address``; ``link_netnsid`` is where its peer is."""

    ifname: str = ""
    ifalias: str = ""
    link_netnsid: int | None = None
    mtu: int = DEFAULT_MTU
    addr_info: list[Address] = Field(default_factory=list)


class Route(BaseModel):
    """One route of ``ip -json route``."""

    dst: str = ""
    dev: str = ""
    type: str = ""


def parse_json(kind: type[T], text: bytes) -> T:
    """What ip(8) printed; keys that we do not know are left out."""
    return TypeAdapter(kind).validate_json(text)


def parse_openings(text: bytes) -> list[tuple[str, str]]:
    """(router's address, network) of each element that ``nft -j list set`` printed."""
    found = []
    for item in json.loads(text)["nftables"]:
        for element in item.get("set", {}).get("elem", []):
            address, network = element["concat"]
            prefix = network.get("prefix") if isinstance(network, dict) else None
            found.append((address, f"{prefix['addr']}/{prefix['len']}" if prefix else str(network)))
    return found


class HostRecord(Model):
    """What this host was like: interface -> its forwarding before; whether ``/run/netns`` was a mount.

    ``users`` are the homes with a network that runs: process id and start ticks.
    """

    forwarding: dict[str, str] = Field(default_factory=dict)
    netns_mounted: bool = True
    users: dict[str, tuple[int, int]] = Field(default_factory=dict)

    def used_by(self, tag: str, process: tuple[int, int] | None) -> HostRecord:
        """With this user, or without it, and without those that are gone."""
        users = {name: one for name, one in self.users.items() if name != tag and is_alive(*one)}
        return self.model_copy(update={"users": users | ({tag: process} if process else {})})


class HostFacts(Model):
    """What the kernel says now."""

    addresses: tuple[IPv4Address, ...]
    connected: tuple[tuple[IPv4Network, str], ...]  # every route but the default, with its interface
    interfaces: tuple[str, ...]  # those that carry a route
    mtu: int  # of the interface of the default route


async def read_facts() -> HostFacts:
    """The host's own addresses and routes, without those of slots."""
    links = parse_json(list[Link], await ip_json("-4", "address", "show"))
    routes = parse_json(list[Route], await ip_json("-4", "route", "show", "table", "all"))
    others = [link for link in links if not link.ifname.startswith(UPLINK_PREFIX)]
    routes = [route for route in routes if not route.dev.startswith(UPLINK_PREFIX)]
    outward = [route.dev for route in routes if route.dev not in ("", "lo") and route.type in ("", "unicast")]
    default = [route.dev for route in routes if route.dst == "default" and route.dev]
    return HostFacts(
        addresses=tuple(IPv4Address(a.local) for link in others for a in link.addr_info if a.family == "inet"),
        connected=tuple((IPv4Network(r.dst, strict=False), r.dev) for r in routes if r.dst[:1].isdigit()),
        interfaces=tuple(dict.fromkeys(outward)),
        mtu=min((link.mtu for link in links if link.ifname in default), default=DEFAULT_MTU),
    )


_SETTINGS = Path("/proc/sys/net/ipv4/conf")


def _forwarding(interface: str) -> Path:
    return _SETTINGS / interface / "forwarding"


class HostSide:
    """The host's table and settings, for the pool of the home with this ``tag``."""

    def __init__(self, pool: UplinkPool, tag: str = "", directory: Path = RUN_DIRECTORY) -> None:
        self.pool = pool
        self._tag = tag
        self._directory = directory
        self._record_file = directory / "network.json"

    @contextlib.asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        descriptor = self._try_lock()
        while descriptor is None:
            await asyncio.sleep(0.02)
            descriptor = self._try_lock()
        try:
            yield
        finally:
            os.close(descriptor)

    def _try_lock(self) -> int | None:
        """The lock file, locked; None when another home has it, or removed it meanwhile."""
        path = self._directory / "network.lock"
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(descriptor)
        return None

    def _read(self) -> HostRecord | None:
        try:
            return HostRecord.model_validate_json(self._record_file.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def _write(self, record: HostRecord) -> None:
        part = self._record_file.with_suffix(".part")
        part.write_text(record.model_dump_json())
        part.replace(self._record_file)

    def refuse_collision(self, facts: HostFacts) -> None:
        """``Conflict`` when the pool's addresses mean something else on this host already."""
        pool = self.pool.network
        for network, device in facts.connected:
            if network.overlaps(pool):
                raise Conflict(
                    f"uplink pool {pool} overlaps the host's route {network} ({device or 'no device'})",
                    fix="set another uplink pool: a private range that the host does not use",
                )

    async def prepare(self) -> HostFacts:
        """Load the table and let the interfaces with routes forward. Safe to repeat."""
        facts = await read_facts()
        self.refuse_collision(facts)
        async with self._locked():
            record = self._read() or HostRecord(netns_mounted=os.path.ismount(NETNS_DIRECTORY))
            ticks = read_start_ticks(os.getpid()) or 0
            record = self._let_forward(record.used_by(self._tag, (os.getpid(), ticks)), facts)
            await nft(host_table(self.pool.network, _guarded(record)), what="the host's rules")
        return facts

    async def refresh(self) -> tuple[HostFacts, bool]:
        """Follow the host: new interfaces, new addresses, forwarding that somebody switched on for good.

        True when the table was gone (a firewall service that starts flushes all rules) and is a new one now.
        """
        facts = await read_facts()
        async with self._locked():
            before = self._read() or HostRecord()
            record = self._let_forward(before, facts)
            there = await run(("nft", "list", "chain", *HOST_TABLE.split(), "prerouting"), timeout_s=30)
            if there.exit_code != 0:
                await nft(host_table(self.pool.network, _guarded(record)), what="the host's rules")
            elif _guarded(record) != _guarded(before) or _forwards_everything():
                await nft(guard(_guarded(record)), what="the host's rules")
        return facts, there.exit_code != 0

    def _let_forward(self, record: HostRecord, facts: HostFacts) -> HostRecord:
        forwarding = dict(record.forwarding)
        off = [name for name in facts.interfaces if _is(_forwarding(name), "0")]
        for name in off:
            forwarding.setdefault(name, "0")
        changed = record.model_copy(update={"forwarding": forwarding})
        if changed != self._read():
            self._write(changed)  # before the settings: what is not recorded cannot be put back
        slots = [path.name for path in _SETTINGS.iterdir() if path.name.startswith(UPLINK_PREFIX)]
        # Switching the whole host's forwarding off switches that of the uplinks off, too.
        for name in (*off, *(slot for slot in slots if _is(_forwarding(slot), "0"))):
            with contextlib.suppress(FileNotFoundError):  # it may be gone meanwhile
                _forwarding(name).write_text("1")
        return changed

    async def forget_openings(self, owners: set[IPv4Address]) -> None:
        """Take back what is open for addresses of this pool, but those of ``owners``: the slots that there are."""
        done = await check(
            ("nft", "-j", "list", "set", *HOST_TABLE.split(), "opened"), what="the host's rules", timeout_s=30
        )
        stale = [
            (address, network)
            for address, network in parse_openings(done.stdout)
            if IPv4Address(address) in self.pool.network and IPv4Address(address) not in owners
        ]
        if stale:
            await nft(close_on_host(stale), what="the host's rules")

    async def dispose(self) -> None:
        """Put everything back, unless slots of any home still stand on it."""
        async with self._locked():
            record = (self._read() or HostRecord()).used_by(self._tag, None)
            links = parse_json(list[Link], await ip_json("link", "show"))
            if record.users or any(link.ifname.startswith(UPLINK_PREFIX) for link in links):
                self._write(record)
                return
            await run(("nft", "delete", "table", *HOST_TABLE.split()), timeout_s=30)  # it may be gone already
            if not _forwards_everything():
                for name, value in record.forwarding.items():
                    if _forwarding(name).exists():
                        _forwarding(name).write_text(value)
            if not record.netns_mounted:
                _unmount_netns()
            self._record_file.unlink(missing_ok=True)
            (self._directory / "network.lock").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._directory.rmdir()


def _is(path: Path, value: str) -> bool:
    try:
        return path.read_text().strip() == value
    except FileNotFoundError:
        return False


def _forwards_everything() -> bool:
    """Somebody (a container engine, an administrator) made the host a router: that is theirs to undo."""
    return _is(Path("/proc/sys/net/ipv4/ip_forward"), "1")


def _guarded(record: HostRecord) -> list[str]:
    return [] if _forwards_everything() else sorted(record.forwarding)


def _unmount_netns() -> None:
    """Undo what the first `ip netns add` of a host did to /run/netns; the kernel refuses while one is in it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.path.ismount(NETNS_DIRECTORY) and not any(NETNS_DIRECTORY.iterdir()):
        libc.umount2(os.fsencode(NETNS_DIRECTORY), 0)
