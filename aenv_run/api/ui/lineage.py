"""A lineage as a picture: where each snapshot stands, for an SVG that needs no other program."""

from __future__ import annotations

from dataclasses import dataclass

from aenv_run.catalog.graph import Graph
from aenv_run.types import SnapshotId

#: Sizes are SVG user units, which a browser shows as CSS pixels.
BOX_WIDTH, BOX_HEIGHT = 260, 44
_ACROSS, _DOWN, _MARGIN = BOX_WIDTH + 40, BOX_HEIGHT + 16, 12


@dataclass(frozen=True)
class Box:
    """A snapshot at its place."""

    id: SnapshotId
    x: int
    y: int
    title: str
    names: str
    is_broken: bool


@dataclass(frozen=True)
class Line:
    """From a parent's right side to its child's left side."""

    x1: int
    y1: int
    x2: int
    y2: int


@dataclass(frozen=True)
class Picture:
    """All of it."""

    width: int
    height: int
    boxes: tuple[Box, ...]
    lines: tuple[Line, ...]


def picture(graph: Graph) -> Picture:
    """Generations from left to right, a row for each leaf: a first child stays in its parent's row."""
    column: dict[SnapshotId, int] = {}
    row: dict[SnapshotId, int] = {}
    taken: dict[SnapshotId, bool] = {}
    rows = 0
    for node in graph.nodes:  # parents before their children
        parent = node.parent if node.parent in column else None
        column[node.id] = 0 if parent is None else column[parent] + 1
        if parent is not None and not taken.get(parent):
            row[node.id], taken[parent] = row[parent], True
        else:
            row[node.id], rows = rows, rows + 1
    boxes = tuple(
        Box(
            node.id,
            _MARGIN + column[node.id] * _ACROSS,
            _MARGIN + row[node.id] * _DOWN,
            node.words[0],
            node.words[1],
            node.problem is not None,
        )
        for node in graph.nodes
    )
    place = {box.id: box for box in boxes}
    lines = tuple(
        Line(
            place[node.parent].x + BOX_WIDTH,
            place[node.parent].y + BOX_HEIGHT // 2,
            place[node.id].x,
            place[node.id].y + BOX_HEIGHT // 2,
        )
        for node in graph.nodes
        if node.parent is not None and node.parent in place
    )
    width = max((box.x for box in boxes), default=0) + BOX_WIDTH + _MARGIN
    return Picture(width, max(rows, 1) * _DOWN + _MARGIN, boxes, lines)
