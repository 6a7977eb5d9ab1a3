"""start, ls, pause, resume, fork, timeout, rm."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack

import click

from aenv_run.amounts import age, duration
from aenv_run.cli.arguments import (
    complete_sandbox,
    complete_snapshot,
    node_client,
    open_sandbox,
    pairs,
    parse_duration,
    published_port,
    require_signature_option,
    sandbox_argument,
)
from aenv_run.cli.output import json_option, print_json, print_table, spinner
from aenv_run.cli.signals import run_async
from aenv_run.errors import AenvError, InvalidInput, NotFound
from aenv_run.lifecycle import State
from aenv_run.node_wire import (
    CreateRequest,
    ForkEntry,
    ForkRequest,
    PauseRequest,
    ResetRequest,
    ResumeRequest,
    SandboxInfo,
    TimeoutRequest,
)
from aenv_run.printable import printable, printable_lines

ttl_option = click.option(
    "--ttl", default="5m", show_default=True, metavar="TIME", help="How long it may live: 300, 90s, 5m, 2h."
)


@click.command(epilog="\b\nExamples:\n  aenv start swe-task\n  aenv start swe-task:3 --ttl 1h --env SEED=7 --json")
@click.argument("snapshot", shell_complete=complete_snapshot)
@ttl_option
@click.option("--pause-on-ttl", is_flag=True, help="When its time is over, pause it instead of killing it.")
@click.option("-e", "--env", multiple=True, metavar="NAME=VALUE", help="Set for every command in it.")
@click.option(
    "--metadata", multiple=True, metavar="NAME=VALUE", help="Kept with it and shown by `aenv ls --json`."
)
@click.option("--cold", is_flag=True, help="Ignore the snapshot's memory: boot from its disk.")
@click.option("--no-hooks", is_flag=True, help="Do not run what the snapshot has for restored guests.")
@click.option("--memory", type=int, metavar="MIB", help="Another size than the snapshot's; with --cold only.")
@click.option("--cpus", type=int, help="Another number than the snapshot's; with --cold only.")
@click.option(
    "--internet/--no-internet", default=None, help="Reach public addresses. Default: where each has its network."
)
@click.option("--allow", multiple=True, metavar="CIDR|DOMAIN", help="Let it reach this, and nothing else.")
@click.option("--deny", multiple=True, metavar="CIDR|DOMAIN", help="Not this; stronger than --allow.")
@click.option("--publish", multiple=True, metavar="unix:PATH:PORT", help="Its PORT as a unix socket of this host.")
@click.option("--max-seconds", type=float, metavar="SECONDS", help="It ends after so long with a machine.")
@require_signature_option
@json_option
def start(
    snapshot: str,
    ttl: str,
    pause_on_ttl: bool,
    env: tuple[str, ...],
    metadata: tuple[str, ...],
    cold: bool,
    no_hooks: bool,
    memory: int | None,
    cpus: int | None,
    internet: bool | None,
    allow: tuple[str, ...],
    deny: tuple[str, ...],
    publish: tuple[str, ...],
    max_seconds: float | None,
    as_json: bool,
) -> None:
    """Launch a sandbox from SNAPSHOT: a name, name:version, name:tag or snapshot id. Prints its id."""
    request = CreateRequest(
        snapshot=snapshot,
        timeout_s=parse_duration(ttl),
        on_timeout="pause" if pause_on_ttl else "kill",
        env=pairs(env, "--env"),
        metadata=pairs(metadata, "--metadata"),
        cold=cold,
        hooks=not no_hooks,
        memory_mib=memory,
        cpus=cpus,
        internet=internet,
        allow=allow,
        deny=deny,
        publish=tuple(map(published_port, publish)),
        max_seconds=max_seconds,
    )
    started_s = time.monotonic()
    with spinner(f"launching {snapshot}"):
        info = run_async(node_client().create(request))
    if as_json:
        print_json(info)
        return
    click.echo(info.sandbox_id)
    without = (
        "; without internet (`aenv doctor` says why)" if internet is None and not info.network.internet else ""
    )
    click.echo(
        f"{info.origin} from {info.reference} on {info.driver} ({info.mode}) in "
        f"{(time.monotonic() - started_s) * 1000:.0f} ms; lives for {duration(request.timeout_s)}{without}",
        err=True,
    )


@click.command("ls", epilog="\b\nExamples:\n  aenv ls\n  aenv ls -a --json")
@click.option("-a", "--all", "everything", is_flag=True, help="Dead ones too, with the reason.")
@json_option
def list_sandboxes(everything: bool, as_json: bool) -> None:
    """List sandboxes: those that run and those that are paused."""
    infos = run_async(_list_without_starting())
    shown = [info for info in infos if everything or info.state is not State.DEAD]
    if as_json:
        print_json(shown)
        return
    columns = ["ID", "SNAPSHOT", "STATE", "AGE", "ENDS IN", "PARENT"]
    rows = [
        [
            info.sandbox_id,
            info.reference,
            info.state.value,
            age(info.created_at_s),
            _ends_in(info),
            info.parent or "",
            *([info.reason] if everything else []),
        ]
        for info in shown
    ]
    print_table(columns + (["REASON"] if everything else []), rows, empty="no sandboxes (`aenv start SNAPSHOT`)")
    for info in shown:
        for warning in info.warnings:
            click.echo(f"warning: {info.sandbox_id}: {warning.code}: {printable(warning.message)}", err=True)


async def _list_without_starting() -> list[SandboxInfo]:
    """Without any sandbox on disk there is no reason to start a node."""
    client = node_client()
    sandboxes = client.home.sandboxes
    if client.server is not None:
        return await client.list()
    if not sandboxes.is_dir() or not any(sandboxes.iterdir()):
        return []
    return await client.list()


def _ends_in(info: SandboxInfo) -> str:
    if info.expires_at_s is None:
        return "-"
    return duration(info.expires_at_s - time.time())


@click.command(epilog="\b\nExample:\n  aenv pause s4f")
@sandbox_argument
@click.option("--no-hooks", is_flag=True, help="Do not run its on_pause this time.")
def pause(sandbox_id: str, no_hooks: bool) -> None:
    """Keep memory and disk in files and end the machine. Its time to live stops counting."""
    with spinner("pausing"):
        info = run_async(node_client().pause(sandbox_id, PauseRequest(hooks=not no_hooks)))
    click.echo(info.sandbox_id)


@click.command(epilog="\b\nExample:\n  aenv resume s4f --ttl 1h")
@sandbox_argument
@ttl_option
@click.option("--cold", is_flag=True, help="Boot from its disk; what was in memory is lost.")
@click.option("--no-hooks", is_flag=True, help="Do not run its hooks this time.")
def resume(sandbox_id: str, ttl: str, cold: bool, no_hooks: bool) -> None:
    """Go on where `aenv pause` stopped."""
    request = ResumeRequest(timeout_s=parse_duration(ttl), cold=cold, hooks=not no_hooks)
    with spinner("resuming"):
        info = run_async(node_client().resume(sandbox_id, request))
    click.echo(info.sandbox_id)


@click.command(epilog="\b\nExample:\n  aenv reset s4f")
@sandbox_argument
@ttl_option
def reset(sandbox_id: str, ttl: str) -> None:
    """Begin again from the snapshot that it was started from, with the same settings. Prints the new id.

    The sandbox is killed; with a pool of the snapshot (`aenv pool`) the new one stands ready.
    """
    with spinner("resetting"):
        info = run_async(node_client().reset(sandbox_id, ResetRequest(timeout_s=parse_duration(ttl))))
    click.echo(info.sandbox_id)


@click.command(epilog="\b\nExample:\n  aenv fork s4f -n 4 --json")
@sandbox_argument
@click.option("-n", "--count", type=click.IntRange(1, 64), default=1, show_default=True, help="How many copies.")
@ttl_option
@json_option
def fork(sandbox_id: str, count: int, ttl: str, as_json: bool) -> int:
    """Copy a running sandbox, memory and disk, COUNT times. Prints each copy's id as soon as it is ready."""
    request = ForkRequest(count=count, timeout_s=parse_duration(ttl))
    entries = run_async(_fork_each(sandbox_id, request, show=not as_json))
    if as_json:
        print_json(entries)
    failed = [entry.error for entry in entries if entry.error]
    return failed[0].error().exit_code if failed else 0


