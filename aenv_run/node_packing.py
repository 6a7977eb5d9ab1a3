"""The node packs its repository now and then, in a process of its own at idle priority."""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import dataclass

from aenv_run.errors import AenvError
from aenv_run.packing import Packing
from aenv_run.paths import Home
from aenv_run.process import check

log = logging.getLogger(__name__)

#: A node that has just started has better things to do, and many live for less.
FIRST_S = 600.0
EVERY_S = 3600.0
LIMIT_S = 24 * 3600.0


@dataclass(frozen=True)
class NodePacking:
    """``older_than_s``: how long a blob must not have been used; None: nothing is packed."""

    home: Home
    repository_url: str | None
    older_than_s: float | None
    first_s: float = FIRST_S
    every_s: float = EVERY_S

    async def run(self) -> None:
        """Until it is cancelled, which ends the process too; nothing is lost by that."""
        if self.older_than_s is None:
            return
        wait_s = self.first_s
        while True:
            await asyncio.sleep(wait_s)
            wait_s = self.every_s
            try:
                done = await self.once(self.older_than_s)
            except (AenvError, OSError) as error:
                log.error("the repository could not be packed: %s", error)
                continue
            if done.packed or done.damaged:
                log.info("packed %d blobs: %d bytes into %d", done.packed, done.raw_bytes, done.packed_bytes)
            for digest in done.damaged:
                log.error("blob %s is damaged in the repository; `aenv check --deep` says more", digest)

    async def once(self, older_than_s: float) -> Packing:
        """Pack what is due now."""
        argv = [sys.executable, "-m", "aenv_run.packing", "--home", str(self.home.root)]
        argv += ["--older-than-s", str(older_than_s)]
        if self.repository_url is not None:
            argv += ["--repository", self.repository_url]
        done = await check(argv, what="cannot pack the repository", timeout_s=LIMIT_S)
        return Packing.model_validate_json(done.stdout)
