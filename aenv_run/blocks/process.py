"""The block server's process: ``python -m aenv_run.blocks.process --home DIR``. Started when it is needed.

One for a home. It ends when nobody is connected. Its death harms nobody: engines wait for the next one, and what
it had fetched is there. The process that serves is the child of one that only waits, and starts the next one.
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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from aenv_run.blocks.budget import read_counters, save_counters
from aenv_run.blocks.exports import held_exports
from aenv_run.blocks.fetch import Fetcher
from aenv_run.blocks.opening import Repositories
from aenv_run.blocks.server import BlockServer
from aenv_run.blocks.starting import ALREADY_RUNS
from aenv_run.config import cache_limit_bytes, fills_idle, store_patience_s
from aenv_run.node_socket import FileLock, listen
from aenv_run.paths import Home

log = logging.getLogger(__name__)

IDLE_S = 2.0
#: How long the start waits for a former server of the same home to end.
HANDOVER_S = 15.0
MAX_LOG_BYTES = 2 << 20
SAVE_S = 2.0
#: One that dies so soon so often is not started again: whoever needs it is told.
QUICK_S, MAX_QUICK = 5.0, 10


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
        holders=lambda: held_exports(home),
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
        return looked_after(lambda: asyncio.run(serve(home, options.meet)))
    finally:
        lock.release()


def looked_after(serve_once: Callable[[], None]) -> int:
    """Run it in a child, and again when that dies by accident; its exit code when it has ended as it should.

    So a server that is killed is followed by the next one whether a node lives or not. This process has loaded
    all that a child needs, and shares that memory with it.
    """
    child, told, quick = 0, False, 0

    def tell(number: int, _frame: object) -> None:
        nonlocal told
        told = True
        if child:
            with suppress(ProcessLookupError):
                os.kill(child, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, tell)
    while not told:
        begun_s = time.monotonic()
        child = os.fork()
        if child == 0:
            _run_child(serve_once)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        child = 0
        if code == 0 or told:
            return 0
        quick = quick + 1 if time.monotonic() - begun_s < QUICK_S else 0
        log.error("the block server died (%d); the next one is started", code)
        if quick > MAX_QUICK:
            return 70
        time.sleep(0.1 * quick)
    return 0


def _run_child(serve_once: Callable[[], None]) -> NoReturn:
    code = 70
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        serve_once()
        code = 0
    except BaseException:
        log.exception("the block server failed")
    finally:
        logging.shutdown()
        os._exit(code)


if __name__ == "__main__":
    raise SystemExit(main())
