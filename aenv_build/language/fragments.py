"""``include``: fragments of recipes (vars, env, steps) become part of the recipe, each value with its own mark.

A recipe may come from a stranger's pull request: a fragment lies inside the recipe's folder (or one that the
caller allows), links followed, and number and depth are bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from aenv_build.language.document import Document, Where, nearest, read_document

MAX_DEPTH = 8
MAX_FRAGMENTS = 64
KEYS = ("version", "include", "vars", "env", "steps")
_MAPPINGS = ("vars", "env")
_OWN = (*_MAPPINGS, "steps")

T = TypeVar("T")


def read_recipe(path: Path, roots: Sequence[Path] = ()) -> Document:
    """The recipe with what it includes. ``roots``: folders beside the recipe's that fragments may lie in."""
    document = read_document(path)
    if "include" not in document.data:
        return document
    reader = _Reader(document, [folder.resolve() for folder in (path.absolute().parent, *roots)])
    reader.include(document, path.resolve(), [path.resolve()])
    return reader.whole()


class _Reader:
    """Collects fragments in the order in which they count: what is included before what includes it."""

    def __init__(self, recipe: Document, roots: Sequence[Path]) -> None:
        self._recipe = recipe
        self._roots = roots
        self._parts: list[Document] = []
        self._seen: set[Path] = set()

    def include(self, document: Document, path: Path, chain: list[Path]) -> None:
        """All that the document names, then the document itself."""
        for where, name in _names(document):
            found = self._find(document, where, path.parent, name)
            if found in chain:
                ring = " includes ".join(each.name for each in [*chain[chain.index(found) :], found])
                raise document.error(where, f"fragments include each other in a circle: {ring}")
            if len(chain) > MAX_DEPTH:
                raise document.error(where, f"fragments include each other deeper than {MAX_DEPTH} levels")
            if found in self._seen:
                continue  # reached twice, it counts once
            self._seen.add(found)
            if len(self._seen) > MAX_FRAGMENTS:
                raise document.error(where, f"a recipe includes at most {MAX_FRAGMENTS} fragments")
            fragment = _checked(read_document(found, shown=self._shown(found)))
            self.include(fragment, found, [*chain, found])
        self._parts.append(document)

    def _shown(self, found: Path) -> str:
        """How messages name it: as the recipe is named, where it lies below its folder."""
        folder = self._roots[0]
        if found.is_relative_to(folder):
            return str(Path(self._recipe.file).parent / found.relative_to(folder))
        return str(found)

    def _find(self, document: Document, where: Where, folder: Path, name: str) -> Path:
        found = (folder / name).resolve()
        if Path(name).is_absolute() or not any(found.is_relative_to(root) for root in self._roots):
            raise document.error(
                where,
                f"{name!r} is outside the recipe's folder",
                fix="put the fragment below it, or allow its folder: --include-root FOLDER",
            )
        if not found.is_file():
            raise document.error(
                where, f"no such file: {name}", fix=f"the path is relative to the folder of {document.file}"
            )
        return found

    def whole(self) -> Document:
        """One document: steps in order; of vars and env the one that includes wins over what it includes."""
        data = {key: value for key, value in self._recipe.data.items() if key not in _OWN}
        marks = {at: mark for at, mark in self._recipe.marks.items() if not at or at[0] not in _OWN}
        whole = replace(
            self._recipe,
            data=data,
            marks=marks,
            key_marks=dict(self._recipe.key_marks),
            files={name: file for part in self._parts for name, file in part.files.items()},
        )
        for part in self._parts:
            whole = _joined(whole, part)
        return whole


def _joined(whole: Document, part: Document) -> Document:
    data, marks, key_marks = dict(whole.data), dict(whole.marks), dict(whole.key_marks)
    blocks = set(whole.blocks)
    for key in _OWN:
        if key not in part.data:
            continue
        new, kept = part.data[key], data.get(key)
        offset = len(kept) if isinstance(kept, list) else 0
        if isinstance(kept, dict) and isinstance(new, dict):
            gone = {(key, name) for name in new}
            marks = {at: mark for at, mark in marks.items() if at[:2] not in gone}
            blocks = {at for at in blocks if at[:2] not in gone}
            data[key] = {**kept, **new}
        elif isinstance(kept, list) and isinstance(new, list):
            data[key] = [*kept, *new]
        else:
            data[key] = new
        marks |= _moved(part.marks, key, offset)
        key_marks |= _moved(part.key_marks, key, offset)
        blocks |= set(_moved(dict.fromkeys(part.blocks, True), key, offset))
    return replace(whole, data=data, marks=marks, key_marks=key_marks, blocks=frozenset(blocks))


def _moved(places: Mapping[Where, T], key: str, offset: int) -> dict[Where, T]:
    """What stands below the key, with the positions of its items counted on."""
    moved: dict[Where, T] = {}
    for at, value in places.items():
        if at and at[0] == key:
            second = at[1] + offset if len(at) > 1 and isinstance(at[1], int) else None
            moved[at if second is None else (key, second, *at[2:])] = value
    return moved


def _names(document: Document) -> list[tuple[Where, str]]:
    listed = document.data.get("include", [])
    if isinstance(listed, str):
        return [(("include",), listed)]
    if not isinstance(listed, list):
        raise document.error(("include",), "include is a list of paths of fragments")
    names: list[tuple[Where, str]] = []
    for position, name in enumerate(listed):
        where: Where = ("include", position)
        if not isinstance(name, str) or not name:
            raise document.error(where, "include is a list of paths of fragments")
        if "{{" in name or "{%" in name:
            raise document.error(where, "the path of a fragment is no template: it is read before vars count")
        names.append((where, name))
    return names


def _checked(fragment: Document) -> Document:
    for key in fragment.data:
        if key not in KEYS:
            message = f"unknown key {key!r} of a fragment; {nearest(key, KEYS)}"
            raise fragment.error((key,), message, key=True)
    if fragment.data.get("version", 1) != 1:
        raise fragment.error(("version",), "only version 1 of the recipe language exists", fix="write version: 1")
    if not isinstance(fragment.data.get("steps", []), list):
        raise fragment.error(("steps",), "steps must be a list")
    for key in _MAPPINGS:
        if not isinstance(fragment.data.get(key, {}), dict):
            raise fragment.error((key,), f"{key} must be a mapping")
    return fragment
