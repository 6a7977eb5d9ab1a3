"""Unpack a tar stream that comes from a guest: nothing in it can write outside the target directory.

Files and directories are made first, in a directory that is new and so holds no links; symbolic links are made
last, so nothing is ever written through one. Devices, sockets and fifos are left out, owners are ours.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath

from aenv_run.errors import ProtocolError

MAX_ENTRIES = 1_000_000


def extract(archive: Path, directory: Path) -> list[str]:
    """Blocking: unpack ``archive`` into the new ``directory``; returns the names that were left out."""
    directory.mkdir(mode=0o700)
    left_out: list[str] = []
    links: list[tuple[Path, str]] = []
    modes: list[tuple[Path, int]] = []
    files: set[Path] = set()
    try:
        with tarfile.open(archive, "r:") as tar:
            for number, member in enumerate(tar):
                if number >= MAX_ENTRIES:
                    raise ProtocolError(f"the sandbox sent an archive of more than {MAX_ENTRIES} entries")
                target = directory / _safe(member.name)
                if member.isdir():
                    target.mkdir(parents=True, exist_ok=True)
                    modes.append((target, member.mode & 0o777 | 0o700))
                elif member.isreg():
                    _write(tar, member, target)
                    files.add(target)
                elif member.islnk() and (source := directory / _safe(member.linkname)) in files:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.link(source, target)
                    files.add(target)
                elif member.issym():
                    links.append((target, member.linkname))
                else:
                    left_out.append(member.name)
    except (tarfile.TarError, FileExistsError, NotADirectoryError, IsADirectoryError, EOFError) as error:
        raise ProtocolError(f"the sandbox sent an archive that cannot be unpacked: {error}") from error
    left_out += _make_links(directory, links)
    for path, mode in reversed(modes):
        path.chmod(mode)
    return left_out


def _safe(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ProtocolError(f"the sandbox sent an archive with the entry {name[:200]!r}")
    return path


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    content = tar.extractfile(member)
    assert content is not None
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with content, os.fdopen(descriptor, "wb") as file:
        shutil.copyfileobj(content, file, 1 << 20)
        os.fchmod(descriptor, member.mode & 0o777)


def _make_links(directory: Path, links: list[tuple[Path, str]]) -> list[str]:
    """Those that stay inside the tree; a link to elsewhere would name a file of this host."""
    left_out: list[str] = []
    all_links = {target for target, _ in links}
    for target, to in links:
        below_link = not all_links.isdisjoint(target.parents)
        if below_link or target.exists() or not _stays_inside(directory, target, to, all_links):
            left_out.append(str(target.relative_to(directory)))
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.is_symlink():
            target.symlink_to(to)
    return left_out


def _stays_inside(directory: Path, target: Path, to: str, all_links: set[Path]) -> bool:
    """Follow ``to`` by its parts. It may end at another link, not pass through one: ``..`` is elsewhere there."""
    if to.startswith("/"):
        return False
    here = target.parent
    for part in PurePosixPath(to).parts:
        if here in all_links:
            return False
        here = here.parent if part == ".." else here / part
        if not here.is_relative_to(directory):
            return False
    return True
