"""A builder as a program: tells aenv-build's events for a recipe, runs nothing, publishes ``tiny`` by its name.

What a step's command says decides what happens: ``fail``, ``late``, ``hang``, ``talk``, ``die``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def tell(**event: object) -> None:
    print(json.dumps(event), file=sys.stderr, flush=True)


def main() -> int:
    recipe_path = Path(sys.argv[2])
    recipe = json.loads(recipe_path.read_text())
    (recipe_path.parent / "seen.json").write_text(
        json.dumps({"argv": sys.argv, "auth": _auth(), "variables": sorted(os.environ)})
    )
    tell(event="build_started", total=1 + len(recipe["steps"]), hits=0, recipe=recipe["name"])
    for step in recipe["steps"]:
        words = " ".join(step.get("run", {}).get("command", []))
        tell(event="stage_started", step=step["id"], position=1, what="?", why="")
        if words.endswith(" talk"):
            for number in range(250):
                tell(event="stage_output", step=step["id"], text=f"line {number}")
        if words.endswith(" hang"):
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
            while True:
                time.sleep(0.05)
        if words.endswith(" die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if words.endswith(" fail"):
            tell(event="stage_failed", step=step["id"], position=1, what="?", message="exited with 3")
            tell(event="build_failed", code="step_failed", exit_code=1, message="exited with 3", fix="")
            return 1
        if words.endswith(" late"):
            message = f"{recipe_path}:5:12: the disk is full"
            tell(event="build_failed", code="no_space", exit_code=73, message=message, fix="free some")
            print(f"error: {message}", file=sys.stderr)
            return 73
        tell(event="stage_finished", step=step["id"], position=1, what="?", milliseconds=1)
    return publish(recipe, Path(sys.argv[sys.argv.index("--home") + 1]))


def publish(recipe: dict[str, Any], home: Path) -> int:
    from aenv_run.catalog import Catalog  # a second, which one that fails does without
    from aenv_run.config import open_repository
    from aenv_run.paths import Home
    from aenv_run.types import Name, Tag

    catalog = Catalog(open_repository(None, Home(home)))
    tiny = catalog.resolve("tiny").snapshot_id
    (output,) = recipe["outputs"]
    version = catalog.publish(Name(recipe["name"]), tiny, [Tag(tag) for tag in output["tags"]])
    tell(
        event="output_published", name=recipe["name"], version=str(version), tags=output["tags"], snapshot_id=tiny
    )
    return 0


def _auth() -> str | None:
    path = os.environ.get("REGISTRY_AUTH_FILE")
    return Path(path).read_text() if path else None


if __name__ == "__main__":
    sys.exit(main())
