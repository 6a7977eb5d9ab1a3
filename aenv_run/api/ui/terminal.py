"""A sandbox's terminal in the browser: its keys go in, the lines of its screen that changed come out."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

from pydantic import Field, ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect

from aenv_run.api.ui.screen import MAX_COLUMNS, MAX_ROWS, Screen
from aenv_run.errors import AenvError
from aenv_run.guest import Command, Ended, Guest, Process, PtySize
from aenv_run.guest.shell import find_shell
from aenv_run.types import Model

#: Pictures a second at most: what a fast program writes in between is never sent.
_PICTURE_S = 1 / 20
_FEED_BYTES = 8192
MAX_KEYS = 64 * 1024
#: Close codes of RFC 6455.
_NORMAL, _UNSUPPORTED, _INTERNAL = 1000, 1003, 1011


class FromPage(Model):
    """What the page says: keys that were pressed, or another size of the window."""

    keys: str | None = Field(None, max_length=MAX_KEYS)
    columns: int | None = Field(None, ge=1, le=MAX_COLUMNS)
    rows: int | None = Field(None, ge=1, le=MAX_ROWS)


async def serve_terminal(socket: WebSocket, guest: Guest, columns: int, rows: int) -> None:
    """Run a login shell until it ends or the page is left, which kills it. The socket is accepted already."""
    screen = Screen(columns, rows)
    changed = asyncio.Event()
    try:
        shell = await find_shell(guest)
        command = Command(shell, env={"TERM": "linux"}, pty=PtySize(columns, rows))
        async with guest.start(command) as process:
            parts = [
                asyncio.create_task(_read(process, screen, changed)),
                asyncio.create_task(_draw(socket, screen, changed)),
                asyncio.create_task(_type(socket, process, screen, changed)),
            ]
            try:
                done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
                for part in done:
                    part.result()
                await _send(socket, screen)
                await _close(socket, _NORMAL, "the shell has ended")
            finally:
                for part in parts:
                    part.cancel()
                await asyncio.gather(*parts, return_exceptions=True)
                with suppress(AenvError, TimeoutError):
                    await asyncio.wait_for(process.kill(), 5)
    except WebSocketDisconnect:
        return
    except ValidationError:
        await _close(socket, _UNSUPPORTED, "the page said what the server does not understand")
    except AenvError as error:
        await _close(socket, _INTERNAL, error.message)


async def _read(process: Process, screen: Screen, changed: asyncio.Event) -> None:
    async for event in process.events():
        if isinstance(event, Ended):
            return
        for at in range(0, len(event.data), _FEED_BYTES):
            screen.feed(event.data[at : at + _FEED_BYTES])
            changed.set()
            await asyncio.sleep(0)  # a program that writes without end holds up nobody else


async def _draw(socket: WebSocket, screen: Screen, changed: asyncio.Event) -> None:
    while True:
        await changed.wait()
        changed.clear()
        await _send(socket, screen)
        await asyncio.sleep(_PICTURE_S)


async def _send(socket: WebSocket, screen: Screen) -> None:
    await socket.send_text(json.dumps(screen.changes(), ensure_ascii=False))


async def _type(socket: WebSocket, process: Process, screen: Screen, changed: asyncio.Event) -> None:
    while True:
        said = FromPage.model_validate_json(await socket.receive_text())
        with suppress(AenvError):  # it ended just now: its last event says so
            if said.keys is not None:
                await process.send_input(said.keys.encode())
            elif said.columns is not None and said.rows is not None:
                screen.resize(said.columns, said.rows)
                await process.resize(said.columns, said.rows)
                changed.set()


async def _close(socket: WebSocket, code: int, reason: str) -> None:
    with suppress(RuntimeError, WebSocketDisconnect):  # it is closed already
        await socket.close(code, reason.encode()[:120].decode(errors="ignore"))
