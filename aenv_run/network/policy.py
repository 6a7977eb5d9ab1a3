"""What a sandbox may reach: a value, kept with the sandbox, applied to whatever slot it has at the time."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from enum import StrEnum
from ipaddress import IPv4Network, collapse_addresses, ip_network

from pydantic import Field, field_validator

from aenv_run.errors import InvalidInput
from aenv_run.types import Model

#: Never reachable, whatever a policy allows: they mean nothing beyond one host, or every host at once.
NEVER = tuple(map(IPv4Network, ("0.0.0.0/8", "127.0.0.0/8", "224.0.0.0/4", "240.0.0.0/4")))
#: Reachable only where ``allow`` names them: RFC 1918, shared (CGNAT), link local with the metadata services,
#: protocol assignments, benchmarking.
PRIVATE = tuple(
    map(
        IPv4Network,
        (
            "10.0.0.0/8",
            "100.64.0.0/10",
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.168.0.0/16",
            "198.18.0.0/15",
        ),
    )
)
EVERYTHING = IPv4Network("0.0.0.0/0")
#: How many entries a list may have.
MAX_ENTRIES = 1000

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_DOMAIN = re.compile(rf"(?:\*\.)?(?:{_LABEL}\.)*{_LABEL}")


class NameVerdict(StrEnum):
    """What the DNS forwarder does with a name."""

    REFUSE = "refuse"
    RESOLVE = "resolve"
    ADMIT = "admit"  # resolve, and let the guest reach the answered addresses


@functools.lru_cache(maxsize=4096)
def parse_target(text: str) -> IPv4Network | str:
    """A CIDR (or one address) as a network; a domain in lower case, as DNS writes it."""
    entry = text.strip().rstrip(".").lower()
    if re.fullmatch(r"[0-9a-f:.]+(?:/[0-9]+)?", entry) and re.search(r"[0-9:]$", entry):
        try:
            network = ip_network(entry)
        except ValueError as error:
            raise InvalidInput(
                f"network policy: {text!r}: {error}", fix="write a CIDR, an address or a domain"
            ) from error
        if not isinstance(network, IPv4Network):
            raise InvalidInput(
                f"network policy: {text!r} is IPv6, which sandboxes do not have",
                fix="leave it out: IPv6 is dropped",
            )
        return network
    try:
        entry = entry if entry.isascii() else entry.encode("idna").decode()
    except UnicodeError as error:
        raise InvalidInput(f"network policy: {text!r} is not a domain: {error}") from error
    if len(entry) > 253 or not _DOMAIN.fullmatch(entry):
        raise InvalidInput(
            f"network policy: {text!r} is neither a CIDR nor a domain",
            fix="write 203.0.113.0/24, 203.0.113.7, example.org or *.example.org; no ports, no URLs",
        )
    return entry


def names_domain(pattern: str, name: str) -> bool:
    """``example.org`` is that name alone; ``*.example.org`` every name below it, at any depth."""
    if pattern.startswith("*."):
        return name.endswith(pattern[1:]) and len(name) > len(pattern) - 1
    return name == pattern


class NetworkPolicy(Model):
    """What a sandbox may reach.

    ``deny`` wins over ``allow``. A non-empty ``allow``, or ``internet=False``, drops all that is not allowed.
    Private ranges need an ``allow`` entry within the range; the host's own addresses, other sandboxes and IPv6
    are never reachable.
    """

    internet: bool = Field(True, description="reach public addresses; false leaves only what allow names")
    allow: tuple[str, ...] = Field((), max_length=MAX_ENTRIES, description="CIDRs and domains; nothing else then")
    deny: tuple[str, ...] = Field((), max_length=MAX_ENTRIES, description="CIDRs and domains; stronger than allow")

    @field_validator("allow", "deny")
    @classmethod
    def _canonical(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(str(parse_target(entry)) for entry in entries))

    @classmethod
    def allow_wins(cls, *, internet: bool, allow: Iterable[str], deny: Iterable[str]) -> NetworkPolicy:
        """From lists where ``allow`` is stronger than ``deny`` and is no allow-list by itself (as E2B's are).

        The denied networks are cut around the allowed ones. Domains are not cut: an allowed domain needs a deny of
        everything (0.0.0.0/0) or ``internet=False``, a denied one must not be among the allowed.
        """
        allowed, denied = cls(allow=tuple(allow)), cls(deny=tuple(deny))
        if not internet or EVERYTHING in denied.deny_networks:
            return cls(internet=False, allow=allowed.allow)
        if allowed.allow_domains:
            raise InvalidInput(
                f"allowed domain {allowed.allow_domains[0]!r} has no effect while all others are reachable",
                fix="deny 0.0.0.0/0 as well",
            )
        rest = list(denied.deny_networks)
        for hole in allowed.allow_networks:
            rest = [part for network in rest for part in _without(network, hole)]
        return cls(deny=(*map(str, collapse_addresses(rest)), *denied.deny_domains))

    @property
    def restricted(self) -> bool:
        """Whether everything that is not allowed is dropped."""
        return not self.internet or bool(self.allow)

    @property
    def allow_networks(self) -> tuple[IPv4Network, ...]:
        """The allowed CIDRs, overlaps merged."""
        return _networks(self.allow)

    @property
    def deny_networks(self) -> tuple[IPv4Network, ...]:
        """The denied CIDRs, overlaps merged."""
        return _networks(self.deny)

    @property
    def opened(self) -> tuple[IPv4Network, ...]:
        """The allowed CIDRs that lie within a private range; 0.0.0.0/0 opens none of these."""
        return tuple(n for n in self.allow_networks if any(n.subnet_of(private) for private in PRIVATE))

    @property
    def allow_domains(self) -> tuple[str, ...]:
        """The allowed domains and patterns."""
        return _domains(self.allow)

    @property
    def deny_domains(self) -> tuple[str, ...]:
        """The denied domains and patterns."""
        return _domains(self.deny)

    def judge(self, name: str) -> NameVerdict:
        """What the DNS forwarder does with ``name`` (lower case, without the last dot)."""
        if any(names_domain(pattern, name) for pattern in self.deny_domains):
            return NameVerdict.REFUSE
        if not self.restricted:
            return NameVerdict.RESOLVE
        if any(names_domain(pattern, name) for pattern in self.allow_domains):
            return NameVerdict.ADMIT
        # Where every public address is open, a name that is not told would hold nothing back.
        return NameVerdict.RESOLVE if EVERYTHING in self.allow_networks else NameVerdict.REFUSE


def _networks(entries: tuple[str, ...]) -> tuple[IPv4Network, ...]:
    parsed = map(parse_target, entries)
    return tuple(collapse_addresses(entry for entry in parsed if isinstance(entry, IPv4Network)))


def _domains(entries: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(entry for entry in map(parse_target, entries) if isinstance(entry, str))


def _without(network: IPv4Network, hole: IPv4Network) -> list[IPv4Network]:
    if network.subnet_of(hole):
        return []
    return list(network.address_exclude(hole)) if hole.subnet_of(network) else [network]
