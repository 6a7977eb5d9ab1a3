"""What a container shows: each case is the layers of an image, made by hand, and the tree that comes of them.

A tree maps every path to ``d`` (directory), ``f:CONTENT``, ``l:TARGET``, ``p`` (fifo) or ``c:MAJOR:MINOR``.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Entry = tuple[tarfile.TarInfo, bytes]


def entry(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", **fields: object) -> Entry:
    """One entry of an archive; ``fields`` are those of ``tarfile.TarInfo``."""
    member = tarfile.TarInfo(name)
    member.type, member.size = kind, len(data)
    member.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    for field, value in fields.items():
        setattr(member, field, value)
    return member, data


def folder(name: str, **fields: object) -> Entry:
    """A directory."""
    return entry(name, tarfile.DIRTYPE, **fields)


def file(name: str, content: str = "", **fields: object) -> Entry:
    """A file."""
    return entry(name, data=content.encode(), **fields)


def link(name: str, to: str) -> Entry:
    """A symbolic link."""
    return entry(name, tarfile.SYMTYPE, linkname=to)


def hard(name: str, to: str) -> Entry:
    """A hard link."""
    return entry(name, tarfile.LNKTYPE, linkname=to)


def tar_of(*entries: Entry, end: bool = True) -> bytes:
    """The archive of these entries; without ``end``, as some programs write it, without the mark of its end."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member, data in entries:
            tar.addfile(member, io.BytesIO(data))
        size = tar.offset
    return buffer.getvalue() if end else buffer.getvalue()[:size]


def shown(root: Path) -> dict[str, str]:
    """The tree below ``root``."""
    found = {}
    for path in sorted(root.rglob("*")):
        info = path.lstat()
        if stat.S_ISLNK(info.st_mode):
            text = f"l:{path.readlink()}"
        elif stat.S_ISDIR(info.st_mode):
            text = "d"
        elif stat.S_ISFIFO(info.st_mode):
            text = "p"
        elif stat.S_ISCHR(info.st_mode):
            text = f"c:{os.major(info.st_rdev)}:{os.minor(info.st_rdev)}"
        else:
            text = f"f:{path.read_text()}"
        found[str(path.relative_to(root))] = text
    return found


@dataclass(frozen=True)
class Case:
    """Layers, the lowest first, and what a container shows."""

    name: str
    layers: tuple[tuple[Entry, ...], ...]
    tree: Mapping[str, str]


#: What most cases start from.
LOWER = (folder("d"), file("d/a", "1"), file("d/b", "1"), folder("d/s"), file("d/s/x", "1"))
USR = (folder("usr"), folder("usr/lib"), file("usr/lib/a", "1"), link("lib", "usr/lib"))

