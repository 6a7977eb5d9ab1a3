"""The block server's process: ``python -m aenv_run.blocks.process --home DIR``. Started when it is needed.

One for a home. It ends when nobody is connected. Its death harms nobody: engines wait for the next one, and what
it had fetched is there.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import logging.handlers
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from aenv_run.blocks.budget import read_counters, save_counters
from aenv_run.blocks.fetch import Fetcher
from aenv_run.blocks.opening import Repositories
from aenv_run.blocks.server import BlockServer
from aenv_run.config import cache_limit_bytes, fills_idle, store_patience_s
from aenv_run.node_socket import FileLock, listen
from aenv_run.paths import Home

log = logging.getLogger(__name__)

IDLE_S = 2.0
#: How long the start waits for a former server of the same home to end.
HANDOVER_S = 15.0
MAX_LOG_BYTES = 2 << 20
SAVE_S = 2.0
ALREADY_RUNS = 75


async def serve(home: Home, meet: str = "", idle_s: float = IDLE_S) -> None:
    """Serve until nobody has been connected for ``idle_s``, or told to stop. The caller holds the lock."""
    repositories = Repositories(home)
    fetcher = Fetcher(patience_s=store_patience_s(), counters=read_counters(home.cache))
    server = BlockServer(
        root=home.cache,
        opened=repositories.opened,
        limit_bytes=cache_limit_bytes(),
        fetcher=fetcher,
        take_in=repositories.take_in,
        fill_idle=fills_idle(),
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await server.serve(listen(home.block_socket))
    if meet:
        server.begin(asyncio.to_thread(repositories.meet, meet))
    log.info("serving")
    saved = dataclasses.replace(fetcher.counters)
    try:
        while not stop.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(SAVE_S):
                    await stop.wait()
            if fetcher.counters != saved:
                saved = dataclasses.replace(fetcher.counters)
                await asyncio.to_thread(save_counters, home.cache, saved)
            if not server.connections and time.monotonic() - server.last_use_s > idle_s:
                log.info("nobody has been connected for %g s: ending", idle_s)
                break
    finally:
        home.block_socket.unlink(missing_ok=True)
        await server.close()
        save_counters(home.cache, fetcher.counters)


def _log_to(path: Path) -> None:
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=MAX_LOG_BYTES, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for noisy in ("botocore", "boto3", "urllib3", "s3transfer", "fsspec"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def main(argv: list[str] | None = None) -> int:
    """Serve the layers of one home; 75 when another process does."""
    parser = argparse.ArgumentParser(
        prog="aenv_run.blocks.process", description="the block server of one AENV_HOME"
    )
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--meet", default="", help="a repository whose store will be asked")
    options = parser.parse_args(argv)
    home = Home(options.home.absolute())
    os.umask(0o077)
    lock = FileLock(home.locks / "blocks.lock")
    deadline_s = time.monotonic() + HANDOVER_S
    while not lock.acquire():
        if time.monotonic() > deadline_s:
            return ALREADY_RUNS
        time.sleep(0.05)
    _log_to(home.block_log)
    try:
        asyncio.run(serve(home, options.meet))
    except Exception:
        log.exception("the block server failed")
        raise
    finally:
        lock.release()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
