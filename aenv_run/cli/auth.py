"""auth."""

from __future__ import annotations

import os
import sys

import click
import httpx

from aenv_run.cli.arguments import server
from aenv_run.cli.output import json_option, print_json
from aenv_run.credentials import (
    DEFAULT_URL,
    KEY_VARIABLE,
    LOCAL_VARIABLES,
    URL_VARIABLE,
    ServerAddress,
    credentials_file,
    forget,
    is_loopback,
    load,
    parse_url,
    save,
)
from aenv_run.errors import AenvError, InvalidInput
from aenv_run.printable import printable
from aenv_run.server_link import CALLS, CONNECT_S, error_of, headers, require_ours, unreachable

EPILOG = """\b
Examples:
  aenv auth
  aenv auth https://aenv.example.org --key-stdin < key
  aenv auth --show
  aenv auth --logout

From then on the other commands are for that server; `aenv --local …`, or AENV_HOME, is this machine. AENV_API_URL
and AENV_API_KEY stand above what is kept. docs/remote.md has all of it, command by command."""


@click.command(epilog=EPILOG)
@click.argument("url", required=False)
@click.option("--key", help="The API key; others can see it in the list of processes, so rather be asked for it.")
@click.option("--key-stdin", is_flag=True, help="Read the key from standard input.")
@click.option("--show", is_flag=True, help="Say which server commands are for, and why. Never the key.")
@click.option("--logout", is_flag=True, help="Forget it: commands are for this machine again.")
@json_option
def auth(url: str | None, key: str | None, key_stdin: bool, show: bool, logout: bool, as_json: bool) -> None:
    """Check a key with the server at URL and keep both for the other commands, in ~/.config/aenv/credentials."""
    if show + logout + (key is not None) + key_stdin > 1 or ((show or logout) and url):
        raise InvalidInput("these options exclude each other", fix="see `aenv auth --help`")
    if show:
        _show(as_json)
    elif logout:
        done = forget()
        if as_json:
            print_json({"removed": done})
        else:
            click.echo("forgotten" if done else "there was nothing to forget", err=True)
    else:
        address = ServerAddress.parse(_url(url), _key(key, key_stdin))
        version = require_key(address)
        path = save(address)
        if address.in_the_open:
            click.echo("warning: the key crosses the network unencrypted; use https", err=True)
        if as_json:
            print_json({"url": address.url, "version": version, "file": str(path)})
        else:
            click.echo(f"commands are now for {address.url} (aenv {printable(version)})", err=True)


def _url(given: str | None) -> str:
    if given is not None:
        return parse_url(given)
    known = os.environ.get(URL_VARIABLE)
    if known or not sys.stdin.isatty():
        return parse_url(known or DEFAULT_URL)
    saved = load()
    asked: str = click.prompt("URL of the server", default=saved.url if saved else DEFAULT_URL, err=True)
    return parse_url(asked)


def _key(given: str | None, from_stdin: bool) -> str:
    if given is not None:
        return given
    if from_stdin:
        return sys.stdin.read(4096).strip()
    if known := os.environ.get(KEY_VARIABLE):
        return known
    if not sys.stdin.isatty():
        raise InvalidInput(
            "the key cannot be asked for here", fix=f"use --key-stdin, or set {KEY_VARIABLE}; it is on the server"
        )
    asked: str = click.prompt("API key", hide_input=True, err=True)
    return asked.strip()


def require_key(address: ServerAddress) -> str:
    """The version of the server, which took the key; ``Unauthenticated`` and others when it is not so."""
    try:
        response = httpx.get(
            f"{address.url}{CALLS}/about",
            headers=headers(address),
            timeout=httpx.Timeout(15.0, connect=CONNECT_S),
            trust_env=not is_loopback(address.url),
            verify=address.url.startswith("https://"),
        )
    except httpx.TransportError as error:
        raise unreachable(address, error) from error
    require_ours(address, response)
    if not response.is_success:
        raise error_of(address, response.status_code, response.content[:65536])
    try:
        return str(response.json()["version"])
    except (ValueError, KeyError, TypeError):
        raise error_of(address, response.status_code, response.content[:200]) from None


def _show(as_json: bool) -> None:
    found = server()
    problem = ""
    if found is not None:
        try:
            require_key(found)
        except AenvError as error:
            problem = error.message
    why = _why(found)
    if as_json:
        print_json({"url": found.url if found else None, "because": why, "problem": problem})
        return
    click.echo(found.url if found else "this machine")
    click.echo(f"because {why}", err=True)
    if problem:
        click.echo(f"warning: {printable(problem)}", err=True)


def _why(found: ServerAddress | None) -> str:
    if found is not None:
        return f"of {URL_VARIABLE}" if os.environ.get(URL_VARIABLE) else f"of {credentials_file()}"
    for name in LOCAL_VARIABLES:
        if os.environ.get(name):
            return f"{name} is set"
    return "of --local" if credentials_file().exists() else "no server was given to `aenv auth`"
