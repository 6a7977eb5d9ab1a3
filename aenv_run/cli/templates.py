"""template list, delete, watch, tag; pull."""

from __future__ import annotations

import asyncio
import re
import time
from urllib.parse import quote

import click

from aenv_run.cli.output import json_option, print_json, print_table
from aenv_run.cli.signals import run_async
from aenv_run.cli.template_api import TemplateApi, template_api
from aenv_run.errors import CommandTimeout, NotFound, StepFailed, Unsupported
from aenv_run.printable import printable

POLL_S = 1.0
OVER = ("ready", "error")


@click.group()
def template() -> None:
    """Templates: what sandboxes are made of, by name."""


def _row(found: object) -> dict[str, object]:
    assert isinstance(found, dict)
    return found


@template.command("list", epilog="\b\nExamples:\n  aenv template list\n  aenv template list --json")
@json_option
def list_templates(as_json: bool) -> None:
    """Each template with the state of its newest build."""

    async def listed() -> list[object]:
        async with template_api() as api:
            found = await api.call("GET", "/v2/templates")
            return found if isinstance(found, list) else []

    listing = run_async(listed())
    if as_json:
        print_json(listing)
        return
    rows = [_row(row) for row in listing]
    columns = ("NAME", "TEMPLATE ID", "STATUS", "CPU", "MEM (MiB)", "DISK (MiB)", "UPDATED")
    keys = ("templateID", "buildStatus", "cpuCount", "memoryMB", "diskSizeMB", "updatedAt")
    shown = [(_name(row), *(str(row[key]) for key in keys)) for row in rows]
    print_table(columns, shown, empty="no templates; `aenv pull IMAGE` makes one")


def _name(row: dict[str, object]) -> str:
    names = row.get("names") or row.get("aliases")
    return str(names[0]) if isinstance(names, list) and names else "-"


@template.command(epilog="\b\nExamples:\n  aenv template delete my-env")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def delete(names: tuple[str, ...]) -> None:
    """Delete all versions of a template. Sandboxes that were made of it run on."""

    async def act() -> None:
        async with template_api() as api:
            for name in names:
                await api.call("DELETE", f"/templates/{quote(name, safe='')}")
                click.echo(f"Deleted template {printable(name)}")

    run_async(act())


@template.command(
    epilog="\b\nExamples:\n  aenv template tag my-env:latest stable\n  aenv template tag my-env old --delete"
)
@click.argument("target", metavar="NAME[:TAG]")
@click.argument("tags", metavar="NEW_TAG...", nargs=-1, required=True)
@click.option("--delete", "remove", is_flag=True, help="Remove these tags of NAME instead.")
def tag(target: str, tags: tuple[str, ...], remove: bool) -> None:
    """Move tags to what NAME:TAG is now."""

    async def act() -> None:
        async with template_api() as api:
            if remove:
                await api.call("DELETE", "/templates/tags", {"name": target, "tags": list(tags)})
            else:
                await api.call("POST", "/templates/tags", {"target": target, "tags": list(tags)})

    run_async(act())


@template.command(epilog="\b\nExamples:\n  aenv template watch my-env")
@click.argument("name")
def watch(name: str) -> None:
    """Show a template's newest build until it is over; fails if the build does."""

    async def act() -> None:
        async with template_api() as api:
            id = await api.resolve(name)
            builds = (await api.one("GET", f"/templates/{quote(id, safe='')}", limit=1))["builds"]
            if not isinstance(builds, list) or not builds:
                raise NotFound(f"template {id} has no build")
            await follow(api, id, str(builds[0]["buildID"]), None)

    run_async(act())


async def follow(api: TemplateApi, name: str, build_id: str, timeout_s: float | None) -> None:
    """Show its log until it is over. ``StepFailed`` when it failed, ``CommandTimeout`` when that took too long."""
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    seen = 0
    while True:
        try:
            told = await api.status(name, build_id, seen)
        except NotFound:
            if seen:
                raise
            click.echo("Build succeeded", err=True)  # of a version that was built elsewhere there is no log
            return
        entries = told["logEntries"]
        assert isinstance(entries, list)
        for entry in entries:
            click.echo(printable(str(entry["message"])), err=True)
        seen += len(entries)
        if told["status"] in OVER and not entries:
            break
        if until_s is not None and time.monotonic() > until_s:
            raise CommandTimeout(f"the build of {name} is not over", fix=f"look again: aenv template watch {name}")
        if not entries:
            await asyncio.sleep(POLL_S)
    if told["status"] == "error":
        reason = _row(told.get("reason") or {})
        step = f" (step: {reason['step']})" if reason.get("step") else ""
        raise StepFailed(f"Build failed: {reason.get('message', 'no reason is known')}{step}")
    click.echo(f"Build succeeded: {name}", err=True)


@click.command(
    epilog="\b\nExamples:\n  aenv pull debian:12\n  aenv pull ghcr.io/team/app:3 --start-cmd serve --probe 8080"
)
@click.argument("image")
@click.option("--name", help="Of the template. Default: the last part of the image's name.")
@click.option("--cpu", "--cpu-count", "cpus", type=click.IntRange(1, 64), help="Of its sandboxes.")
@click.option("--mem", "--memory", "--memory-mb", "memory_mb", type=click.IntRange(128), help="In MiB.")
@click.option("--start-cmd", help="Left running in the template.")
@click.option("--ready-cmd", help="What was started is up when this exits with 0.")
@click.option("--probe", type=click.IntRange(1, 65535), metavar="PORT", help="… when this port listens.")
@click.option("-d", "--detach", is_flag=True, help="Do not wait (with a server only).")
@click.option("--timeout", "timeout_s", type=click.FloatRange(1), metavar="SECONDS", help="Wait no longer.")
def pull(
    image: str,
    name: str | None,
    cpus: int | None,
    memory_mb: int | None,
    start_cmd: str | None,
    ready_cmd: str | None,
    probe: int | None,
    detach: bool,
    timeout_s: float | None,
) -> None:
    """Make a template of a container image."""
    if ready_cmd is not None and probe is not None:
        raise click.UsageError("give --ready-cmd or --probe, not both")
    ready = f": >/dev/tcp/127.0.0.1/{probe}" if probe is not None else ready_cmd
    wanted = name or default_name(image)

    async def act() -> None:
        async with template_api() as api:
            if detach and not api.remote:
                raise Unsupported("a build without a server ends with its command", fix="leave out --detach")
            asked = {"name": wanted, "cpuCount": cpus, "memoryMB": memory_mb}
            made = await api.one("POST", "/v3/templates", asked)
            template_id, build_id = str(made["templateID"]), str(made["buildID"])
            click.echo(f"Created template {template_id} (build {build_id})")
            body = {"fromImage": image, "startCmd": start_cmd, "readyCmd": ready}
            await api.call("POST", f"/v2/templates/{quote(template_id, safe='')}/builds/{build_id}", body)
            if detach:
                click.echo(f"Build started.\nWatch with: aenv template watch {template_id}")
                return
            await follow(api, template_id, build_id, timeout_s)

    run_async(act())


def default_name(image: str) -> str:
    """The last part of an image's name, without its tag and digest."""
    last = image.partition("@")[0].rpartition("/")[2].partition(":")[0]
    return re.sub(r"[^a-z0-9._-]+", "-", last.lower()).strip("-._") or "image"