CASES = (
    Case("whiteout", (LOWER, (file("d/.wh.a"),)), {"d": "d", "d/b": "f:1", "d/s": "d", "d/s/x": "f:1"}),
    Case("whiteout of a directory", (LOWER, (file("d/.wh.s"),)), {"d": "d", "d/a": "f:1", "d/b": "f:1"}),
    Case("whiteout at the top", (LOWER, (file(".wh.d"),)), {}),
    Case("whiteouts of a directory and of what is in it", (LOWER, (file("d/.wh.a"), file(".wh.d"))), {}),
    Case("whiteouts of a directory, then of what is in it", (LOWER, (file(".wh.d"), file("d/.wh.a"))), {}),
    Case("whiteout of what is not there", ((folder("d"),), (file("d/.wh.a"), file("e/.wh.a"))), {"d": "d"}),
    Case("whiteout and the same name after it", (LOWER, (file(".wh.d"), file("d", "2"))), {"d": "f:2"}),
    Case(
        "whiteout after the same name: this layer's stays",
        (LOWER, (folder("d"), folder("d/s"), file("d/s/y", "2"), file("d/.wh.s"))),
        {"d": "d", "d/a": "f:1", "d/b": "f:1", "d/s": "d", "d/s/y": "f:2"},
    ),
    Case("whiteout and no parent entry", (LOWER, (file(".wh.d"), file("d/n", "2"))), {"d": "d", "d/n": "f:2"}),
    Case(
        "whiteout stored as a hard link",
        (LOWER, (hard("d/.wh.a", "d/b"), hard("d/.wh.s", "nowhere"))),
        {"d": "d", "d/b": "f:1"},
    ),
    Case(
        "whiteout of a link: its target stays",
        ((*USR,), (file(".wh.lib"),)),
        {
            "usr": "d",
            "usr/lib": "d",
            "usr/lib/a": "f:1",
        },
    ),
    Case(
        "whiteout below a linked directory",
        (USR, (file("lib/.wh.a"),)),
        {
            "usr": "d",
            "usr/lib": "d",
            "lib": "l:usr/lib",
        },
    ),
    Case(
        "whiteout of a name hidden by a later layer only",
        ((file("a", "1"),), (file("a", "2"),), (file(".wh.a"),)),
        {},
    ),
    Case("a whiteout in the lowest layer", ((file(".wh.a"), file("a", "1")),), {"a": "f:1"}),
    Case(
        "opaque before its siblings",
        (LOWER, (folder("d"), file("d/.wh..wh..opq"), file("d/n", "2"))),
        {
            "d": "d",
            "d/n": "f:2",
        },
    ),
    Case(
        "opaque after its siblings",
        (LOWER, (folder("d"), file("d/n", "2"), file("d/.wh..wh..opq"))),
        {
            "d": "d",
            "d/n": "f:2",
        },
    ),
    Case(
        "opaque after siblings in a directory of both",
        (LOWER, (file("d/s/y", "2"), file("d/a", "2"), file("d/.wh..wh..opq"))),
        {"d": "d", "d/a": "f:2", "d/s": "d", "d/s/y": "f:2"},
    ),
    Case("opaque stored as a hard link", (LOWER, (hard("d/.wh..wh..opq", "d/a"),)), {"d": "d"}),
    Case("opaque root", (LOWER, (file(".wh..wh..opq"), file("n", "2"))), {"n": "f:2"}),
    Case(
        "opaque directory in the place of a link: the target stays",
        (USR, (folder("lib"), file("lib/.wh..wh..opq"), file("lib/n", "2"))),
        {"usr": "d", "usr/lib": "d", "usr/lib/a": "f:1", "lib": "d", "lib/n": "f:2"},
    ),
    Case(
        "opaque before the directory in the place of a link",
        (USR, (file("lib/.wh..wh..opq"), folder("lib"), file("lib/n", "2"))),
        {"usr": "d", "usr/lib": "d", "usr/lib/a": "f:1", "lib": "d", "lib/n": "f:2"},
    ),
    Case(
        "notes of aufs are no files",
        ((file(".wh..wh.aufs"), folder(".wh..wh.plnk"), file(".wh..wh.plnk/1.2")),),
        {},
    ),
    Case("file over file", (LOWER[:2], (file("d/a", "2"),)), {"d": "d", "d/a": "f:2"}),
    Case("file over a full directory", (LOWER, (file("d", "2"),)), {"d": "f:2"}),
    Case("directory over file", ((file("a", "1"),), (folder("a"), file("a/n", "2"))), {"a": "d", "a/n": "f:2"}),
    Case("directory over directory keeps what is in it", (LOWER[:2], (folder("d"),)), {"d": "d", "d/a": "f:1"}),
    Case(
        "file over a link: its target stays",
        ((file("a", "1"), link("b", "a")), (file("b", "2"),)),
        {
            "a": "f:1",
            "b": "f:2",
        },
    ),
    Case(
        "file over a link, in one layer",
        ((file("a", "1"), link("b", "a"), file("b", "2")),),
        {"a": "f:1", "b": "f:2"},
    ),
    Case("link over a full directory", ((*LOWER, folder("e")), (link("d", "e"),)), {"d": "l:e", "e": "d"}),
    Case("link over a link", ((link("a", "x"),), (link("a", "y"),)), {"a": "l:y"}),
    Case(
        "entries through a linked parent",
        (USR, (file("lib/n", "2"),)),
        {
            "usr": "d",
            "usr/lib": "d",
            "usr/lib/a": "f:1",
            "usr/lib/n": "f:2",
            "lib": "l:usr/lib",
        },
    ),
    Case(
        "entries through a linked parent, in one layer",
        ((*USR, file("lib/n", "2")),),
        {
            "usr": "d",
            "usr/lib": "d",
            "usr/lib/a": "f:1",
            "usr/lib/n": "f:2",
            "lib": "l:usr/lib",
        },
    ),
    Case(
        "entries through a link to nowhere",
        ((link("lib", "/usr/lib"), file("lib/n", "2")),),
        {
            "usr": "d",
            "usr/lib": "d",
            "usr/lib/n": "f:2",
            "lib": "l:/usr/lib",
        },
    ),
    Case(
        "entries through a link out of the tree stay inside",
        ((link("up", "../../../tmp"), file("up/n", "2")),),
        {
            "tmp": "d",
            "tmp/n": "f:2",
            "up": "l:../../../tmp",
        },
    ),
    Case(
        "a file is the parent: a later layer makes a directory",
        ((file("a", "1"),), (file("a/n", "2"),)),
        {
            "a": "d",
            "a/n": "f:2",
        },
    ),
    Case(
        "hard link to a lower layer's file", (LOWER[:2], (hard("h", "d/a"),)), {"d": "d", "d/a": "f:1", "h": "f:1"}
    ),
    Case("hard link outlives its whiteout", ((file("a", "1"), hard("h", "a")), (file(".wh.a"),)), {"h": "f:1"}),
    Case(
        "hard link keeps the old content",
        ((file("a", "1"), hard("h", "a")), (file("a", "2"),)),
        {
            "a": "f:2",
            "h": "f:1",
        },
    ),
    Case("hard link to a link is a link", ((link("l", "x"), hard("h", "l")),), {"l": "l:x", "h": "l:x"}),
    Case("hard link to itself", ((file("a", "1"), hard("a", "a")),), {"a": "f:1"}),
    Case(
        "hard link through a linked parent",
        (USR, (hard("h", "lib/a"),)),
        {
            "usr": "d",
            "usr/lib": "d",
            "usr/lib/a": "f:1",
            "lib": "l:usr/lib",
            "h": "f:1",
        },
    ),
    Case(
        "fifo and device",
        ((entry("p", tarfile.FIFOTYPE), entry("c", tarfile.CHRTYPE, devmajor=1, devminor=3)),),
        {
            "p": "p",
            "c": "c:1:3",
        },
    ),
    Case(
        "device over file",
        ((file("a", "1"),), (entry("a", tarfile.CHRTYPE, devmajor=1, devminor=3),)),
        {"a": "c:1:3"},
    ),
    Case(
        "absolute names and dots", ((file("/a/./b", "1"), file("./c", "1")),), {"a": "d", "a/b": "f:1", "c": "f:1"}
    ),
    Case("parents without entries", ((file("a/b/c", "1"),),), {"a": "d", "a/b": "d", "a/b/c": "f:1"}),
    Case("an empty layer", (LOWER[:1], ()), {"d": "d"}),
)
