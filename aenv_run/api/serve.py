"""The process of ``aenv serve``: listens, serves, and stops in order."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
from datetime import UTC, datetime

import uvicorn

from aenv_run.api.app import make_app
from aenv_run.api.proxy.listening import http_protocol
from aenv_run.api.server import Server
from aenv_run.api.settings import Settings
from aenv_run.errors import AenvError, Conflict, from_os
from aenv_run.lifecycle import State
from aenv_run.node_wire import PauseRequest
from aenv_run.printable import printable

log = logging.getLogger(__name__)
#: Pauses at the same time when the server stops.
PAUSES = 4


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and the facts of a request."""

    def format(self, record: logging.LogRecord) -> str:
        """A line."""
        said: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        facts = getattr(record, "facts", None)
        if isinstance(facts, dict):
            said |= facts
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


class TextLines(logging.Formatter):
    """For people. A path may hold any character: none of them ends the line or is obeyed by a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The first line."""
        record.message = printable(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        """A line, and what failed below it."""
        text = super().format(record)
        facts = getattr(record, "facts", None)
        return f"{text} ({facts['duration_ms']} ms, {facts['request_id']})" if isinstance(facts, dict) else text


def log_to_stderr(settings: Settings) -> None:
    """All that the process logs, in the form of the settings."""
    handler = logging.StreamHandler(sys.stderr)
    text = TextLines("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if settings.log_format == "json" else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_is_no_refusal)


def _is_no_refusal(record: logging.LogRecord) -> bool:
    """What uvicorn calls faults: a WebSocket answered with an error instead, a service that broke off."""
    return "returned without completing" not in record.getMessage()


def listen(settings: Settings) -> socket.socket:
    """The listening socket: bound here, so that what is wrong with the address is said before all else."""
    try:
        return socket.create_server(
            (settings.host, settings.port),
            family=socket.AF_INET6 if ":" in settings.host else socket.AF_INET,
            backlog=2048,
        )
    except OSError as error:
        what = f"cannot listen on {settings.host} port {settings.port}"
        if isinstance(error, socket.gaierror):
            raise Conflict(f"{what}: {error.strerror}", fix="give another --host") from error
        raised = from_os(error, what)
        raised.fix = "another process may have it; `--port 0` takes any free one"
        raise raised from error


async def serve(server: Server, listener: socket.socket) -> None:
    """Until SIGTERM or SIGINT; then what runs ends, and sandboxes are kept or paused, as the settings say."""
    settings = server.settings
    config = uvicorn.Config(
        make_app(settings, server),
        ws="websockets-sansio",
        ws_per_message_deflate=False,
        ws_ping_timeout=None,  # who is held back by a slow reader answers none; the kernel finds dead peers
        http=http_protocol(server.proxy, head_s=settings.header_s),
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,  # sandboxes' services send their own
        lifespan="on",
        timeout_graceful_shutdown=max(1, round(settings.grace_s)),
        timeout_keep_alive=65,
    )
    serving = uvicorn.Server(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, serving.handle_exit, number, None)
    try:
        await serving._serve([listener])  # serve() would take the signals, and raise them again at the end
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        listener.close()
    if settings.on_stop == "pause":
        await pause_all(server)


async def pause_all(server: Server) -> None:
    """What runs is paused, memory and all; what cannot be is said, and runs on."""
    health = await server.node.health()
    if health is None:
        return
    turns = asyncio.Semaphore(PAUSES)

    async def pause(sandbox_id: str) -> None:
        async with turns:
            try:
                await server.node.pause(sandbox_id, PauseRequest())
                log.info("paused %s", sandbox_id)
            except AenvError as error:
                log.error("%s runs on: %s", sandbox_id, error)

    infos = await server.node.list()
    await asyncio.gather(*(pause(info.sandbox_id) for info in infos if info.state is State.RUNNING))
