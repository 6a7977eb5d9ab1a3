"""Archives of a COPY: what a client packed of its folder becomes the tar of what goes to the target.

They are untrusted: each member is looked at before anything is written, nothing is unpacked on this host but a
single plain file, and the sandbox unpacks the rest in itself.
"""

from __future__ import annotations

import gzip
import posixpath
import re
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, cast

from aenv_run.errors import InvalidInput, ProtocolError
from aenv_run.untar import Limit, guarded, members


@dataclass(frozen=True)
class Packed:
    """What a recipe copies: a plain file, or a tar to be unpacked in the target."""

    path: Path
    is_file: bool


def repack(archive: Path, source: str, target: Path, limit: Limit) -> Packed:
    """Blocking: of ``archive``, whose names are relative to the context, what ``source`` names, below ``target``.

    ``source`` may be a file, a directory, ``.`` or a pattern. ``InvalidInput`` for an archive that is none or has
    what no COPY takes; ``TooLarge`` past the limit.
    """
    pattern = _clean(source)
    try:
        with guarded():
            roots = _roots(archive, pattern, limit)
            if not roots:
                raise InvalidInput(f"the archive of COPY {source[:200]} has nothing of that name")
            target.mkdir(mode=0o700, parents=True)
            if list(roots.values()) == ["file"]:
                return _one_file(archive, next(iter(roots)), target, limit)
            return _tar(archive, pattern, roots, target / "files.tar", limit)
    except ProtocolError as error:
        reason = error.message.removeprefix("the sandbox sent an archive ")
        raise InvalidInput(f"the archive of COPY {source[:200]} is refused: {reason}") from error


@contextmanager
def _open(archive: Path) -> Iterator[BinaryIO]:
    with archive.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if packed:
            with gzip.open(file) as stream:
                yield cast("BinaryIO", stream)
        else:
            yield file


def _clean(name: str) -> str:
    clean = posixpath.normpath("/" + name).lstrip("/")
    if ".." in name.split("/") or "\0" in name:
        raise InvalidInput(f"COPY {name[:200]}: '..' leads out of the context")
    return clean


def _name(member: tarfile.TarInfo) -> str:
    if member.name.startswith("/") or ".." in member.name.split("/"):
        raise InvalidInput(f"the archive has the entry {member.name[:200]!r}, which is outside of the context")
    clean = posixpath.normpath(member.name)
    return "" if clean == "." else clean


def _root(name: str, pattern: str) -> str | None:
    """The path that the pattern matches, if ``name`` is it or below it; "" is the whole context."""
    if not pattern:
        return ""
    wanted, parts = pattern.split("/"), name.split("/")
    head = parts[: len(wanted)]
    if len(head) < len(wanted) or not all(fnmatchcase(part, one) for part, one in zip(head, wanted, strict=True)):
        return None
    return "/".join(head)


def _roots(archive: Path, pattern: str, limit: Limit) -> dict[str, str]:
    """Each thing that the pattern matches: ``file``, ``link`` or ``directory``."""
    roots: dict[str, str] = {}
    with _open(archive) as stream:
        for _, member in members(stream, Limit(limit.max_bytes, limit.what, limit.fix)):
            name = _name(member)
            if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                raise InvalidInput(f"the archive has {name[:200]!r}, which is no file, directory or link")
            root = _root(name, pattern)
            if root is None:
                continue
            kind = "directory" if member.isdir() or name != root else "file" if member.isreg() else "link"
            roots[root] = "directory" if roots.get(root) == "directory" else kind
    return roots


def _one_file(archive: Path, root: str, target: Path, limit: Limit) -> Packed:
    path = target / (re.sub(r"[^A-Za-z0-9._ +@=,-]", "_", posixpath.basename(root)) or "file")
    if path.name in {".", ".."}:
        path = target / "file"
    with _open(archive) as stream:
        for tar, member in members(stream, limit):
            if _name(member) == root and member.isreg():
                content = tar.extractfile(member)
                assert content is not None
                with content, path.open("wb") as file:
                    shutil.copyfileobj(content, file, 1 << 20)
                path.chmod(0o755 if member.mode & 0o100 else 0o644)
    return Packed(path, is_file=True)


def _tar(archive: Path, pattern: str, roots: dict[str, str], target: Path, limit: Limit) -> Packed:
    def moved(name: str) -> str:
        root = _root(name, pattern)
        if root is None:
            return ""
        return name[len(root) :].lstrip("/") if roots[root] == "directory" else posixpath.basename(root)

    with _open(archive) as stream, tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as out:
        for tar, member in members(stream, limit):
            name = moved(_name(member))
            if not name:
                continue
            plain = tarfile.TarInfo(name)
            plain.type, plain.mode, plain.size = member.type, member.mode & 0o777, member.size
            plain.linkname = member.linkname
            if member.islnk():
                plain.linkname = moved(_clean(member.linkname))
                if not plain.linkname:
                    raise InvalidInput(f"the archive has {name[:200]!r}, a link to what is not copied")
            out.addfile(plain, tar.extractfile(member) if member.isreg() else None)
    return Packed(target, is_file=False)
