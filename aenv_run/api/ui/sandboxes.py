"""Pages of sandboxes: the list, one with its terminal and log, and what can be done with it."""

from __future__ import annotations

import re

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from aenv_run.api.ui.page import Pages
from aenv_run.api.ui.terminal import serve_terminal
from aenv_run.api.ui.told import log_lines, memory_used_bytes
from aenv_run.api.ui.views import sandbox_facts, sandbox_row
from aenv_run.errors import NotFound
from aenv_run.lifecycle import State
from aenv_run.node_wire import ForkRequest, PauseRequest, ResumeRequest, SandboxInfo
from aenv_run.types import SandboxId

#: By state: action, words, and what is asked before it.
_ACTIONS = {
    State.RUNNING: (
        ("pause", "Pause", ""),
        ("fork", "Fork", ""),
        ("kill", "Kill", "Kill this sandbox? What is in it is lost."),
    ),
    State.PAUSED: (("resume", "Resume", ""), ("kill", "Kill", "Kill this sandbox? What is in it is lost.")),
}
_ELSE = (("kill", "Remove", "Remove this sandbox?"),)


def routes(pages: Pages) -> list[BaseRoute]:
    """Those below ``/ui``."""
    own = _Sandboxes(pages)
    return [
        Route("/sandboxes", own.list),
        Route("/sandboxes/{id}", own.one),
        Route("/sandboxes/{id}/log", own.log),
        Route("/sandboxes/{id}/{action:str}", own.act, methods=["POST"]),
        WebSocketRoute("/sandboxes/{id}/terminal", own.terminal),
    ]


class _Sandboxes:
    def __init__(self, pages: Pages) -> None:
        self._pages, self._server = pages, pages.server
        self._node = pages.server.node

    async def list(self, request: Request) -> Response:
        """All of the node, the newest first."""
        found = sorted(await self._node.list(), key=lambda info: info.created_at_s, reverse=True)
        used = await memory_used_bytes(self._server, found)
        rows = [sandbox_row(info, used.get(info.sandbox_id)) for info in found]
        return self._pages.page(request, "sandboxes.html", "sandboxes_table.html", sandboxes=rows)

    async def one(self, request: Request) -> Response:
        """Its facts, a terminal while it runs, its log."""
        info = await self._find(request)
        used = (await memory_used_bytes(self._server, [info])).get(info.sandbox_id)
        return self._pages.page(
            request,
            "sandbox.html",
            "sandbox_facts.html",
            one=sandbox_row(info, used),
            facts=sandbox_facts(info, used),
            actions=_ACTIONS.get(info.state, _ELSE),
            lines=await log_lines(self._server, info),
        )

    async def log(self, request: Request) -> Response:
        """Its last lines."""
        lines = await log_lines(self._server, await self._find(request))
        return self._pages.bare(request, "log.html", lines=lines)

    async def act(self, request: Request) -> Response:
        """A button was pressed."""
        info, action = await self._find(request), request.path_params["action"]
        after = f"/ui/sandboxes/{info.sandbox_id}"
        if action == "pause":
            await self._node.pause(info.sandbox_id, PauseRequest())
        elif action == "resume":
            await self._node.resume(info.sandbox_id, ResumeRequest())
        elif action == "fork":
            reply = await self._node.fork(info.sandbox_id, ForkRequest())
            child = reply.children[0]
            if child.error is not None:
                raise child.error.error()
            after = "/ui/sandboxes" if child.sandbox is None else f"/ui/sandboxes/{child.sandbox.sandbox_id}"
        elif action == "kill":
            await self._node.kill(info.sandbox_id)
            after = "/ui/sandboxes"
        else:
            raise HTTPException(404, "there is no such action")
        return RedirectResponse(after, 303)

    async def terminal(self, socket: WebSocket) -> None:
        """A login shell in the browser."""
        info = await self._find(socket)
        await socket.accept()
        if info.address is None:
            await socket.close(1008, f"the sandbox is {info.state.value}")
            return
        columns, rows = (
            _number(socket.query_params.get(name), default) for name, default in (("columns", 80), ("rows", 24))
        )
        guest = self._server.guests(info.address.endpoint, info.access_token)
        try:
            await serve_terminal(socket, guest, columns, rows)
        finally:
            await guest.aclose()

    async def _find(self, request: Request | WebSocket) -> SandboxInfo:
        id = request.path_params["id"]
        if not re.fullmatch(SandboxId.pattern, id):
            raise NotFound("there is no such sandbox")
        return await self._node.get(id)


def _number(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 5 else default
