"""upload and download: files and whole directories, by the rules that users of AgentENV know.

Content alone crosses: no owners, modes, times or links. `aenv cp` keeps those.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import shutil
import stat
import tarfile
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import click

from aenv_run.amounts import size
from aenv_run.cli.arguments import open_sandbox, sandbox_argument
from aenv_run.cli.output import json_option, print_json, spinner
from aenv_run.cli.signals import run_async
from aenv_run.errors import Conflict, InvalidInput, NotFound, SandboxDead
from aenv_run.guest import Guest
from aenv_run.guest.values import EntryInfo, EntryType
from aenv_run.printable import printable
from aenv_run.threads import in_thread
from aenv_run.types import Model
from aenv_run.untar import Limit, extract

#: Beside what is downloaded; gone at the end but after a SIGKILL.
SCRATCH = ".aenv-download-"
#: A sandbox that sends nothing for so long is given up.
IDLE_S = 60.0


class Transferred(Model):
    """What crossed, and where it is now."""

    files: int
    size_bytes: int
    path: str


@click.command(
    epilog="\b\nExamples:\n  aenv upload s4f ./project /srv/        (a directory into /srv)\n"
    "  aenv upload s4f data.csv /tmp/data.csv --user app"
)
@sandbox_argument
@click.argument("source", metavar="LOCAL", type=click.Path(path_type=Path))
@click.argument("destination", metavar="REMOTE")
@click.option("-u", "--user", help="Who owns the file; not for directories.")
@json_option
def upload(sandbox_id: str, source: Path, destination: str, user: str | None, as_json: bool) -> None:
    """Copy a file or a directory into a sandbox. Hidden files and empty directories too; links are refused.

    Into a REMOTE that is a directory, or ends with /, it keeps its name. A directory's REMOTE is an absolute path.
    """
    tree = Tree.of(source)
    if tree.is_directory and (user is not None or not destination.startswith("/")):
        raise InvalidInput(
            "--user is for single files" if user is not None else f"{destination} is no absolute path",
            fix="a directory is uploaded to an absolute path, as the sandbox's own user",
        )

    async def work() -> Transferred:
        sandbox = await open_sandbox(sandbox_id)
        try:
            target = await sandbox.call(lambda guest: _upload(guest, tree, destination, user))
        finally:
            await sandbox.close()
        return Transferred(files=len(tree.files), size_bytes=tree.size_bytes, path=target)

    with spinner(f"uploading {source}"):
        _say("uploaded", run_async(work()), as_json)


@click.command(
    epilog="\b\nExamples:\n  aenv download s4f /srv/report.xml\n  aenv download s4f /srv/project ./copies/ --force"
)
@sandbox_argument
@click.argument("source", metavar="REMOTE")
@click.argument("destination", metavar="[LOCAL]", required=False)
@click.option("-u", "--user", help="Who reads the file; not for directories.")
@click.option("--force", is_flag=True, help="Replace files that are here already.")
@json_option
def download(
    sandbox_id: str, source: str, destination: str | None, user: str | None, force: bool, as_json: bool
) -> None:
    """Copy a file or a directory out of a sandbox, here or to LOCAL. Links in it are refused.

    Into a LOCAL that is a directory, or ends with /, it keeps its name. Nothing is replaced without --force.
    """

    async def work() -> Transferred:
        sandbox = await open_sandbox(sandbox_id)
        try:
            disk_bytes = (await sandbox.get_info()).machine.disk_mib << 20
            limit = Limit(disk_bytes, "the size of the sandbox's disk", fix="`aenv cp --max-size` takes more")
            return await sandbox.call(lambda guest: _download(guest, source, destination, user, force, limit))
        finally:
            await sandbox.close()

    with spinner(f"downloading {source}"):
        _say("downloaded", run_async(work()), as_json)


def _say(done: str, what: Transferred, as_json: bool) -> None:
    if as_json:
        print_json(what)
    else:
        files = f"{what.files} file" + ("" if what.files == 1 else "s")
        click.echo(f"{done} {files} ({size(what.size_bytes)}) to {printable(what.path)}")


@dataclass(frozen=True)
class Tree:
    """A file of this machine, or a directory with all below it; links and special files are ``InvalidInput``."""

    root: Path
    is_directory: bool
    directories: tuple[Path, ...]
    files: tuple[Path, ...]
    size_bytes: int

    @classmethod
    def of(cls, root: Path) -> Tree:
        """Looks at all of it, so that nothing is sent of what cannot be sent whole."""
        mode, size_bytes = _kind(root)
        if stat.S_ISREG(mode):
            return cls(root, False, (), (root,), size_bytes)
        directories, files = [root], []
        total = 0
        for parent, below, names in os.walk(root):
            for name in below:
                _kind(Path(parent, name))
                directories.append(Path(parent, name))
            for name in names:
                mode, size_bytes = _kind(Path(parent, name))
                files.append(Path(parent, name))
                total += size_bytes
        return cls(root, True, tuple(directories), tuple(files), total)

    def pack(self, name: str, archive: Path) -> None:
        """As a tar file in which it is called ``name``; content alone."""
        directories = set(self.directories)
        with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
            for path in (*self.directories, *self.files):
                member = tarfile.TarInfo(posixpath.join(name, *path.relative_to(self.root).parts))
                if path in directories:
                    member.type, member.mode = tarfile.DIRTYPE, 0o755
                    tar.addfile(member)
                    continue
                with path.open("rb") as file:
                    member.size, member.mode = os.fstat(file.fileno()).st_size, 0o644
                    tar.addfile(member, file)


def _kind(path: Path) -> tuple[int, int]:
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise NotFound(f"{path} does not exist") from None
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise InvalidInput(f"{path} is a link or a special file", fix="leave it out, or use `aenv cp`")
    return found.st_mode, found.st_size


async def _upload(guest: Guest, tree: Tree, path: str, user: str | None) -> str:
    name = tree.root.absolute().name
    into = path.endswith("/") or await _is_directory(guest, path, user)
    target = posixpath.join(path, name) if into else path
    if not tree.is_directory:
        await guest.write_file(target, tree.root, user=user)
        return target
    with tempfile.TemporaryDirectory(prefix="aenv-upload-", ignore_cleanup_errors=True) as scratch:
        archive = Path(scratch) / "in.tar"
        await in_thread(tree.pack, posixpath.basename(target), archive)
        await guest.put_archive(posixpath.dirname(target), archive)
    return target


async def _is_directory(guest: Guest, path: str, user: str | None) -> bool:
    try:
        return (await guest.stat(posixpath.join(path, "."), user=user)).type is EntryType.DIRECTORY
    except (NotFound, InvalidInput):
        return False


async def _download(
    guest: Guest, path: str, text: str | None, user: str | None, force: bool, limit: Limit
) -> Transferred:
    entry = await guest.stat(path, user=user)
    if entry.type not in (EntryType.FILE, EntryType.DIRECTORY):
        raise InvalidInput(f"{path} is a link or a special file", fix="give the path that it leads to")
    if entry.type is EntryType.DIRECTORY and user is not None:
        raise InvalidInput("--user is for single files", fix="a directory is read as the sandbox's own user")
    target = await in_thread(_target, text, posixpath.basename(posixpath.normpath(path)) or "root")
    scratch = Path(await in_thread(tempfile.mkdtemp, prefix=SCRATCH, dir=target.parent))
    try:
        content = await _content(guest, path, entry, user, scratch, limit)
        done = await in_thread(_place, content, target, force)
    finally:
        await in_thread(shutil.rmtree, scratch, True)
    return done.model_copy(update={"path": str(target)})


async def _content(
    guest: Guest, path: str, entry: EntryInfo, user: str | None, scratch: Path, limit: Limit
) -> Path:
    """What comes, whole, in ``scratch``."""
    if entry.type is EntryType.FILE:
        await _save(guest.iter_file(path, user=user), scratch / "file", limit)
        return scratch / "file"
    await _save(guest.get_archive(path), scratch / "out.tar", limit.of_stream())
    left_out = await in_thread(extract, scratch / "out.tar", scratch / "tree", limit)
    (content,) = [*(scratch / "tree").iterdir()] or [scratch / "tree"]
    links = await in_thread(lambda: [one for one in content.rglob("*") if one.is_symlink()])
    for refused in (*left_out, *(str(one.relative_to(content)) for one in links)):
        raise InvalidInput(
            f"{refused} in {path} is a link or a special file", fix="use `aenv cp`, which keeps links"
        )
    return content


async def _save(chunks: AsyncIterator[bytes], path: Path, limit: Limit) -> None:
    with path.open("xb") as file:
        while True:
            try:
                async with asyncio.timeout(IDLE_S):
                    chunk = await anext(chunks, None)
            except TimeoutError:
                raise SandboxDead(f"the sandbox sent nothing for {IDLE_S:g} s", fix="try again") from None
            if chunk is None:
                return
            limit.take(len(chunk))
            await in_thread(file.write, chunk)


def _target(text: str | None, name: str) -> Path:
    given = Path(text) if text else Path.cwd() / name
    target = given / name if text and (text.endswith("/") or given.is_dir()) else given
    if not target.parent.is_dir():
        raise NotFound(f"the directory {target.parent} does not exist", fix="make it first")
    return target


def _place(content: Path, target: Path, force: bool) -> Transferred:
    """Move it to where it belongs; ``Conflict``, and nothing moved, where something is in the way."""
    if content.is_file():
        pairs, directories = [(content, target)], []
    else:
        below = sorted(content.rglob("*"))
        directories = [target, *(target / one.relative_to(content) for one in below if one.is_dir())]
        pairs = [(one, target / one.relative_to(content)) for one in below if not one.is_dir()]
    for place in directories:
        if place.is_symlink() or (place.exists() and not place.is_dir()):
            raise Conflict(f"{place} is here already and is no directory", fix="remove it, or give another LOCAL")
    for _, place in pairs:
        if place.is_dir():
            raise Conflict(f"{place} is a directory that is here already", fix="remove it, or give another LOCAL")
        if not force and (place.exists() or place.is_symlink()):
            raise Conflict(f"{place} is here already", fix="give --force to replace it")
    total = sum(one.stat().st_size for one, _ in pairs)
    for place in directories:
        place.mkdir(exist_ok=True)
    for one, place in pairs:
        one.replace(place)
    return Transferred(files=len(pairs), size_bytes=total, path=str(target))
