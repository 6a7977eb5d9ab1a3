"""One live slot: its policy, its DNS server, and what its guest was told."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

from aenv_run.drivers.protocol import NetworkSlot
from aenv_run.errors import AenvError
from aenv_run.network.addressing import SlotId, UplinkPool, network_slot
from aenv_run.network.answers import AnswerBook, Answers
from aenv_run.network.commands import nft
from aenv_run.network.policy import NameVerdict, NetworkPolicy
from aenv_run.network.resolver import Forwarder, Upstream
from aenv_run.network.rules import (
    NameAddresses,
    RouterFacts,
    admit_names,
    open_on_host,
    router_nat,
    router_policy,
)
from aenv_run.network.state import SlotFiles, SlotRecord

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lease:
    """A slot that belongs to one sandbox until it is released."""

    slot_id: SlotId
    slot: NetworkSlot


def new_version() -> int:
    """A number for a version of a policy; those before live on as marks of connections."""
    return 1 + secrets.randbelow((1 << 32) - 1)


def own_networks(pool: UplinkPool, addresses: Iterable[IPv4Address]) -> tuple[IPv4Network, ...]:
    """What no guest may reach whatever is allowed: the host itself and every other sandbox."""
    return (pool.network, *(IPv4Network(address) for address in addresses))


class LiveSlot:
    """A slot as this process runs it."""

    def __init__(self, record: SlotRecord, pool: UplinkPool, files: SlotFiles, upstream: Upstream) -> None:
        self.lease = Lease(record.slot_id, network_slot(record.slot_id, record.kind, pool))
        self._record = record
        self._pool = pool
        self._files = files
        self._book = AnswerBook(record.answers)
        self._lock = asyncio.Lock()
        self._forwarder = Forwarder(lambda: self._record.policy, upstream, self._admit)

    @property
    def record(self) -> SlotRecord:
        """What its file holds."""
        return self._record

    @property
    def answers(self) -> Answers:
        """What its guest was told and is still good."""
        return self._book.value()

    def facts(self, own: tuple[IPv4Network, ...]) -> RouterFacts:
        """What its rules need."""
        number = self._record.slot_id.number
        return RouterFacts(self._record.kind, self._pool.host_end(number), self._pool.router_end(number), own)

    def first_rules(self, own: tuple[IPv4Network, ...]) -> str:
        """The rules of a new slot."""
        facts = self.facts(own)
        return router_nat(facts) + router_policy(facts, self._record.policy, NameAddresses(), new_version())

    async def listen(self) -> None:
        """Start its DNS server."""
        await self._forwarder.start(self.lease.slot.router_netns)

    async def close(self) -> None:
        """Stop its DNS server."""
        await self._forwarder.close()

    async def apply(self, policy: NetworkPolicy, answers: Answers | None, own: tuple[IPv4Network, ...]) -> None:
        """Put ``policy`` in force, for established connections too. If it fails, the policy before is in force."""
        async with self._lock:
            before = self._record
            if answers is not None:
                self._book = AnswerBook(Answers(names=self._book.value().names | answers.names))
            names = self._book.under(policy)
            # Written first: whoever takes this slot over puts in force what the file says.
            self._write(policy)
            opened = False
            try:
                # The host's side first: until the router follows, both old and new policy have to agree.
                opened = await self._open(before.policy, policy)
                rules = router_policy(self.facts(own), policy, names, new_version())
                await nft(rules, what=self._what("policy"), namespace=self.lease.slot.router_netns)
            except BaseException:
                self._record = before
                self._files.write(before)
                if opened:
                    await asyncio.shield(self._open(policy, before.policy))
                raise

    async def take_over(self, own: tuple[IPv4Network, ...]) -> None:
        """After another process ran it: load its rules again and serve its DNS."""
        await self.open_on_host()
        await self.apply(self._record.policy, None, own)
        await self.listen()

    async def open_on_host(self) -> None:
        """Open again what the host's side had opened for it: its table may be a new one."""
        await self._open(NetworkPolicy(), self._record.policy)

    async def shut_on_host(self) -> None:
        """Take back what the host's side opened for it."""
        await self._open(self._record.policy, NetworkPolicy())

    async def _open(self, before: NetworkPolicy, after: NetworkPolicy) -> bool:
        text = open_on_host(self._pool.router_end(self._record.slot_id.number), before.opened, after.opened)
        if text:
            await nft(text, what=self._what("the host's side"))
        return bool(text)

    def _what(self, part: str) -> str:
        return f"network slot {self._record.slot_id}: {part}"

    def _write(self, policy: NetworkPolicy) -> None:
        self._record = self._record.model_copy(update={"policy": policy, "answers": self._book.value()})
        self._files.write(self._record)

    async def _admit(self, name: str, addresses: tuple[IPv4Address, ...], ttl_s: int) -> bool:
        async with self._lock:
            policy = self._record.policy  # under the lock: it may have changed while the question was out
            verdict = policy.judge(name)
            if verdict is NameVerdict.REFUSE:
                return False
            fresh = self._book.note(name, addresses, ttl_s)
            if verdict is NameVerdict.RESOLVE or not fresh:
                return True
            try:
                await nft(admit_names(fresh), what=self._what("names"), namespace=self.lease.slot.router_netns)
            except BaseException as error:
                self._book.forget(name)
                if not isinstance(error, AenvError):
                    raise
                log.warning("%s", error)  # the set may be full: the guest is not told what it could not reach
                return False
            self._write(policy)
            return True
