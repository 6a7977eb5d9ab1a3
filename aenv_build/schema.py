"""The recipe's JSON Schema, for editors: what the models say, and the short forms beside them."""

from __future__ import annotations

import json
from typing import Any

from aenv_build.recipe import Recipe, Step

_WORDS: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


def recipe_schema() -> dict[str, Any]:  # Any: JSON Schema is free-form
    """JSON Schema of a recipe as written (before vars are filled in)."""
    schema = Recipe.model_json_schema(by_alias=True)
    step = schema["$defs"]["Step"]
    for verb in ("run", "start", "verify", "ready"):
        step["properties"][verb]["anyOf"][:0] = _WORDS["anyOf"]
    step["required"] = []
    step["oneOf"] = [{"required": [verb]} for verb in Step.VERBS]
    schema["required"] = ["version", "name", "base"]
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "aenv recipe"
    return schema


def recipe_schema_text() -> str:
    """The content of schemas/recipe.schema.json."""
    return json.dumps(recipe_schema(), indent=2, sort_keys=True) + "\n"
