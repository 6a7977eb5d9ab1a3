"""Which addresses a guest was told for which names: what an allow-list by domain stands on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from ipaddress import IPv4Address

from pydantic import Field

from aenv_run.network.policy import NameVerdict, NetworkPolicy
from aenv_run.network.rules import MAX_NAME_ADDRESSES, NameAddresses
from aenv_run.types import Model

#: Programs keep an address longer than DNS lets them: at least this long after the answer.
MIN_SECONDS = 300
MAX_SECONDS = 86400
MAX_NAMES = 2048
MAX_ADDRESSES_PER_NAME = 64


class Answers(Model):
    """Name -> address -> wall-clock second until which it is good. A value: it can go along with a fork."""

    names: dict[str, dict[str, int]] = Field(default_factory=dict)


class AnswerBook:
    """The answers of one guest, bounded; the oldest names go first."""

    def __init__(self, answers: Answers = Answers(), clock: Callable[[], float] = time.time) -> None:  # noqa: B008 - frozen
        self._names = {name: dict(addresses) for name, addresses in answers.names.items()}
        self._clock = clock

    def note(self, name: str, addresses: Iterable[IPv4Address], ttl_s: int) -> dict[IPv4Address, int]:
        """Remember an answer. Returns what is new or must be renewed: address -> seconds it is good for."""
        now = int(self._clock())
        seconds = min(max(ttl_s + 60, MIN_SECONDS), MAX_SECONDS)
        known = self._names.pop(name, {})
        self._names[name] = known  # now the youngest
        fresh: dict[IPv4Address, int] = {}
        for address in addresses:
            if known.get(str(address), 0) - now < max(ttl_s, seconds // 2):
                known[str(address)] = now + seconds
                fresh[address] = seconds
        for surplus in sorted(known, key=known.__getitem__)[: max(0, len(known) - MAX_ADDRESSES_PER_NAME)]:
            del known[surplus]
        while len(self._names) > MAX_NAMES:
            del self._names[next(iter(self._names))]
        return fresh

    def forget(self, name: str) -> None:
        """As if it had not been answered."""
        self._names.pop(name, None)

    def value(self) -> Answers:
        """What is still good, as a value."""
        now = self._clock()
        live = {
            name: {address: until for address, until in addresses.items() if until > now}
            for name, addresses in self._names.items()
        }
        return Answers(names={name: addresses for name, addresses in live.items() if addresses})

    def under(self, policy: NetworkPolicy) -> NameAddresses:
        """The answered addresses that ``policy`` allows by name, and those that it denies under every name."""
        now = int(self._clock())
        allowed: dict[IPv4Address, int] = {}
        denied: dict[IPv4Address, int] = {}
        harmless: set[IPv4Address] = set()
        for name, addresses in self.value().names.items():
            verdict = policy.judge(name)
            for text, until in addresses.items():
                address, seconds = IPv4Address(text), max(1, until - now)
                if verdict is NameVerdict.REFUSE:
                    denied[address] = max(seconds, denied.get(address, 0))
                    continue
                harmless.add(address)
                if verdict is NameVerdict.ADMIT:
                    allowed[address] = max(seconds, allowed.get(address, 0))
        if policy.restricted:
            return NameAddresses(allowed=_longest(allowed))  # everything else is dropped anyway
        return NameAddresses(denied=_longest({a: s for a, s in denied.items() if a not in harmless}))


def _longest(addresses: dict[IPv4Address, int]) -> dict[IPv4Address, int]:
    """As many as fit the set, those that are good for longest."""
    kept = sorted(addresses, key=addresses.__getitem__, reverse=True)[:MAX_NAME_ADDRESSES]
    return {address: addresses[address] for address in kept}
