"""The bound on what a whole server holds in memory for its peers: what it gathers for them, and what is unsent."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

#: Reads that wait for a store hold what has come for them already: all together, and those of one store.
GATHERED_BYTES, SHARE_BYTES = 64 << 20, 32 << 20
#: Answers that their peers have not taken.
UNSENT_BYTES = 64 << 20
#: Where there is no room because of peers that take nothing, their connections are ended after so long.
STALL_S = 30.0


class Room:
    """So many bytes for all, and at most a share of them for one owner; in turn."""

    def __init__(self, limit_bytes: int = GATHERED_BYTES, share_bytes: int = SHARE_BYTES) -> None:
        self.limit_bytes, self.share_bytes = limit_bytes, share_bytes
        self.used_bytes = self.most_bytes = 0
        self._used: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()

    @asynccontextmanager
    async def held(self, owner: str, size_bytes: int) -> AsyncIterator[None]:
        """So many bytes are the caller's inside the context."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((size_bytes, turn))
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(owner, size_bytes)
            raise
        try:
            yield
        finally:
            self._give_back(owner, size_bytes)

    def _give_back(self, owner: str, size_bytes: int) -> None:
        self.used_bytes -= size_bytes
        self._used[owner] -= size_bytes
        if not self._used[owner]:
            del self._used[owner]
        self._grant()

    def _grant(self) -> None:
        """In turn, the owners one after the other."""
        granted = True
        while granted:
            granted = False
            for owner in list(self._waiting):
                granted = self._grant_one(owner) or granted

    def _grant_one(self, owner: str) -> bool:
        queue = self._waiting[owner]
        while queue and queue[0][1].done():  # it waits no more
            queue.popleft()
        if not queue:
            del self._waiting[owner]
            return False
        size_bytes, turn = queue[0]
        if not (self._fits(self.used_bytes, size_bytes, self.limit_bytes)
                and self._fits(self._used[owner], size_bytes, self.share_bytes)):  # fmt: skip
            return False
        queue.popleft()
        self.used_bytes += size_bytes
        self.most_bytes = max(self.most_bytes, self.used_bytes)
        self._used[owner] += size_bytes
        turn.set_result(None)
        return True

    @staticmethod
    def _fits(used_bytes: int, size_bytes: int, limit_bytes: int) -> bool:
        """One that is too large for the bound has all of it for itself."""
        return used_bytes == 0 or used_bytes + size_bytes <= limit_bytes


class Peer(Protocol):
    """A connection."""

    def go_on(self) -> None:
        """There is room again."""

    def abort(self) -> None:
        """End it now."""


class Unsent:
    """Answers that peers have asked for and do not take."""

    def __init__(self, limit_bytes: int = UNSENT_BYTES, stall_s: float = STALL_S) -> None:
        self.limit_bytes, self.stall_s = limit_bytes, stall_s
        self.used_bytes = 0
        self._of: OrderedDict[Peer, int] = OrderedDict()
        self._waiting: OrderedDict[Peer, None] = OrderedDict()
        self._stall: asyncio.TimerHandle | None = None

    def has_room(self, peer: Peer) -> bool:
        """Whether the peer may have another answer now; if not, it is told when it may."""
        if self.used_bytes < self.limit_bytes:
            return True
        self._waiting[peer] = None
        if self._stall is None:
            self._stall = asyncio.get_running_loop().call_later(self.stall_s, self._end_stalled, list(self._of))
        return False

    def set(self, peer: Peer, size_bytes: int) -> None:
        """What the peer has not taken by now."""
        self.used_bytes += size_bytes - self._of.pop(peer, 0)
        if size_bytes:
            self._of[peer] = size_bytes
        if self.used_bytes < self.limit_bytes and self._waiting:
            waiting, self._waiting = self._waiting, OrderedDict()
            for one in waiting:
                one.go_on()

    def forget(self, peer: Peer) -> None:
        """It is gone."""
        self._waiting.pop(peer, None)
        self.set(peer, 0)

    def close(self) -> None:
        """Look no more."""
        if self._stall is not None:
            self._stall.cancel()

    def _end_stalled(self, since: list[Peer]) -> None:
        """Those that have taken nothing all the while: an engine connects again when it goes on."""
        self._stall = None
        if not self._waiting:
            return
        for peer in since:
            if peer in self._of:
                peer.abort()
