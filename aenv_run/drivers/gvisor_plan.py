"""What a sandbox's supervisor is told to start. The driver writes it as JSON, the supervisor only reads it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Plan:
    """What the driver wants started, beside the storage daemon.

    ``known_version``: of this runsc it is known what it does first, and how its kernel is told to save memory.
    ``pack`` and ``stopped`` are asked in a guest whose disk is not mounted; it may tell ``pack_bytes``.
    """

    top: str
    runsc: list[str]
    restore: str = ""
    known_version: bool = False
    check_disk: bool = False
    hide_net_sysctl: bool = False
    netns: str = ""
    router_netns: str = ""
    device: str = ""
    guest_address: str = ""
    gateway: str = ""
    addresses: str = ""
    bridge: list[str] = field(default_factory=list)
    pack: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    pack_bytes: int = 0
    deleted: list[str] = field(default_factory=list)
    keep: str = ""
    out_of_memory_file: str = ""
    process_limit_file: str = ""
