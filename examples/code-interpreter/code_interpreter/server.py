"""The HTTP interface: /health, /execute, /contexts."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from pathlib import Path

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

from code_interpreter.contexts import Contexts, NoContext, NoDirectory
from code_interpreter.kernel import Kernel
from code_interpreter.languages import NoKernel
from code_interpreter.outputs import END

PORT = 49999
#: The sandbox's daemon, which knows the variables that the sandbox was created with.
DAEMON = "http://127.0.0.1:49983"
DAEMON_S = 2.0
MAX_BODY_BYTES = 64 * 1024 * 1024
CONTEXTS = "contexts"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class BadRequest(Exception):
    """A request that is none."""


def make_app(contexts: Contexts) -> web.Application:
    """The interface to these contexts, which end with it."""
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[errors])
    app[CONTEXTS] = contexts
    app.add_routes(
        [
            web.get("/health", health),
            web.post("/execute", execute),
            web.get("/contexts", list_contexts),
            web.post("/contexts", create_context),
            web.delete("/contexts/{id}", remove_context),
            web.post("/contexts/{id}/restart", restart_context),
        ]
    )
    app.on_cleanup.append(close)
    return app


async def close(app: web.Application) -> None:
    """End all kernels."""
    await app[CONTEXTS].close()


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The clients show the text of an answer as it is."""
    try:
        return await handler(request)
    except (BadRequest, NoKernel, NoDirectory) as error:
        return web.Response(status=400, text=str(error))
    except NoContext as error:
        return web.Response(status=404, text=str(error))


async def health(request: web.Request) -> web.Response:
    """It answers, so the default context is there."""
    return web.json_response("OK")


async def execute(request: web.Request) -> web.StreamResponse:
    """Run a cell; one JSON object a line, as they come. A client that goes away interrupts it."""
    body = await read(request)
    code, variables = body.get("code"), body.get("env_vars") or {}
    if not isinstance(code, str):
        raise BadRequest("code must be text")
    if not is_text(code):
        raise BadRequest("code has half of a surrogate pair, which is no text")
    if not isinstance(variables, dict) or not all(map(is_variable, variables.items())):
        raise BadRequest("env_vars must map names to texts, as the environment of a process can hold them")
    context_id, language = text(body, "context_id"), text(body, "language")
    if context_id and language:
        raise BadRequest("Only one of context_id or language can be provided")
    contexts = contexts_of(request)
    kernel = contexts.get(context_id) if context_id else await contexts.default(language)
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    sandbox_variables = await daemon_variables(request.headers.get("X-Access-Token"))
    with suppress(ConnectionError):
        async with aclosing(kernel.execute(code, sandbox_variables, variables)) as lines:
            await send(request, response, lines)
    return response


def is_variable(pair: tuple[str, object]) -> bool:
    """Whether a process can have it in its environment."""
    name, value = pair
    return (
        isinstance(value, str)
        and bool(name)
        and not set("=\0") & set(name)
        and "\0" not in value
        and is_text(name + value)
    )


def is_text(value: str) -> bool:
    """JSON may escape half of a surrogate pair, which UTF-8 does not have."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


async def send(request: web.Request, response: web.StreamResponse, lines: AsyncIterator[object]) -> None:
    """Until the cell or the client ends."""
    async for line in lines:
        if request.transport is None or request.transport.is_closing():
            return
        if line is not None:
            await response.write(json.dumps(line, default=str).encode() + b"\n")
    await response.write(json.dumps(END).encode() + b"\n")
    await response.write_eof()


async def daemon_variables(token: str | None) -> Mapping[str, str]:
    """What the sandbox was created with; nothing for a caller that may not know it."""
    try:
        async with ClientSession(
            connector=TCPConnector(force_close=True), timeout=ClientTimeout(total=DAEMON_S)
        ) as session:
            headers = {"X-Access-Token": token} if token else {}
            async with session.get(f"{DAEMON}/envs", headers=headers) as answer:
                known = await answer.json() if answer.status == 200 else {}
    except (ClientError, TimeoutError, ValueError):
        return {}
    return {str(name): str(value) for name, value in known.items()} if isinstance(known, dict) else {}


async def list_contexts(request: web.Request) -> web.Response:
    """All, the default ones too."""
    return web.json_response([shown(kernel) for kernel in contexts_of(request).all()])


async def create_context(request: web.Request) -> web.Response:
    """A kernel of its own."""
    body = await read(request)
    return web.json_response(shown(await contexts_of(request).create(text(body, "language"), text(body, "cwd"))))


async def remove_context(request: web.Request) -> web.Response:
    """End a kernel."""
    await contexts_of(request).remove(request.match_info["id"])
    return web.Response(status=204)


async def restart_context(request: web.Request) -> web.Response:
    """Forget the state of a kernel."""
    await contexts_of(request).get(request.match_info["id"]).restart()
    return web.Response(status=204)


def contexts_of(request: web.Request) -> Contexts:
    """Those of this process."""
    contexts = request.app[CONTEXTS]
    assert isinstance(contexts, Contexts)
    return contexts


def shown(kernel: Kernel) -> dict[str, str]:
    """A context, as clients know it."""
    return {"id": kernel.id, "language": kernel.language, "cwd": kernel.cwd}


async def read(request: web.Request) -> dict[str, object]:
    """The body: a JSON object, or nothing."""
    try:
        body = json.loads(await request.read() or b"{}")
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def text(body: Mapping[str, object], name: str) -> str | None:
    """A field that is text or absent."""
    value = body.get(name)
    if value is None or isinstance(value, str):
        return value or None
    raise BadRequest(f"{name} must be text")


async def serving() -> web.Application:
    """The app, once its default context takes cells."""
    contexts = Contexts(Path(os.environ.get("CODE_INTERPRETER_CWD") or Path.home()))
    await contexts.default()
    return make_app(contexts)
