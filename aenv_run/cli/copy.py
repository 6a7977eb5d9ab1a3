"""cp: files and directories between this host and a sandbox."""

from __future__ import annotations

import asyncio
import posixpath
import shutil
import tarfile
import tempfile
from pathlib import Path

import click

from aenv_run.cli.arguments import open_sandbox, run_async
from aenv_run.cli.output import spinner
from aenv_run.errors import Conflict, InvalidInput, NotFound
from aenv_run.guest import Guest
from aenv_run.guest.values import EntryType
from aenv_run.untar import extract


@click.command(
    "cp",
    epilog="\b\nExamples:\n  aenv cp ./project s4f:/srv/           (a directory into /srv)\n"
    "  aenv cp fix.patch s4f:/tmp/fix.patch\n  aenv cp s4f:/srv/project/report.xml .",
)
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option("-u", "--user", help="Who owns what is copied in, and reads what is copied out.")
def copy(source: str, destination: str, user: str | None) -> None:
    """Copy SRC to DST; one of them is ID:PATH. Directories are copied whole.

    Into a DST that is a directory, or ends with /, it keeps its name. Links out of a copied tree, devices and
    sockets are left out on the way out.
    """
    inside, outside = _split(source), _split(destination)
    if (inside is None) == (outside is None):
        raise InvalidInput("exactly one of SRC and DST must be in a sandbox", fix="write it as ID:PATH")

    async def work() -> None:
        sandbox_id, path = inside or outside or ("", "")
        sandbox = await open_sandbox(sandbox_id)
        try:
            if inside is not None:
                await sandbox.call(lambda guest: _copy_out(guest, path, Path(destination), destination, user))
            else:
                await sandbox.call(lambda guest: _copy_in(guest, Path(source), path, user))
        finally:
            await sandbox.close()

    with spinner(f"copying {source}"):
        run_async(work())


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
    with tempfile.TemporaryDirectory(prefix="aenv-cp-") as scratch:
        archive = Path(scratch) / "in.tar"
        await asyncio.to_thread(_pack, source, posixpath.basename(target), archive)
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


async def _copy_out(guest: Guest, path: str, destination: Path, text: str, user: str | None) -> None:
    name = posixpath.basename(posixpath.normpath(path)) or "root"
    target = (
        destination / name if text.endswith("/") or await asyncio.to_thread(destination.is_dir) else destination
    )
    if not await asyncio.to_thread(target.parent.is_dir):
        raise NotFound(f"the directory {target.parent} does not exist")
    scratch = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix=".aenv-cp-", dir=target.parent))
    try:
        archive = scratch / "out.tar"
        with archive.open("wb") as file:
            async for chunk in guest.get_archive(path, user=user):
                await asyncio.to_thread(file.write, chunk)
        left_out = await asyncio.to_thread(extract, archive, scratch / "tree")
        await asyncio.to_thread(_place, scratch / "tree", target)
    finally:
        await asyncio.to_thread(shutil.rmtree, scratch, True)
    if left_out:
        more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
        click.echo(f"left out: {', '.join(left_out[:3])}{more}", err=True)


def _place(tree: Path, target: Path) -> None:
    found = list(tree.iterdir())
    if len(found) != 1:
        raise NotFound("there was nothing to copy (only links that lead elsewhere, devices or sockets)")
    if target.is_dir() and (not found[0].is_dir() or any(target.iterdir())):
        raise Conflict(f"{target} is a directory that exists already", fix="remove it, or copy to another place")
    found[0].rename(target)
