"""Write schemas/*.schema.json from the models; ``--check`` only says which are out of date.

To add a schema, add a row to ``SCHEMAS``. A test compares the files with this.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pydantic import TypeAdapter

from aenv_build.language.recipe import Recipe
from aenv_build.planning.lock import Lock
from aenv_build.reports.events import BuildEvent
from aenv_run.catalog import LabelsRecord, MovesPage, RemovedRecord, TagRecord, VersionRecord
from aenv_run.snapshot import Snapshot

CHECKOUT = Path(__file__).resolve().parent.parent
#: (file below schemas/, title, model or union of models)
SCHEMAS: list[tuple[str, str, object]] = [
    ("recipe.schema.json", "Recipe", Recipe),
    ("events.schema.json", "Build event: one line of --events json", BuildEvent),
    ("lock.schema.json", "recipe.lock", Lock),
    ("snapshot.schema.json", "Snapshot manifest", Snapshot),
    (
        "catalog.schema.json",
        "Catalog refs: version, tag, moves of a tag, labels, removal",
        VersionRecord | TagRecord | MovesPage | LabelsRecord | RemovedRecord,
    ),
]


def rendered(title: str, model: object) -> str:
    """The file's text: stable order, ends with a newline."""
    schema = TypeAdapter(model).json_schema(mode="validation")
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps({**head, **schema, "title": title}, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def outdated(directory: Path) -> list[str]:
    """Names of the files that are missing or differ from their models."""
    return [
        name
        for name, title, model in SCHEMAS
        if not (directory / name).exists() or (directory / name).read_text() != rendered(title, model)
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 when a file is out of date")
    directory = CHECKOUT / "schemas"
    stale = outdated(directory)
    if parser.parse_args().check:
        sys.exit(f"out of date: {', '.join(stale)}; run python -m scripts.gen_schemas" if stale else 0)
    directory.mkdir(exist_ok=True)
    for name, title, model in SCHEMAS:
        if name in stale:
            (directory / name).write_text(rendered(title, model))


if __name__ == "__main__":
    main()
