"""A server of stores on the loopback interface: each address below it is a repository of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import APIRouter, FastAPI, Request

from aenv_run.api.node_calls import store
from aenv_run.credentials import ServerAddress
from aenv_run.store.posix import PosixStore

KEY = "k" * 40


class StoreServer:
    """``address`` gives an empty store with each call."""

    def __init__(self, url: str, root: Path) -> None:
        self._url, self.root = url, root
        self._count = 0

    def address(self) -> ServerAddress:
        """Of the next store, which is in ``directory``."""
        self._count += 1
        return ServerAddress.parse(f"{self._url}/p{self._count}", KEY)

    @property
    def directory(self) -> Path:
        """Of the store that was given last."""
        return self.root / f"p{self._count}"


@contextmanager
def store_server(root: Path) -> Iterator[StoreServer]:
    """Serves in a thread until the end."""

    async def place(request: Request) -> store.Place:
        name = request.path_params["place"]
        return store.Place(PosixStore(root / name), str(root / name), root / "staging")

    app = FastAPI()
    below = APIRouter(prefix="/{place}")
    below.include_router(store.router)
    app.include_router(below)
    app.dependency_overrides[store.place] = place
    with serving(app) as url:
        yield StoreServer(url, root)


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The application on a free port of the loopback interface; its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
