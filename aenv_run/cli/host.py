"""Commands that the server runs on its own machine (aenv_run/host_commands.py), seen from a client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

import click
from pydantic import BaseModel, ValidationError

from aenv_run.cli.output import spinner
from aenv_run.credentials import ServerAddress, is_loopback
from aenv_run.errors import NodeUnavailable, ProtocolError
from aenv_run.host_commands import ALIVE_S, MAX_OUTPUT_BYTES, HostLine, HostRequest
from aenv_run.later import later
from aenv_run.printable import printable
from aenv_run.server_link import CALLS, CONNECT_S, error_of, headers, require_ours, unreachable

if TYPE_CHECKING:
    import httpx
else:
    httpx = later("httpx")  # most of these commands are for this machine

M = TypeVar("M", bound=BaseModel)


def flags(**given: object) -> tuple[str, ...]:
    """Options as a server takes them: ``deep=True`` is --deep, ``grace="2h"`` is --grace=2h."""
    named = {
        "--" + name.replace("_", "-"): value
        for name, value in given.items()
        if value is not None and value is not False
    }
    return tuple(name if value is True else f"{name}={value}" for name, value in named.items())


def run_there(
    server: ServerAddress,
    command: tuple[str, ...],
    reply: type[M],
    options: tuple[str, ...] = (),
    arguments: tuple[str, ...] = (),
) -> tuple[M, int]:
    """What the command said there as JSON, and its exit code. What it says meanwhile is said here.

    When it fails without JSON, it has said why: this process then ends with its exit code.
    """
    request = HostRequest(command=command, options=options, arguments=arguments)
    request.argv()  # a wrong one is refused before it is sent
    for line in _lines(server, request):
        if line.says is not None:
            click.echo(printable(line.says), err=True)
        if line.exit_code is not None:
            return _reply(reply, line)
    raise ProtocolError(f"the server at {server.url} did not say how {' '.join(command)} ended")


def _reply(reply: type[M], line: HostLine) -> tuple[M, int]:
    code = line.exit_code or 0
    if not line.output.strip():
        raise click.exceptions.Exit(code or ProtocolError.exit_code)
    try:
        return reply.model_validate_json(line.output), code
    except ValidationError as error:
        raise ProtocolError(
            f"the server sent a malformed {reply.__name__}: {error.error_count()} errors"
        ) from error


def _lines(server: ServerAddress, request: HostRequest) -> Iterator[HostLine]:
    what = " ".join(request.command)
    client = httpx.Client(
        base_url=server.url,
        headers=headers(server) | {"Content-Type": "application/json"},
        timeout=httpx.Timeout(6 * ALIVE_S, connect=CONNECT_S),
        trust_env=not is_loopback(server.url),
        verify=server.url.startswith("https://"),
    )
    body = request.model_dump_json()
    try:
        with (
            spinner(f"{server.url} runs {what}"),
            client,
            client.stream("POST", f"{CALLS}/host", content=body) as response,
        ):
            require_ours(server, response)
            if not response.is_success:
                raise error_of(server, response.status_code, response.read()[:65536])
            for text in _texts(response):
                yield HostLine.model_validate_json(text)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise unreachable(server, error) from error
    except httpx.TransportError as error:
        raise NodeUnavailable(
            f"the server at {server.url} went away while it ran {what} ({error or type(error).__name__})",
            fix="it is interrupted there; run it again",
        ) from error
    except ValidationError as error:
        raise ProtocolError(f"the server at {server.url} sent a malformed line") from error


def _texts(response: httpx.Response) -> Iterator[bytes]:
    rest = bytearray()
    for chunk in response.iter_bytes():
        rest += chunk
        if len(rest) > 2 * MAX_OUTPUT_BYTES:
            raise ProtocolError("the server sent a line of too many bytes")
        if b"\n" in chunk:
            *whole, last = bytes(rest).split(b"\n")
            yield from whole
            rest = bytearray(last)
