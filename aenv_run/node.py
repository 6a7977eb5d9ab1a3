"""The node process: ``python -m aenv_run.node --home DIR``. Started by the client when it is needed.

It keeps the TTLs and the machines of one home, serves its socket, and ends when nothing is live. Its death
harms nobody: engines run on, and the next node attaches them.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import logging.handlers
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import uvicorn

from aenv_run.blocks.layers import Layers
from aenv_run.cache import BlobCache
from aenv_run.catalog import Catalog
from aenv_run.config import (
    cache_limit_bytes,
    first_boot_warms,
    loads_on_demand,
    open_repository,
    pack_after_s,
    repository_name,
)
from aenv_run.drivers.protocol import Endpoint
from aenv_run.drivers.select import Selected, all_drivers, select
from aenv_run.errors import AenvError
from aenv_run.guest import Guest
from aenv_run.node_api import Service, make_app
from aenv_run.node_core import Node
from aenv_run.node_packing import NodePacking
from aenv_run.node_socket import FileLock, listen
from aenv_run.node_wire import known
from aenv_run.paths import Home
from aenv_run.sandbox_network import NodeNetwork
from aenv_run.sandbox_tools import Tools
from aenv_run.warm_images import WarmImages

log = logging.getLogger(__name__)

DEFAULT_IDLE_S = 30.0
MAX_LOG_BYTES = 2 << 20
#: How long the start waits for a former node of the same home to end.
HANDOVER_S = 15.0
#: Requests that run get this long to end when the node is told to stop.
GRACE_S = 20


def lock_of(home: Home) -> FileLock:
    """Held by the node of a home for as long as it lives: there is never a second one."""
    return FileLock(home.locks / "node.lock")


async def open_tools(home: Home, repository_url: str | None, driver_name: str) -> tuple[Tools, Selected]:
    """Choose the driver and open the repository."""
    selected = await select(driver_name, home)
    repository = await asyncio.to_thread(open_repository, repository_url, home)
    cache = BlobCache(home.cache, repository)
    others = {name: driver for name, driver in all_drivers(home).items() if name != selected.driver.name}
    tools = Tools(
        driver=selected.driver,
        mode=selected.probe.mode,
        repository=repository,
        catalog=Catalog(repository),
        cache=cache,
        guests=_guest,
        network=NodeNetwork.of(home, selected.driver, others.values()),
        others=others,
        cache_limit_bytes=cache_limit_bytes(),
        layers=Layers.of(home, cache, _repository_name(repository_url, home), on_demand=loads_on_demand()),
        images=WarmImages(home.cache) if first_boot_warms() else None,
    )
    return tools, selected


def _guest(endpoint: Endpoint, access_token: str | None) -> Guest:
    return Guest(endpoint, access_token=access_token)


async def serve(home: Home, *, repository_url: str | None, driver_name: str, idle_s: float) -> None:
    """Serve until idle or told to stop. The caller holds the node lock."""
    listener = listen(home.node_socket)
    stop = asyncio.Event()
    service = Service(home, stop.set, repository=_repository_name(repository_url, home), driver=driver_name)
    config = uvicorn.Config(
        make_app(service),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=1,
    )
    server = uvicorn.Server(config)
    loop = asyncio.get_running_loop()
    work = loop.create_task(_work(service, home, repository_url, driver_name, idle_s, stop))
    stopper = loop.create_task(_stop_when(stop, server))
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in (work, stopper):
            task.cancel()
        await asyncio.gather(work, stopper, return_exceptions=True)
        if (node := service.node_now()) is not None:
            await node.close()
        home.node_socket.unlink(missing_ok=True)


def _repository_name(repository_url: str | None, home: Home) -> str:
    try:
        return repository_name(repository_url, home)
    except AenvError:
        return repository_url or ""  # opening it says what is wrong


async def _stop_when(stop: asyncio.Event, server: uvicorn.Server) -> None:
    await stop.wait()
    server.should_exit = True


async def _work(
    service: Service, home: Home, repository_url: str | None, driver_name: str, idle_s: float, stop: asyncio.Event
) -> None:
    """Begin, then keep the TTLs, then end when idle."""
    node: Node | None = None
    try:
        packing = NodePacking(home, repository_url, pack_after_s())
        tools, selected = await open_tools(home, repository_url, driver_name)
        node = Node(home, tools)
        await node.reconcile()
    except Exception as error:
        log.error("cannot begin: %s", error, exc_info=not isinstance(error, AenvError))
        service.fail(known(error, where=str(home.node_log)))
        if node is not None:
            await node.close()
        await asyncio.sleep(1.0)  # the callers that wait are told why
        stop.set()
        return
    service.begin(node, selected)
    packer = asyncio.create_task(packing.run() if tools.repository.store.has_files else asyncio.sleep(0))
    log.info("ready: %s", selected.why)
    try:
        await keep_time(node, lambda: service.in_flight > 0, idle_s=idle_s)
        log.info("nothing is live for %g s: ending", idle_s)
    except Exception:
        log.exception("the reaper failed; the next node goes on")
        raise
    finally:
        packer.cancel()
        stop.set()
        await asyncio.wait([packer])


async def keep_time(node: Node, busy: Callable[[], bool], *, idle_s: float) -> None:
    """Reap what is past its time; return when nothing has been live or asked for during ``idle_s``."""
    last_use_s = time.monotonic()
    while True:
        node.changed.clear()
        next_end_s = await node.reap()
        now_s = time.monotonic()
        if node.counts().live or node.pools.any or busy():
            last_use_s = now_s
        elif now_s - last_use_s >= idle_s:
            return
        wait_s = min(next_end_s or 60.0, max(0.05, idle_s - (now_s - last_use_s)), 1.0 if busy() else 60.0)
        try:
            async with asyncio.timeout(wait_s):
                await node.changed.wait()
        except TimeoutError:
            continue


def _log_to(path: Path) -> None:
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=MAX_LOG_BYTES, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def main(argv: list[str] | None = None) -> int:
    """Run the node of one home; 75 when another one runs already."""
    parser = argparse.ArgumentParser(prog="aenv_run.node", description="the node process of one AENV_HOME")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--repository", default=None, help="URL or path; default: the home's own")
    parser.add_argument("--driver", default="auto")
    parser.add_argument("--idle", type=float, default=DEFAULT_IDLE_S, help="seconds without anything live")
    options = parser.parse_args(argv)
    home = Home(options.home.absolute())
    os.umask(0o077)
    home.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = lock_of(home)
    deadline_s = time.monotonic() + HANDOVER_S
    while not lock.acquire():
        if time.monotonic() > deadline_s:
            sys.stderr.write("another node of this home runs already\n")
            return 75
        time.sleep(0.05)
    _log_to(home.node_log)
    # uvicorn ends orderly on these and then raises them again, which would end us before we cleaned up.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    try:
        asyncio.run(
            serve(home, repository_url=options.repository, driver_name=options.driver, idle_s=options.idle)
        )
    finally:
        lock.release()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