async def _fork_each(sandbox_id: str, request: ForkRequest, *, show: bool) -> list[ForkEntry]:
    """The entries by index. With ``show`` each is printed when it comes; no spinner may run then."""
    entries: list[ForkEntry] = []
    with ExitStack() as waiting:
        waiting.enter_context(spinner(f"forking into {request.count}"))
        async for line in node_client().fork_each(sandbox_id, request):
            if not isinstance(line, ForkEntry):
                continue
            entries.append(line)
            if show:
                waiting.close()
                _print_child(line)
    return sorted(entries, key=lambda entry: entry.index)


def _print_child(entry: ForkEntry) -> None:
    if entry.sandbox is not None:
        click.echo(entry.sandbox.sandbox_id)
    elif entry.error is not None:
        click.echo(f"error: a copy failed: {printable_lines(entry.error.message)}", err=True)


@click.command(epilog="\b\nExample:\n  aenv timeout s4f 1h")
@sandbox_argument
@click.argument("ttl", metavar="TIME")
def timeout(sandbox_id: str, ttl: str) -> None:
    """Let a running sandbox live TIME (300, 90s, 5m, 2h) from now on."""
    run_async(node_client().set_timeout(sandbox_id, TimeoutRequest(timeout_s=parse_duration(ttl))))


@click.command("rm", epilog="\b\nExamples:\n  aenv rm s4f s9k\n  aenv rm --all")
@click.argument("sandbox_ids", nargs=-1, metavar="ID...", shell_complete=complete_sandbox)
@click.option("--all", "everything", is_flag=True, help="Every sandbox: running, paused and dead.")
def remove(sandbox_ids: tuple[str, ...], everything: bool) -> int:
    """Kill and remove sandboxes. Their snapshots stay. Prints the ids of those removed."""
    if bool(sandbox_ids) == everything:
        raise InvalidInput("say which sandboxes to remove", fix="give ids, or --all")
    with spinner("removing"):
        return run_async(_remove_all(sandbox_ids, everything))


async def _remove_all(sandbox_ids: tuple[str, ...], everything: bool) -> int:
    ids = tuple(str(info.sandbox_id) for info in await _list_without_starting()) if everything else sandbox_ids
    results = await asyncio.gather(*(_remove_one(sandbox_id) for sandbox_id in ids))
    code = 0
    for result in results:
        if isinstance(result, AenvError):
            if everything and isinstance(result, NotFound):
                continue  # its time was over just now
            click.echo(f"error: {printable_lines(result.message)}", err=True)
            code = code or result.exit_code
        else:
            click.echo(result)
    return code


async def _remove_one(sandbox_id: str) -> str | AenvError:
    try:
        sandbox = await open_sandbox(sandbox_id)
        await sandbox.kill()
    except AenvError as error:
        return error
    return sandbox.sandbox_id
