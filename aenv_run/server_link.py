"""How requests to a server look, and what its answers mean, for every client of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aenv_run.credentials import ServerAddress, is_loopback
from aenv_run.errors import AenvError, NodeUnavailable, ProtocolError, Unauthenticated, Unsupported, from_wire
from aenv_run.later import later
from aenv_run.printable import printable
from aenv_run.version import VERSION

if TYPE_CHECKING:
    import httpx
else:
    httpx = later("httpx")

VERSION_HEADER = "Aenv-Version"
CALLS = "/aenv/v1"
CONNECT_S = 5.0
DAEMON_PORT = 49983
#: What stands before the calls of a server answers so, and does not say its version.
BEFORE_CALLS = (401, 408, 413, 429)


@dataclass(frozen=True)
class Daemon:
    """A sandbox's daemon as it is reached through a server."""

    url: str
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def far(self) -> bool:
        """Whether the environment's proxies count: never for this machine itself."""
        return not is_loopback(self.url)


def daemon_of(server: ServerAddress, sandbox_id: str) -> Daemon:
    """Which the server finds by these headers; the key has no business there."""
    routing = {"X-Agentenv-Sandbox-Id": str(sandbox_id), "X-Agentenv-Target-Port": str(DAEMON_PORT)}
    return Daemon(server.url, routing)


def headers(server: ServerAddress) -> dict[str, str]:
    """Of every call."""
    return {"X-API-Key": server.api_key, VERSION_HEADER: VERSION, "User-Agent": f"aenv/{VERSION}"}


def compatible(theirs: str, mine: str = VERSION) -> bool:
    """What the two say to each other is the same as long as the first two numbers of the version are."""
    return theirs.split(".")[:2] == mine.split(".")[:2]


def other_version(where: str, theirs: str) -> Unsupported:
    """The error of two that cannot understand each other. ``theirs`` is empty where none is said."""
    shown = printable(theirs)[:40]
    if not shown:
        return Unsupported(
            f"{where} does not say its version of aenv ({VERSION_HEADER})", fix="use aenv's own commands"
        )
    return Unsupported(
        f"{where} runs aenv {shown}, and this is aenv {VERSION}",
        fix=f"install the same version on both sides, such as `pip install 'aenv=={shown}'` here",
    )


def require_ours(server: ServerAddress, response: httpx.Response) -> None:
    """``ProtocolError`` for what no aenv server answered, ``Unsupported`` for one of another version."""
    theirs = response.headers.get(VERSION_HEADER)
    if theirs is not None and not compatible(theirs):
        raise other_version(f"the server at {server.url}", theirs)
    if theirs is not None or response.status_code in BEFORE_CALLS or response.status_code >= 500:
        return
    hint = f" (it leads to {printable(response.headers['location'])[:100]})" if response.is_redirect else ""
    raise ProtocolError(
        f"what answered at {server.url} is no aenv server: {response.status_code}{hint}",
        fix="give the URL of `aenv serve`: `aenv auth URL`",
    )


def error_of(server: ServerAddress, status: int, body: bytes) -> AenvError:
    """The error that an answer carries: as on the server, by its code."""
    if status == 401:
        return Unauthenticated(
            f"the server at {server.url} does not take this API key", fix="`aenv auth`, or set AENV_API_KEY"
        )
    try:
        found = json.loads(body)
        code, message, fix = found.get("error_code") or found["code"], found["message"], found.get("fix") or ""
    except (ValueError, KeyError, TypeError, AttributeError):
        code = None
    if isinstance(code, str) and isinstance(message, str) and isinstance(fix, str):
        return from_wire(code, message[:4000], fix[:1000])
    text = printable(body[:200].decode(errors="replace"))
    return NodeUnavailable(f"the server at {server.url} answered {status}: {text}")


def unreachable(server: ServerAddress, error: Exception) -> NodeUnavailable:
    """Nothing was sent."""
    return NodeUnavailable(
        f"the server at {server.url} cannot be reached: {error or type(error).__name__}",
        fix="look whether `aenv serve` runs there; `aenv auth` names another, --local means this machine",
    )
