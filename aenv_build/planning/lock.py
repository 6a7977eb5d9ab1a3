"""``recipe.lock``: what the moving names of a recipe meant when it was locked. A value; it resolves nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import Field, ValidationError

from aenv_run import durable
from aenv_run.errors import Conflict, NotFound, RecipeError, from_os
from aenv_run.types import Model

MAX_BYTES = 1 << 20
FIX = "if it should mean what it means today, lock it again: aenv-build lock"

#: What a name is of: its pin is a digest (image, archive, release), a snapshot's id, or a commit.
PinKind: TypeAlias = Literal["image", "archive", "snapshot", "release", "git"]


class Pin(Model):
    """One name, as the recipe has it, and what it meant."""

    kind: PinKind
    name: str = Field(description="of a release: mirror and suite; of git: url and ref")
    pin: str = Field(pattern=r"^(sha256:)?[0-9a-f]{40,64}$")


class Lock(Model):
    """All pins of a recipe, in order of kind and name."""

    format: Literal["aenv.lock/1"] = "aenv.lock/1"
    pins: tuple[Pin, ...] = ()

    @classmethod
    def of(cls, pins: Iterable[Pin]) -> Lock:
        """Each name once."""
        found = {(pin.kind, pin.name): pin for pin in pins}
        return cls(pins=tuple(found[key] for key in sorted(found)))

    def find(self, kind: PinKind, name: str) -> str | None:
        """The pin of a name."""
        return next((pin.pin for pin in self.pins if (pin.kind, pin.name) == (kind, name)), None)

    def text(self) -> str:
        """The file: one pin a line, so that a diff shows which moved."""
        rows = ",\n".join(f"    {json.dumps(pin.model_dump(), ensure_ascii=False)}" for pin in self.pins)
        body = f"[\n{rows}\n  ]" if rows else "[]"
        return f'{{\n  "format": "{self.format}",\n  "pins": {body}\n}}\n'


def lock_path(recipe: Path) -> Path:
    """Beside the recipe, ``recipe.lock``."""
    return recipe.with_suffix(".lock")


def read_lock(recipe: Path) -> Lock | None:
    """The recipe's lock, or None where it has none."""
    path = lock_path(recipe)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise from_os(error, f"cannot read {path}") from error
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES >> 10} KiB")
        return Lock.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _unreadable(path, f"{where}: {first['msg']}") from None
    except ValueError as error:
        raise _unreadable(path, str(error)) from None


def write_lock(recipe: Path, lock: Lock) -> Path:
    """Write it whole; its path."""
    path = lock_path(recipe)
    try:
        durable.replace(path, lock.text().encode())
        path.chmod(0o644)
    except OSError as error:
        raise from_os(error, f"cannot write {path}") from error
    return path


def require_same(recipe: Path, locked: Lock | None, now: Lock, *, whole: bool = True) -> None:
    """``--locked``: ``Conflict`` names each pin that is missing, left over or means something else today.

    ``now`` is of some cells only where it is not ``whole``: then nothing can be said to be left over.
    """
    path = lock_path(recipe)
    if locked is None:
        raise NotFound(f"--locked, and there is no {path}", fix="write it: aenv-build lock, and commit it")
    before = {(pin.kind, pin.name): pin.pin for pin in locked.pins}
    after = {(pin.kind, pin.name): pin.pin for pin in now.pins}
    lines = []
    for kind, name in sorted({*before, *after}):
        was, found = before.get((kind, name)), after.get((kind, name))
        if was is None:
            lines.append(f"  {kind} {name} is not locked; today it is {found}")
        elif found is None and whole:
            lines.append(f"  {kind} {name} is locked, and nothing in the recipe is called so")
        elif found is not None and was != found:
            lines.append(f"  {kind} {name} is locked to {was}; today it is {found}")
    if lines:
        raise Conflict(f"{path} does not hold what the recipe means today:\n" + "\n".join(lines), fix=FIX)


def _unreadable(path: Path, why: str) -> RecipeError:
    return RecipeError(f"{path}:1:1: this is no lock: {why}", fix="write it anew: aenv-build lock")
