"""cp: files and directories between this host and a sandbox."""

from __future__ import annotations

import asyncio
import posixpath
import shutil
import tarfile
import tempfile
from pathlib import Path

import click

from aenv_run.cli.arguments import open_sandbox, parse_size
from aenv_run.cli.output import spinner
from aenv_run.cli.signals import run_async
from aenv_run.errors import Conflict, InvalidInput, NotFound
from aenv_run.guest import Guest
from aenv_run.guest.values import EntryType
from aenv_run.printable import printable
from aenv_run.threads import in_thread
from aenv_run.untar import Limit, extract

#: Beside what is copied out, and in $TMPDIR for what is copied in; gone at the end but after a SIGKILL.
SCRATCH = "aenv-cp-"


@click.command(
    "cp",
    epilog="\b\nExamples:\n  aenv cp ./project s4f:/srv/           (a directory into /srv)\n"
    "  aenv cp fix.patch s4f:/tmp/fix.patch\n  aenv cp s4f:/srv/project/report.xml .",
)
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option("-u", "--user", help="Who owns what is copied in, and reads what is copied out.")
@click.option("--max-size", metavar="SIZE", help="Copy out no more than this (default: the size of its disk).")
def copy(source: str, destination: str, user: str | None, max_size: str | None) -> None:
    """Copy SRC to DST; one of them is ID:PATH. Directories are copied whole.

    Into a DST that is a directory, or ends with /, it keeps its name. Links out of a copied tree, devices and
    sockets are left out on the way out.
    """
    inside, outside = _split(source), _split(destination)
    if (inside is None) == (outside is None):
        raise InvalidInput("exactly one of SRC and DST must be in a sandbox", fix="write it as ID:PATH")
    given = parse_size(max_size) if max_size else None

    async def work() -> None:
        sandbox_id, path = inside or outside or ("", "")
        sandbox = await open_sandbox(sandbox_id)
        try:
            if inside is not None:
                disk_bytes = (await sandbox.get_info()).machine.disk_mib << 20
                limit = _limit(given, disk_bytes)
                await sandbox.call(lambda guest: _copy_out(guest, path, destination, user, limit))
            else:
                await sandbox.call(lambda guest: _copy_in(guest, Path(source), path, user))
        finally:
            await sandbox.close()

    with spinner(f"copying {source}"):
        run_async(work())


def _limit(given: int | None, disk_bytes: int) -> Limit:
    """No honest sandbox has more files than fit on its disk, unless they are sparse."""
    what = "--max-size" if given is not None else "the size of the sandbox's disk"
    return Limit(given if given is not None else disk_bytes, what, fix="give a larger --max-size, or copy less")


def _split(text: str) -> tuple[str, str] | None:
    """``ID:PATH``, or None for a path of this host (one with a / before the colon, or without a colon)."""
    sandbox_id, colon, path = text.partition(":")
    if not colon or "/" in sandbox_id or "." in sandbox_id:
        return None
    if not path:
        raise InvalidInput(f"{text!r} has no path", fix=f"write {sandbox_id}:/some/path")
    return sandbox_id, path


async def _copy_in(guest: Guest, source: Path, path: str, user: str | None) -> None:
    if not await asyncio.to_thread(source.exists):
        raise NotFound(f"{source} does not exist")
    name = (await asyncio.to_thread(source.resolve)).name
    target = posixpath.join(path, name) if path.endswith("/") or await _is_directory(guest, path, user) else path
    with tempfile.TemporaryDirectory(prefix=SCRATCH, ignore_cleanup_errors=True) as scratch:
        archive = Path(scratch) / "in.tar"
        await in_thread(_pack, source, posixpath.basename(target), archive)
        await guest.put_archive(posixpath.dirname(target) or ".", archive, user=user)


def _pack(source: Path, name: str, archive: Path) -> None:
    def ours(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member if member.isfile() or member.isdir() or member.issym() or member.islnk() else None

    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(source.resolve(), arcname=name, filter=ours)


async def _is_directory(guest: Guest, path: str, user: str | None) -> bool:
    try:
        entry = await guest.stat(path, user=user)
        if entry.type is EntryType.SYMLINK:
            entry = await guest.stat(posixpath.join(path, "."), user=user)
    except NotFound:
        return False
    return entry.type is EntryType.DIRECTORY


async def _copy_out(guest: Guest, path: str, text: str, user: str | None, limit: Limit) -> None:
    destination = Path(text)
    name = posixpath.basename(posixpath.normpath(path)) or "root"
    into = text.endswith("/") or await asyncio.to_thread(destination.is_dir)
    target = destination / name if into else destination
    if not await asyncio.to_thread(target.parent.is_dir):
        raise NotFound(f"the directory {target.parent} does not exist")
    scratch = Path(await in_thread(tempfile.mkdtemp, prefix=f".{SCRATCH}", dir=target.parent))
    try:
        archive, of_stream = scratch / "out.tar", limit.of_stream()
        with archive.open("wb") as file:
            async for chunk in guest.get_archive(path, user=user):
                of_stream.take(len(chunk))
                await in_thread(file.write, chunk)
        left_out = await in_thread(extract, archive, scratch / "tree", limit)
        await in_thread(_place, scratch / "tree", target)
    finally:
        await in_thread(shutil.rmtree, scratch, True)
    if left_out:
        more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
        click.echo(f"left out: {', '.join(map(printable, left_out[:3]))}{more}", err=True)


def _place(tree: Path, target: Path) -> None:
    found = list(tree.iterdir())
    if len(found) != 1:
        raise NotFound("there was nothing to copy (only links that lead elsewhere, devices or sockets)")
    if target.is_dir() and (not found[0].is_dir() or any(target.iterdir())):
        raise Conflict(f"{target} is a directory that exists already", fix="remove it, or copy to another place")
    if found[0].is_dir() and target.exists() and not target.is_dir():
        raise Conflict(
            f"{target} is no directory, and what is copied is one", fix="remove it, or copy to another place"
        )
    found[0].rename(target)
