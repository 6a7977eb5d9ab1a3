"""What the sandboxes and pools of a node use is held in the repository, whoever collects garbage there.

The lease outlives the node and never runs out by itself: a paused sandbox needs its snapshot when no node runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from aenv_run import durable
from aenv_run.errors import AenvError, from_os
from aenv_run.garbage.holder import LOOK_S, Holder
from aenv_run.garbage.leases import new_id
from aenv_run.garbage.unheld import is_for_good, refusal
from aenv_run.paths import Home
from aenv_run.repository import Repository
from aenv_run.threads import in_thread
from aenv_run.types import SnapshotId

log = logging.getLogger(__name__)

#: How often the lease is written though nothing changes, so that people see when the node was there last.
SHOW_S = 600.0
#: How long what is used no longer is held: the next episode begins from the same snapshot.
LINGER_S = 1.0

Uses = Mapping[SnapshotId, tuple[str, ...]]


class NodeHolding:
    """``uses`` says what is used now. Where this node may not write, there is no lease: ``trouble`` says so."""

    def __init__(self, home: Home, repository: Repository, uses: Callable[[], Uses]) -> None:
        self._home, self._repository, self._uses = home, repository, uses
        self._holder: Holder | None = None
        #: Why what is used is not held; None: it is.
        self.trouble: AenvError | None = None
        self._starting: Counter[SnapshotId] = Counter()
        self._keeping: frozenset[SnapshotId] | None = None  # what stays, while the lease is being written
        self._writing = asyncio.Lock()
        self._due = asyncio.Event()
        self._shown_s = time.monotonic()
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Go on holding what an earlier node of this home held."""
        await self._try(self._open)

    def keep(self) -> None:
        """From now on what ``uses`` says counts."""
        self._due.set()
        self._keeper = asyncio.create_task(self._keep_forever(), name="hold what is used")

    def changed(self) -> None:
        """Something is used no longer, or something new is."""
        self._due.set()

    @asynccontextmanager
    async def using(self, id: SnapshotId) -> AsyncIterator[None]:
        """Around a launch from that snapshot: it is held from before it is read until ``uses`` names it.

        Fails where the lease cannot be written now: a sandbox that nothing holds may lose its disk to a collector.
        Where it can never be written, $AENV_ALLOW_UNHELD=on lets it be launched all the same.
        """
        self._starting[id] += 1
        try:
            if not self._holds(id):
                # With all that is used already: the lease that an earlier node left may be damaged.
                wanted = {id: ("a sandbox that starts",), **self._uses()}
                await self._try(lambda: self._open().hold(wanted))
                unheld = self._repository.allow_unheld and self.trouble is not None and is_for_good(self.trouble)
                if self.trouble is not None and not unheld:
                    raise self.trouble
            yield
        finally:
            self._starting[id] -= 1
            self._due.set()

    async def close(self) -> None:
        """The last word of this node: what paused sandboxes and pools use, or no lease."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            await self._sync(last=True)

    # -- pieces --------------------------------------------------------------------------------------------

    def _holds(self, id: SnapshotId) -> bool:
        return (
            self._holder is not None and id in self._holder.held and (self._keeping is None or id in self._keeping)
        )

    async def _keep_forever(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._due.wait()
                await asyncio.sleep(LINGER_S)
            self._due.clear()
            await self._sync()

    async def _sync(self, *, last: bool = False) -> None:
        async with self._writing:
            wanted = dict(self._uses())
            for id in +self._starting:
                wanted.setdefault(id, ("a sandbox that starts",))
            self._keeping = frozenset(wanted)
            try:
                await self._try(lambda: self._write(wanted, last))
            finally:
                self._keeping = None

    def _write(self, wanted: Uses, last: bool) -> None:
        holder = self._open()
        if last and not wanted:
            holder.drop()
            return
        holder.hold(wanted) if wanted else None
        holder.keep(wanted)
        if wanted and time.monotonic() - self._shown_s > SHOW_S:
            holder.renew()
            self._shown_s = time.monotonic()
        holder.look(older_than_s=LOOK_S / 2)
        self._note(holder)

    def _open(self) -> Holder:
        if self._holder is None:
            place = self._home.holder
            try:
                id = place.read_text().strip()
            except FileNotFoundError:
                id = new_id()
            self._holder = Holder.of_node(self._repository, str(self._home.root), id)
            self._note(self._holder)
        return self._holder

    def _note(self, holder: Holder) -> None:
        place = self._home.holder
        if not place.exists() or place.read_text().strip() != holder.id:
            place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            durable.replace(place, holder.id.encode())

    async def _try(self, work: Callable[[], object]) -> None:
        try:
            await in_thread(work)
            self.trouble = None
        except (AenvError, OSError) as error:
            log.warning("what the sandboxes use is not held against garbage collection elsewhere: %s", error)
            why = error if isinstance(error, AenvError) else from_os(error)
            self.trouble = refusal(why, "its snapshot")
            self.trouble.__cause__ = why
