"""Finding versions by their labels and by words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aenv_run.catalog.entries import Entry
from aenv_run.catalog.names import Catalog
from aenv_run.errors import InvalidInput
from aenv_run.types import Model


class Hit(Model):
    """A version, and where each of the words stands: in its name, tag, recipe, base or a label."""

    entry: Entry
    found_in: tuple[str, ...]


def with_labels(entries: Sequence[Entry], wanted: Sequence[str]) -> list[Entry]:
    """Those that have every label of ``wanted``: ``key=value``, or ``key`` with any value."""
    if any(not one.partition("=")[0] for one in wanted):
        raise InvalidInput("a label without a key", fix="write --label KEY=VALUE or --label KEY")
    return [entry for entry in entries if all(_has(entry.labels, one) for one in wanted)]


def search(catalog: Catalog, text: str) -> list[Hit]:
    """Versions in which every word of ``text`` stands somewhere, whatever its case; by name and version."""
    words = text.lower().split()
    if not words:
        raise InvalidInput("nothing to search for", fix="give a word, such as python")
    hits = []
    for entry in catalog.entries():
        places = _places(entry)
        found = [next((place for place, said in places if word in said.lower()), None) for word in words]
        if all(found):
            hits.append(Hit(entry=entry, found_in=tuple(dict.fromkeys(place for place in found if place))))
    return hits


def _has(labels: Mapping[str, str], wanted: str) -> bool:
    key, separator, value = wanted.partition("=")
    return key in labels and (not separator or labels[key] == value)


def _places(entry: Entry) -> list[tuple[str, str]]:
    places = [("name", str(entry.name)), *(("tag", str(tag)) for tag in entry.tags)]
    if entry.recipe_name:
        places.append(("recipe", entry.recipe_name))
    if entry.built is not None:
        places.append(("base", entry.built.base))
    return places + [(f"label {key}", f"{key}={value}") for key, value in sorted(entry.labels.items())]
