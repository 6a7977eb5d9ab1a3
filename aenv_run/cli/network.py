"""network, port-forward."""

from __future__ import annotations

import asyncio
from functools import partial

import click

from aenv_run.cli.arguments import open_sandbox, sandbox_argument, server
from aenv_run.cli.output import json_option, print_json
from aenv_run.cli.signals import run_async
from aenv_run.errors import InvalidInput
from aenv_run.guest import Guest
from aenv_run.network import NetworkPolicy, PortForward, TcpAddress
from aenv_run.network.forward import PassOn
from aenv_run.sdk_async import AsyncSandbox

FOLLOW_S = 2.0


async def _nothing(guest: Guest) -> None:
    """It runs."""


@click.command(
    epilog="\b\nExamples:\n  aenv network s4f\n  aenv network s4f --no-internet --allow '*.debian.org'\n"
    "  aenv network s4f --internet --allow none"
)
@sandbox_argument
@click.option("--internet/--no-internet", default=None, help="Public addresses, or only what is allowed.")
@click.option("--allow", multiple=True, metavar="CIDR|DOMAIN", help="Then nothing else; `none` empties the list.")
@click.option("--deny", multiple=True, metavar="CIDR|DOMAIN", help="Stronger than allow; `none` empties the list.")
@json_option
def network(
    sandbox_id: str, internet: bool | None, allow: tuple[str, ...], deny: tuple[str, ...], as_json: bool
) -> None:
    """Show what a sandbox may reach, or change it while it runs. A list that is given replaces the one before."""
    policy = run_async(_network(sandbox_id, internet, _entries(allow), _entries(deny)))
    if as_json:
        print_json(policy)
        return
    click.echo(f"internet  {'on' if policy.internet else 'off'}")
    click.echo(f"allow     {' '.join(policy.allow) or '-'}")
    click.echo(f"deny      {' '.join(policy.deny) or '-'}")


def _entries(given: tuple[str, ...]) -> tuple[str, ...] | None:
    if not given:
        return None
    return () if given == ("none",) else given


async def _network(
    sandbox_id: str, internet: bool | None, allow: tuple[str, ...] | None, deny: tuple[str, ...] | None
) -> NetworkPolicy:
    sandbox = await open_sandbox(sandbox_id)
    if internet is None and allow is None and deny is None:
        return (await sandbox.get_info()).network
    return await sandbox.set_network(internet=internet, allow=allow, deny=deny)


@click.command(
    "port-forward", epilog="\b\nExamples:\n  aenv port-forward s4f 8000\n  aenv port-forward s4f 9000:8000"
)
@sandbox_argument
@click.argument("ports", metavar="[LOCAL:]PORT")
def port_forward(sandbox_id: str, ports: str) -> None:
    """Bring a TCP port of a sandbox to 127.0.0.1, until Ctrl-C or the sandbox ends."""
    local, _, remote = ports.rpartition(":")
    run_async(_forward(sandbox_id, _port(local or remote), _port(remote)))


def _port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise InvalidInput(f"{text!r} is no port", fix="write PORT or LOCAL:PORT")
    return int(text)


async def _forward(sandbox_id: str, local: int, remote: int) -> None:
    sandbox = await open_sandbox(sandbox_id)
    async with PortForward(TcpAddress("127.0.0.1", local), await _target(sandbox, remote)) as forward:
        click.echo(f"{forward.address} -> port {remote} of {sandbox.sandbox_id}", err=True)
        while True:  # a resumed sandbox has another address, and its old one may soon be somebody else's
            await asyncio.sleep(FOLLOW_S)
            forward.target = await _target(sandbox, remote)


async def _target(sandbox: AsyncSandbox, port: int) -> TcpAddress | PassOn:
    if (there := server()) is not None:
        await sandbox.get_info()
        await sandbox.call(_nothing)  # or it says why it cannot be reached
        from aenv_run.port_tunnel import pass_through  # and its library

        return partial(pass_through, there, sandbox.sandbox_id, port)
    host, _, number = (await sandbox.get_host(port)).rpartition(":")
    return TcpAddress(host, int(number))
