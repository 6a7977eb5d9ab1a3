"""``matrix``: one build for each cell. The rules of ``include`` and ``exclude`` are those of GitHub Actions."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aenv_build.language.document import Data, Document, Where, nearest
from aenv_run.errors import InvalidInput

#: Counted before any cell is made.
MAX_CELLS = 256
#: Of the recipe, in all cells together: each cell is a whole recipe in memory.
MAX_VALUES = 1_000_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_INCLUDE, _EXCLUDE = "include", "exclude"


@dataclass(frozen=True)
class Cell:
    """One combination. A recipe without a matrix is one cell without values."""

    values: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """As ``--cell`` takes it."""
        return ",".join(f"{name}={value}" for name, value in self.values.items())

    def has(self, some: Mapping[str, str]) -> bool:
        """Whether all of these are its values."""
        return some.items() <= self.values.items()


def cells_of(document: Document) -> tuple[Cell, ...]:
    """The cells in the order of the recipe, those that ``include`` adds last."""
    if "matrix" not in document.data:
        return (Cell(),)
    matrix = document.data["matrix"]
    if not isinstance(matrix, dict) or not matrix:
        raise document.error(("matrix",), "matrix is a mapping of names to lists of values")
    axes = {
        name: _values(document, name, values)
        for name, values in matrix.items()
        if name not in {_INCLUDE, _EXCLUDE}
    }
    added, dropped = _entries(document, matrix, _INCLUDE), _entries(document, matrix, _EXCLUDE)
    number = (math.prod(map(len, axes.values())) if axes else 0) + len(added)
    if number > MAX_CELLS:
        raise document.error(
            ("matrix",),
            f"the matrix has {number} cells; there are at most {MAX_CELLS}",
            fix="split the recipe, or give the matrix fewer values",
        )
    if number * len(document.marks) > MAX_VALUES:
        raise document.error(
            ("matrix",),
            f"{number} cells of {len(document.marks)} values are more than {MAX_VALUES} values together",
            fix="split the recipe, or give the matrix fewer values",
        )
    _check_excluded(document, axes, dropped)
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    cells = [each for each in combinations if axes and not any(drop.items() <= each.items() for drop in dropped)]
    cells = _extended(cells, axes, added)
    if not cells:
        raise document.error(("matrix",), "no cell of the matrix is left")
    for position, cell in enumerate(cells):
        if cell in cells[:position]:
            raise document.error(("matrix", _INCLUDE), f"the cell {Cell(cell)} is there twice")
    return tuple(map(Cell, cells))


def chosen(cells: Sequence[Cell], wanted: Sequence[str], file: str) -> tuple[Cell, ...]:
    """Those that a ``--cell NAME=VALUE[,NAME=VALUE…]`` names; all without any."""
    if not wanted:
        return tuple(cells)
    found: set[int] = set()
    for text in wanted:
        pairs = [part.partition("=") for part in text.split(",")]
        if not all(name and equals for name, equals, _ in pairs):
            raise InvalidInput(f"--cell {text}: write NAME=VALUE or NAME=VALUE,NAME=VALUE")
        some = {name: value for name, _, value in pairs}
        matching = {position for position, cell in enumerate(cells) if cell.has(some)}
        if not matching:
            known = [str(cell) for cell in cells if cell.values]
            hint = nearest(text, known) if known else "the recipe has no matrix"
            raise InvalidInput(f"--cell {text}: {file} has no such cell ({hint})")
        found |= matching
    return tuple(cells[position] for position in sorted(found))


def _values(document: Document, name: str, values: Data) -> list[str]:
    where: Where = ("matrix", name)
    if not _NAME.fullmatch(name):
        message = (
            f"{name!r} is no name for a matrix: write letters, digits and '_', as {{{{ matrix.NAME }}}} takes"
        )
        raise document.error(where, message, key=True)
    if not isinstance(values, list) or not values:
        raise document.error(where, f"{name} must be a list of values")
    found: list[str] = []
    for position, value in enumerate(values):
        if not isinstance(value, str):
            raise document.error((*where, position), f"a value of {name} is text")
        if value in found:
            raise document.error((*where, position), f"{value!r} stands here twice")
        found.append(value)
    return found


def _entries(document: Document, matrix: Mapping[str, Data], key: str) -> list[dict[str, str]]:
    listed = matrix.get(key, [])
    if not isinstance(listed, list):
        raise document.error(("matrix", key), f"{key} is a list of mappings of names to values")
    entries: list[dict[str, str]] = []
    for position, entry in enumerate(listed):
        where: Where = ("matrix", key, position)
        if not isinstance(entry, dict) or not entry:
            raise document.error(where, f"{key} is a list of mappings of names to values")
        found: dict[str, str] = {}
        for name, value in entry.items():
            if not _NAME.fullmatch(name) or not isinstance(value, str):
                raise document.error((*where, name), f"{name}: a value of the matrix is text", key=True)
            found[name] = value
        entries.append(found)
    return entries


def _check_excluded(document: Document, axes: Mapping[str, list[str]], dropped: Sequence[dict[str, str]]) -> None:
    """A misspelt exclude would exclude nothing, in silence."""
    for position, entry in enumerate(dropped):
        for name, value in entry.items():
            where: Where = ("matrix", _EXCLUDE, position, name)
            if name not in axes:
                raise document.error(where, f"the matrix has no {name!r}; {nearest(name, axes)}", key=True)
            if value not in axes[name]:
                raise document.error(where, f"{name} has no value {value!r}; {nearest(value, axes[name])}")


def _extended(
    cells: list[dict[str, str]], axes: Mapping[str, list[str]], added: Sequence[dict[str, str]]
) -> list[dict[str, str]]:
    """An entry adds its values to each cell none of whose own values it would change, else it is a new cell."""
    extended = [dict(cell) for cell in cells]
    new: list[dict[str, str]] = []
    for entry in added:
        own = {name: value for name, value in entry.items() if name in axes}
        matching = [position for position, cell in enumerate(cells) if own.items() <= cell.items()]
        for position in matching:
            extended[position].update(entry)
        if not matching:
            new.append(dict(entry))
    return [*extended, *new]
