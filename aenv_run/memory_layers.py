"""RAM as a base file and layers of pages above it: the layer file's format, and what the whole is made of.

The bytes of a layer file are described in docs/snapshot-format.md. Layers come out of a repository, so nothing
in one is believed before it was checked.
"""

from __future__ import annotations

import os
import stat
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aenv_run.errors import CorruptData

PAGE = 4096
MAGIC = b"aenv.ram"
VERSION = 1
#: magic, version, bytes of RAM, number of runs, offset of the table; the rest of the first page is zero.
HEADER = struct.Struct("<8s4Q")
ENTRY_WORDS = 3
#: No layer has more: each is a mapping in each machine above it, of which the kernel allows 65530.
MAX_RUNS = 4096
#: Clean pages between dirty ones that are stored too, so that there are fewer runs (measured: see the decision).
GAP_BYTES = 4 * PAGE


@dataclass(frozen=True, slots=True)
class Run:
    """``length`` bytes from ``offset`` of guest RAM, whole pages."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """Where it ends."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Piece:
    """``length`` bytes from ``offset`` of guest RAM are those from ``file_offset`` of ``file``."""

    offset: int
    length: int
    file: Path
    file_offset: int

    def cut(self, offset: int, end: int) -> Piece:
        """The part of it between two RAM offsets within it."""
        return Piece(offset, end - offset, self.file, self.file_offset + offset - self.offset)


def coalesce(runs: Sequence[Run], most: int = MAX_RUNS) -> list[Run]:
    """The same runs with small gaps filled: of ``GAP_BYTES``, or of as much as leaves at most ``most`` runs."""
    gap = GAP_BYTES
    while True:
        joined: list[Run] = []
        for run in runs:
            if joined and run.offset - joined[-1].end <= gap:
                joined[-1] = Run(joined[-1].offset, run.end - joined[-1].offset)
            else:
                joined.append(run)
        if len(joined) <= most:
            return joined
        gap *= 2


def finish_layer(descriptor: int, ram_bytes: int, runs: Sequence[Run]) -> None:
    """Add table and header to a file that has the pages of ``runs``, one after the other, from its second page."""
    table = array("Q")
    at = PAGE
    for run in runs:
        table.extend((run.offset, run.length, at))
        at += run.length
    if sys.byteorder == "big":
        table.byteswap()
    _write(descriptor, table.tobytes(), at)
    _write(descriptor, HEADER.pack(MAGIC, VERSION, ram_bytes, len(runs), at).ljust(PAGE, b"\0"), 0)


def _write(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def read_layer(path: Path, ram_bytes: int) -> list[Piece]:
    """A layer file's pieces in order of their RAM offsets; ``CorruptData`` unless every byte has its place."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise _damaged(path, f"it cannot be opened: {error.strerror}") from error
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size < PAGE:
            raise _damaged(path, "it is shorter than its header")
        header = os.pread(descriptor, PAGE, 0)
        magic, version, ram, count, table_at = HEADER.unpack_from(header)
        if magic != MAGIC or version != VERSION or any(header[HEADER.size :]):
            raise _damaged(path, f"it does not begin as a memory layer of version {VERSION}")
        if ram != ram_bytes:
            raise _damaged(path, f"it is of a machine with {ram} bytes of RAM instead of {ram_bytes}")
        table_bytes = count * ENTRY_WORDS * 8
        if count > MAX_RUNS or table_at + table_bytes != facts.st_size:
            raise _damaged(path, f"its table ({count} runs at {table_at}) does not fit its size {facts.st_size}")
        table = array("Q", os.pread(descriptor, table_bytes, table_at))
    finally:
        os.close(descriptor)
    if len(table) != count * ENTRY_WORDS:
        raise _damaged(path, "it became shorter")
    if sys.byteorder == "big":
        table.byteswap()
    return _checked(path, table, ram_bytes, table_at)


def _checked(path: Path, table: array[int], ram_bytes: int, table_at: int) -> list[Piece]:
    pieces: list[Piece] = []
    end, at = 0, PAGE
    for index in range(0, len(table), ENTRY_WORDS):
        offset, length, file_offset = table[index : index + ENTRY_WORDS]
        if offset % PAGE or length % PAGE or not length:
            raise _damaged(path, f"run {len(pieces)} is not whole pages")
        if offset < end or offset + length > ram_bytes:
            raise _damaged(path, f"run {len(pieces)} overlaps the one before or ends outside the RAM")
        if file_offset != at:
            raise _damaged(path, f"the pages of run {len(pieces)} do not follow those of the one before")
        pieces.append(Piece(offset, length, path, file_offset))
        end, at = offset + length, at + length
    if at != table_at:
        raise _damaged(path, "its table does not follow its pages")
    return pieces


def _damaged(path: Path, why: str) -> CorruptData:
    return CorruptData(f"memory layer {path} is damaged: {why}", fix="boot the snapshot cold from its disk")


def compose(base: Path, ram_bytes: int, layers: Iterable[Sequence[Piece]]) -> list[Piece]:
    """What RAM is made of: pieces in order that cover it exactly. ``layers`` oldest first; the newest wins."""
    whole = [Piece(0, ram_bytes, base, 0)]
    for layer in layers:
        whole = _overlay(whole, layer)
    return whole


def _overlay(below: Sequence[Piece], above: Sequence[Piece]) -> list[Piece]:
    """``above`` over ``below``, which covers all RAM: one pass over both."""
    result: list[Piece] = []
    rest = iter(below)
    piece = next(rest, None)
    for top in above:
        while piece is not None and piece.offset < top.offset:
            end = piece.offset + piece.length
            _append(result, piece if end <= top.offset else piece.cut(piece.offset, top.offset))
            piece = next(rest, None) if end <= top.offset else piece.cut(top.offset, end)
        top_end = top.offset + top.length
        while piece is not None and piece.offset + piece.length <= top_end:
            piece = next(rest, None)
        if piece is not None and piece.offset < top_end:
            piece = piece.cut(top_end, piece.offset + piece.length)
        _append(result, top)
    while piece is not None:
        _append(result, piece)
        piece = next(rest, None)
    return result


def _append(pieces: list[Piece], piece: Piece) -> None:
    """Neighbours in RAM that are neighbours in one file become one: a mapping less."""
    if pieces:
        last = pieces[-1]
        if last.file == piece.file and last.file_offset + last.length == piece.file_offset:
            pieces[-1] = Piece(last.offset, last.length + piece.length, last.file, last.file_offset)
            return
    pieces.append(piece)


def runs_above(base: Path, whole: Sequence[Piece]) -> list[Run]:
    """The runs of ``whole`` (see ``compose``) that are not the base's."""
    runs: list[Run] = []
    for piece in whole:
        if piece.file == base:
            continue
        if runs and runs[-1].end == piece.offset:
            runs[-1] = Run(runs[-1].offset, runs[-1].length + piece.length)
        else:
            runs.append(Run(piece.offset, piece.length))
    return runs


def slices(whole: Sequence[Piece], runs: Iterable[Run]) -> list[Piece]:
    """The parts of ``whole`` (which covers all RAM) that lie in ``runs``, in order."""
    parts: list[Piece] = []
    index = 0
    for run in runs:
        while whole[index].offset + whole[index].length <= run.offset:
            index += 1
        at = run.offset
        while at < run.end:
            piece = whole[index]
            end = min(piece.offset + piece.length, run.end)
            parts.append(piece.cut(at, end))
            at = end
            if end == piece.offset + piece.length:
                index += 1
    return parts
