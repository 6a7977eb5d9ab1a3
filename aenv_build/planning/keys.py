"""Stage keys: what a stage's result depends on, each input by name, hashed.

The rule is that the whole normalised step counts. What does not is in ``EXCLUSIONS``, with its reason; a test
changes every field of every model and expects either another key or an entry here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from aenv_run.snapshot import MemoryFacts
from aenv_run.types import Architecture, Digest, StageKey

EXCLUSIONS: Mapping[str, str] = {
    "Step.id": "a name for people; renaming a step changes no file",
    "Step.needs": "the state parent counts by its key; the other entries only say what runs first",
    "Step.timeout": "says when to give up; a step that ended in time has the same result",
    "Step.cache": "saves a step's work, and must not change what comes of it",
    "Step.secrets": "the names count where a step has any; the values never: a key must not tell them",
    "Step.retry": "says how often to try; a try that held has the same result as the first would have had",
    "Step.ttl": "says when a result is too old; it is compared with the result's age, not with its key",
    "Copy.ignore": "what it hides is not copied, and what is copied counts",
    "Step.expand": "what comes of it counts: the environment of each command that it is for",
    "Step.base": "counts as a base does: the image's digest, the snapshot's id, the content of the archive",
    "Run.timeout": "as Step.timeout",
    "Verify.timeout": "as Step.timeout",
    "Recipe.name": "one state may have many names",
    "Recipe.vars": "a var counts where a step refers to it: in the rendered text",
    "Machine.cpus": "files of a step do not depend on it by intent; it counts where memory is captured",
    "Machine.memory": "as Machine.cpus",
    "Output.name": "as Recipe.name",
    "Output.tags": "as Recipe.name",
    "guest kernel, driver": "a disk runs under any driver; they count where memory is captured",
}


@dataclass(frozen=True)
class HostFacts:
    """What of this node counts: the architecture, the guest daemon, and what memory images are bound to."""

    architecture: Architecture
    envd_digest: Digest
    memory: MemoryFacts | None = None


@dataclass(frozen=True)
class Inputs:
    """Named inputs as JSON text; ``key`` is the digest of all."""

    values: Mapping[str, str]

    @property
    def key(self) -> StageKey:
        """sha256 of the canonical form."""
        text = json.dumps(dict(self.values), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return StageKey(hashlib.sha256(text.encode()).hexdigest())

    def differences(self, former: Mapping[str, str]) -> list[str]:
        """The names of inputs that changed, appeared or went, in order."""
        names = sorted({*self.values, *former})
        return [name for name in names if self.values.get(name) != former.get(name)]


def inputs(kind: str, version: int, **values: object) -> Inputs:
    """Inputs of a stage of that kind; raise ``version`` when its meaning changes, so that old results miss."""
    named: dict[str, object] = {"type": f"aenv.{kind}/{version}", **values}
    return Inputs({name: _json(value) for name, value in named.items()})


def fields(model: BaseModel) -> dict[str, object]:
    """All fields of the model that count, by their names in a recipe."""
    kind = type(model).__name__
    dump = model.model_dump(mode="json", by_alias=True)
    return {name: value for name, value in dump.items() if f"{kind}.{name}" not in EXCLUSIONS}


def _json(value: object) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
