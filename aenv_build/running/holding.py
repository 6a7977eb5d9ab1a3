"""What a running build uses and makes is held in the repository, whoever collects garbage there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress

from aenv_run.errors import AenvError
from aenv_run.garbage.holder import RENEW_S, Holder
from aenv_run.garbage.unheld import require_held
from aenv_run.paths import Home
from aenv_run.repository import Repository
from aenv_run.threads import in_thread, to_the_end
from aenv_run.types import SnapshotId

WHAT = "what the build uses"


class BuildHolding:
    """What a build holds. Blocking and thread-safe. ``unheld``: why it goes on without, as the operator allows."""

    def __init__(self, repository: Repository, home: Home) -> None:
        self._repository = repository
        self._holder = Holder.of_build(repository, str(home.root))
        self.unheld: AenvError | None = None

    def begin(self) -> None:
        """From now on what it commits is held; raises where the lease cannot be written."""
        try:
            self._holder.renew()
        except AenvError as error:
            require_held(self._repository, error, WHAT)
            self.unheld = error

    def hold(self, snapshots: Mapping[SnapshotId, Iterable[str]]) -> None:
        """Once this returns none is collected that is there then."""
        try:
            self._holder.hold(snapshots)
        except AenvError as error:
            require_held(self._repository, error, WHAT)

    def renew(self) -> None:
        """Show that the build is there."""
        self._holder.renew()

    def drop(self) -> None:
        """It has ended."""
        self._holder.drop()


@asynccontextmanager
async def holding(repository: Repository, home: Home) -> AsyncIterator[BuildHolding]:
    """For as long as the build runs. Where the lease cannot be written, it does not begin."""
    holder = BuildHolding(repository, home)
    await in_thread(holder.begin)
    keeper = asyncio.create_task(_renew_forever(holder), name="hold what the build uses")
    try:
        yield holder
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        with suppress(AenvError):
            await to_the_end(in_thread(holder.drop))


async def _renew_forever(holder: BuildHolding) -> None:
    while True:
        await asyncio.sleep(RENEW_S)
        with suppress(AenvError):
            await in_thread(holder.renew)
